"""How NCCL makes the process groups of a run: from Megatron's names of groups to axes of the mesh.

`--nccl-communicator-config-path` names a YAML file, `--high-priority-stream-groups` groups:

    tp:
      cga_cluster_size: 2
    dp_cp:
      max_ctas: 16
      is_high_priority_stream: true

Both are checked on every machine, and count where NCCL connects the processes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.utils import UserError, nearest
from megatron.training.process_config import ProcessConfig

FILE_FLAG = "--nccl-communicator-config-path"
PRIORITY_FLAG = "--high-priority-stream-groups"
PRIORITY = "is_high_priority_stream"

AXES: Mapping[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "hcp": ("cp_inner", "cp_outer"),
    "dp": ("dp",),
    "dp_cp": ("dp_cp",),
    "intra_dp_cp": ("dp_cp", "dp_inner"),  # the latter with several instances of the optimizer
    "pp": ("pp",),
    "embd": ("ends",),
    "ep": ("ep",),
    "ep_tp": ("etp",),
    "ep_dp": ("edp",),
    "intra_ep_dp": ("edp", "edp_inner"),  # as above
}
"""The axes of the mesh that stand for a group of Megatron-LM."""

ABSENT = frozenset(
    "mp pos_embd tp_dp_cp tp_dp tp_cp tp_ep_mp tp_ep_pp inter_ep_dp intra_dist_opt_instance "
    "gtp gtp_remat expt_gtp expt_gtp_remat".split()
)
"""Groups of Megatron-LM over which nothing is communicated here."""

_NUMBERS = {"cga_cluster_size": 0, "min_ctas": 1, "max_ctas": 1}
"""Settings that are numbers, with the least that NCCL takes."""

Settings = Mapping[str, Mapping[str, Any]]


def group_settings(config: ProcessConfig) -> Settings:
    """Return the settings of NCCL's communicators by axis.

    Raises:
        UserError: the file cannot be read, or has a group or a setting that does not exist.
    """
    by_group = read_settings(config.nccl_communicator_config_path)
    for name in config.high_priority_stream_groups:
        _check_group(name, PRIORITY_FLAG)
        by_group.setdefault(name, {})[PRIORITY] = True
    by_axis: dict[str, dict[str, Any]] = {}
    for name, settings in by_group.items():
        for axis in AXES.get(name, ()):
            by_axis.setdefault(axis, {}).update(settings)
    return by_axis


def without_group(config: ProcessConfig) -> list[str]:
    """Return what was asked for groups that do not exist here, for `flags without effect`."""
    flags = {PRIORITY_FLAG: config.high_priority_stream_groups}
    if config.nccl_communicator_config_path and Path(config.nccl_communicator_config_path).exists():
        flags[FILE_FLAG] = tuple(read_settings(config.nccl_communicator_config_path))
    absent = {flag: [name for name in names if name in ABSENT] for flag, names in flags.items()}
    return [
        f"{flag}: {', '.join(names)} (nothing is communicated over such a group here)"
        for flag, names in absent.items()
        if names
    ]


def read_settings(path: str | None) -> dict[str, dict[str, Any]]:
    """Return the settings by Megatron's names of groups, checked."""
    if path is None:
        return {}
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{FILE_FLAG} {path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{FILE_FLAG} {path}: not YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{FILE_FLAG} {path}: must hold settings by group, as dp: {{max_ctas: 16}}")
    for name, settings in content.items():
        where = f"{FILE_FLAG} {path}"
        _check_group(str(name), where)
        if not isinstance(settings, dict):
            raise UserError(f"{where}: {name} must hold settings, as {name}: {{max_ctas: 16}}")
        for key, value in settings.items():
            _check_setting(f"{where}: {name}", str(key), value)
        _check_order(f"{where}: {name}", settings)
    return content


def _check_group(name: str, where: str) -> None:
    known = (*AXES, *sorted(ABSENT))
    if name not in known:
        close = nearest(name, known)
        hint = f"did you mean {' or '.join(close)}?" if close else f"choose from {', '.join(AXES)}"
        raise UserError(f"{where}: there is no group {name}; {hint}")


def _check_setting(where: str, key: str, value: Any) -> None:
    if key in _NUMBERS:
        least = _NUMBERS[key]
        if type(value) is not int or value < least:
            raise UserError(f"{where}: {key} is a whole number and at least {least}, not {value!r}")
    elif key == "net_name":
        if not isinstance(value, str) or not value:
            raise UserError(f"{where}: net_name is a name, such as IB or Socket, not {value!r}")
    elif key == PRIORITY:
        if type(value) is not bool:
            raise UserError(f"{where}: {key} is true or false, not {value!r}")
    else:
        known = (*_NUMBERS, "net_name", PRIORITY)
        raise UserError(f"{where}: there is no setting {key}; choose from {', '.join(known)}")


def _check_order(where: str, settings: Mapping[str, Any]) -> None:
    low, high = settings.get("min_ctas"), settings.get("max_ctas")
    if low is not None and high is not None and low > high:
        raise UserError(f"{where}: min_ctas ({low}) is above max_ctas ({high})")
