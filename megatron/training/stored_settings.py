"""Settings that a run takes from the checkpoint it starts from, where a flag asks for them.

--use-checkpoint-args takes those of the model; a run of Megatron-LM's that goes on keeps its
objective. `checkpoints.settings` says which ones a checkpoint decides.
"""

from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.config import Origin
from megatron.core.utils import UserError
from megatron.training.checkpoints import settings
from megatron.training.checkpoints.programs import other_program

StoredConfig = Callable[[str, int | None], Mapping[str, Any] | None]
"""Of a checkpoint folder and an iteration, None for the newest: the flat config stored there."""


def take_stored(
    values: dict[str, Any],
    origins: dict[str, Origin],
    reader: StoredConfig,
    program: str | None = None,
) -> list[str]:
    """Add what a checkpoint stores, if it is asked for; return what there is to say of it.

    Raises:
        UserError: it stores nothing of use, or the settings of another model than the run's, or
            than ``program`` trains.
    """
    if not values.get("use_checkpoint_args"):
        return _keep_objective(values, origins, reader)
    stored = _stored(values, reader)
    if stored is None:
        return ["warning: --use-checkpoint-args: there is no checkpoint to take them from"]
    named = values.get("load") or values.get("pretrained_checkpoint")
    other = other_program(stored, program, f"--use-checkpoint-args: the checkpoint in {named}")
    if other:
        raise UserError(other)
    if "num_layers" not in stored:
        raise UserError(
            f"--use-checkpoint-args: the checkpoint in {named} has stored no settings of its "
            "model; leave the flag out and give the model by its flags"
        )
    reports = settings.merge(values, origins, stored)
    if values.get("use_mp_args_from_checkpoint_args"):
        reports += settings.take_layout(values, origins, stored)
    return reports


def _keep_objective(
    values: dict[str, Any], origins: dict[str, Origin], reader: StoredConfig
) -> list[str]:
    """Let a run of Megatron-LM's that goes on keep its objective."""
    load = values.get("load")
    if "calculate_per_token_loss" in values or not load or values.get("finetune"):
        return []
    if not settings.is_megatrons(load):
        return []
    stored = reader(load, values.get("ckpt_step"))
    return settings.keep_objective(values, origins, stored or {})


def _stored(values: Mapping[str, Any], reader: StoredConfig) -> Mapping[str, Any] | None:
    """Return the config stored where the run will load from, None if it starts from scratch."""
    load, pretrained = values.get("load"), values.get("pretrained_checkpoint")
    if not (load or pretrained):
        raise UserError("--use-checkpoint-args needs --load or --pretrained-checkpoint")
    step = values.get("ckpt_step")
    stored = reader(load, step) if load else None
    if stored is None and pretrained:
        return reader(pretrained, None if load else step)
    return stored


def stored_reader(values: Mapping[str, Any]) -> StoredConfig:
    """Return what reads the config of the run that wrote a checkpoint, wherever this one saves."""
    apart = values.get("non_persistent_global_ckpt_dir")

    def read(folder: str, step: int | None) -> Mapping[str, Any] | None:
        # torch, only where it is needed
        from megatron.training.checkpoints.source import stored_config

        return stored_config(folder, step, apart=apart if folder == values.get("load") else None)

    return read
