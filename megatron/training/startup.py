"""What a run says before its first iteration: where it runs, with which settings, how soon."""

import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from megatron.core import sharding
from megatron.core.config import Origin, as_words
from megatron.core.dist_checkpointing.catalog import TRACKER
from megatron.core.kernels import table
from megatron.core.kernels.probe import INSTALL, lacks_compiled
from megatron.core.mesh import Mesh
from megatron.core.transformer.backends import Backends
from megatron.core.utils import Say, UserError, check_file, check_folder, human_count
from megatron.training.config import RunConfig


class StartupClock:
    """Splits the time to the first iteration into phases."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        # Everything before this object is made: the interpreter's start and its imports.
        self._phases = {"imports": process_age()}

    def lap(self, phase: str) -> None:
        """Put the time since the last lap down to ``phase``."""
        now = time.perf_counter()
        self._phases[phase] = self._phases.get(phase, 0.0) + now - self._last
        self._last = now

    def line(self, first_step: float) -> str:
        """Return the phases and what the first iteration took."""
        self.lap("rest")
        phases = self._phases | {"first step": first_step}
        # The first step ran since the last lap, so it is in the rest already.
        phases["rest"] = max(0.0, phases["rest"] - first_step)
        parts = " | ".join(f"{name}: {seconds:.2f}" for name, seconds in phases.items())
        return f"time to the first iteration (s) | {parts} | total: {sum(phases.values()):.2f}"


def process_age() -> float:
    """Return seconds since this process started; 0 where the system does not tell."""
    try:
        with open("/proc/self/stat", encoding="ascii") as file:
            ticks = int(file.read().rsplit(")", 1)[1].split()[19])
        with open("/proc/uptime", encoding="ascii") as file:
            return float(file.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def environment_lines(mesh: Mesh) -> list[str]:
    """Return lines on the device and the versions."""
    device = str(mesh.device)
    if mesh.device.type == "cuda":
        device += f" ({torch.cuda.get_device_name(mesh.device)})"
    else:
        device += f" ({torch.get_num_threads()} threads)"
    lines = [
        f"device: {device}",
        f"python {platform.python_version()}, torch {torch.__version__}, numpy {numpy.__version__}",
    ]
    if mesh.tp.overlap:
        way = {"symmetric": "through symmetric memory", "ring": "round a ring"}[mesh.tp.overlap]
        lines.append(f"--tp-comm-overlap: {way}")
    return lines


def sharing_lines(config: RunConfig) -> list[str]:
    """Return what replicas share out, in at most one line."""
    shares, strategy = config.shares, config.replicas.data_parallel_sharding_strategy
    if shares == 1:
        return []
    what = {
        "optim": "optimizer states",
        "optim_grads": "optimizer states and gradients",
        "optim_grads_params": "optimizer states, gradients and weights",
    }[strategy]
    groups = config.replicas.num_distributed_optimizer_instances
    held = f", in {groups} groups that hold the same" if groups > 1 else ""
    way = "torch's fully_shard" if config.shared_by_torch else strategy
    return [f"replicas share out {what}: {shares} shares ({way}){held}"]


def kernel_lines(model: nn.Module, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return a line with the backend of each op, and why a package's better one was passed over.

    So it is with one call for all experts where the model's widths do not fit it, and on the CPU
    with kernels in C++ that are not there. The reasons were
    found when the model was built; a package is imported for them at most where another backend
    was asked for by name.
    """
    backends = getattr(model, "backends", None)
    if not isinstance(backends, Backends):  # a program's own model
        return []
    lines = [f"kernels: {', '.join(f'{op}: {name}' for op, name in backends.names.items())}"]
    without: dict[tuple[str, str], list[str]] = {}
    for op, chosen in backends.names.items():
        order = list(table.TABLE[op])
        for name in order[: order.index(chosen)]:
            by_widths = op == "grouped_products" and name in backends.unfit[op]
            on_cuda = (name in INSTALL or by_widths) and device.type == "cuda"
            in_cpp = name == "compiled" and backends.asked[op] in ("auto", "unfused")
            if on_cuda or (in_cpp and lacks_compiled(device, dtype)):
                reason = backends.unfit[op].get(name)
                reason = reason or table.TABLE[op][name].missing(device, dtype)
                without.setdefault((name, reason or "another was asked for"), []).append(op)
    for (name, reason), ops in without.items():
        lines.append(f"  {', '.join(ops)} without {name}: {reason}")
    return lines


def settings_lines(values: Mapping[str, Any], origins: Mapping[str, Origin]) -> list[str]:
    """Return the settings that are not defaults, with where each comes from."""
    shown = {
        name: (values[name], origin)
        for name, origin in origins.items()
        if origin not in ("default", "derived") and name in values
    }
    lines = ["settings that are not defaults:"]
    for name, (value, origin) in shown.items():
        label = f"  {name} ".ljust(48, ".")
        lines.append(f"{label} {as_words(value)}" + (f" ({origin})" if origin != "flag" else ""))
    return lines


def parameters(chunks: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield this rank's parameters; one that two chunks share comes once."""
    yield from nn.ModuleList(chunks).parameters()


def parameter_table(chunks: Iterable[nn.Module]) -> list[str]:
    """Return lines that list this rank's parameters, layers of one shape being listed once."""
    groups: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for parameter in parameters(chunks):
        record = sharding.of(parameter)
        parts = ["*" if part.isdigit() else part for part in record.name.split(".")]
        key = ".".join(parts), tuple(parameter.shape)
        groups.setdefault(key, []).append(parameter.numel())
    width = max(len(name) for name, _ in groups)
    return [
        f"  {name:<{width}}  {'x'.join(map(str, shape)):>14}  x {len(sizes):<3} "
        f"{human_count(sum(sizes)):>9}"
        for (name, shape), sizes in groups.items()
    ]


def check_outputs(config: RunConfig) -> None:
    """Refuse places that the run will write to and cannot, before any work is done.

    Raises:
        UserError: one of them.
    """
    if config.training.skip_train:
        return
    logging = config.logging
    for name, folder in (
        ("--save", config.checkpoint.save),
        ("--tensorboard-dir", logging.tensorboard_dir),
        ("--wandb-save-dir", logging.wandb_save_dir),
    ):
        if folder is not None:
            check_folder(name, folder)
    save = config.checkpoint.save
    if save is not None and (tracker := Path(save) / TRACKER).is_dir():
        raise UserError(f"--save {save}: {tracker} is a folder where a file belongs; remove it")
    if logging.metrics_file is not None:
        check_file("--metrics-file", logging.metrics_file, replaces=False)


def printer(rank: int) -> Say:
    """Return what prints a line at once, on rank 0 only."""
    if rank != 0:
        return lambda line: None
    return lambda line: print(line, flush=True)
