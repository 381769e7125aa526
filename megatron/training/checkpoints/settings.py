"""Which settings a checkpoint decides, and what a flag may still change.

Three kinds of settings. The *architecture* is the checkpoint's: the weights have its shapes, or
mean something else under another choice, so a run that goes on with another one is refused. With
--use-checkpoint-args it comes from the checkpoint, and what is *adopted* too unless it was given;
a difference is reported. All others (layout, schedule, data, logging) are the command line's alone.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.core.config import Origin, Spec, as_json, as_words, specs
from megatron.core.tokenizers.config import TokenizerConfig
from megatron.core.transformer.config import InitConfig, TransformerConfig
from megatron.core.transformer.fusion_config import FusionConfig
from megatron.core.transformer.moe.config import MoEConfig
from megatron.core.transformer.moe.router_config import RouterConfig
from megatron.core.transformer.offload_config import OffloadConfig
from megatron.core.transformer.recompute_config import RecomputeConfig
from megatron.core.utils import Say, UserError
from megatron.training.checkpoints.programs import other_program, program_of
from megatron.training.checkpoints.settings_meaning import BALANCING, same
from megatron.training.config import RunConfig

# Of the transformer's settings, those that weights do not depend on.
CHANGEABLE = (
    "mtp_loss_scaling_factor",
    "label_smoothing",
    "hidden_dropout",
    "attention_dropout",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "fp32_residual_connection",
    "fp16_lm_cross_entropy",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_load_balancing_type",
    "moe_router_bias_update_rate",
    "moe_router_dtype",
    "moe_router_force_load_balancing",
    "moe_input_jitter_eps",
    "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_token_drop_policy",
    "moe_token_dispatcher_type",
    "moe_flex_dispatcher_backend",
    "moe_flex_dispatcher_num_sms",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_router_fusion",
)
# Backends, memory and what goes on beside what are this machine's business; initial values are
# never used after a load.
IGNORED = (
    "attention_backend",
    "transformer_impl",
    "logits_at_once",
    "moe_shared_expert_overlap",
    *specs(RecomputeConfig),
    *specs(OffloadConfig),
    *specs(FusionConfig),
)
# Padded rows belong to a layout, not to the model.
TOKENIZER_IGNORED = ("padded_vocab_size", "make_vocab_size_divisible_by", "pad_vocab_size")
OBJECTIVE = ("calculate_per_token_loss", "seq_length")
LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
)
"""What --use-mp-args-from-checkpoint-args takes."""


def architecture() -> dict[str, Spec]:
    """Return the settings that a checkpoint decides."""
    initial = specs(InitConfig)
    return {
        name: spec
        for name, spec in specs(TransformerConfig).items()
        if name not in CHANGEABLE
        and name not in IGNORED
        and name not in initial
        # The learned table has this many rows; `adopted` has it for other positions.
        and name != "max_position_embeddings"
    }


def _decided() -> dict[str, Spec]:
    """Return what makes another model: the architecture, and a change to sinkhorn or from it."""
    return {**architecture(), BALANCING: specs(TransformerConfig)[BALANCING]}


def adopted() -> dict[str, Spec]:
    """Return the settings that a checkpoint gives unless the user does."""
    run = specs(RunConfig)
    tokenizer = [name for name in specs(TokenizerConfig) if name not in TOKENIZER_IGNORED]
    names = (*CHANGEABLE, "max_position_embeddings", *OBJECTIVE, *tokenizer)
    return {name: run[name] for name in names}


def check_model(
    stored: Mapping[str, Any], config: Mapping[str, Any], folder: Path, warn: Say | None = None
) -> None:
    """Refuse to go on with a model whose weights fit, but which computes something else.

    Args:
        stored: flat config of the run that wrote the checkpoint, as JSON has it.
        config: that of this run, resolved.
        folder: of the checkpoint.
        warn: told what differs, instead of an error.

    Raises:
        UserError: the architecture differs.
    """
    changed = _changed(stored, config)
    if not changed:
        return
    other = other_program(stored, program_of(config), folder)
    message = f"{folder} is of another model: {'; '.join(changed.values())}"
    if warn is None and other:
        raise UserError(other)
    if warn is None:
        raise UserError(
            f"{message}. Give the checkpoint's settings (--use-checkpoint-args takes them from "
            "it), or --finetune to start a run of its own from these weights"
        )
    warn(f"WARNING: {message}")


def explain(
    stored: Mapping[str, Any], config: Mapping[str, Any], folder: Path, *, upcycles: bool
) -> str:
    """Return a line on the flags for which weights do not fit, as far as settings tell; or "".

    Args:
        stored: as for `check_model`.
        config: likewise.
        folder: of the checkpoint.
        upcycles: experts are made of it, so that theirs are no settings of the checkpoint.
    """
    own = {*specs(MoEConfig), *specs(RouterConfig)} if upcycles else set()
    changed = {name: text for name, text in _changed(stored, config).items() if name not in own}
    if not changed:
        return ""
    other = other_program(stored, program_of(config), folder)
    if other:
        return f"{other}\n"
    way_out = "give the checkpoint's settings, or load a checkpoint of this model"
    if "num_experts" in changed and stored["num_experts"] is None:
        way_out += ", or add --moe-use-upcycling, which makes experts of dense MLPs"
    return f"{folder} is of another model: {'; '.join(changed.values())}; {way_out}\n"


def _changed(stored: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, str]:
    """Return what is said of each setting of the architecture that differs."""
    return {
        name: f"{spec.flag} was {_told(stored[name])} and is {_told(config[name])} here"
        for name, spec in _decided().items()
        if name in stored and name in config and not same(name, config[name], stored[name], stored)
    }


def _told(value: Any) -> str:
    return "absent" if value is None else as_words(value)


def merge(
    given: dict[str, Any], origins: dict[str, Origin], stored: Mapping[str, Any]
) -> list[str]:
    """Add the checkpoint's settings to those given, and return lines that report it.

    Both mappings are completed in place; values that come from the checkpoint have that origin.

    Raises:
        UserError: a flag or file contradicts the stored architecture.
    """
    fixed = architecture()
    own: set[str] = set()
    balancing = {BALANCING: specs(TransformerConfig)[BALANCING]}
    if given.get("moe_use_upcycling"):  # experts are this run's, the checkpoint is dense
        own = {*specs(MoEConfig), *specs(RouterConfig)}
        fixed = {name: spec for name, spec in fixed.items() if name not in own}
        balancing = {}
    if stored.get("position_embedding_type") == "learned_absolute":
        fixed["max_position_embeddings"] = specs(TransformerConfig)["max_position_embeddings"]
    conflicts = [
        f"{spec.flag} {as_words(given[name])} ({origins[name]}) but the checkpoint has "
        f"{as_words(stored[name])}"
        for name, spec in {**fixed, **balancing}.items()
        if name in given and name in stored and not same(name, given[name], stored[name], stored)
    ]
    if conflicts:
        raise UserError(
            f"--use-checkpoint-args: {'; '.join(conflicts)}. Remove the setting, or load a "
            "checkpoint of that architecture"
        )
    free = {name: spec for name, spec in adopted().items() if name not in {*fixed, *own}}
    return [*_take_fixed(given, origins, stored, fixed), *_adopt(given, origins, stored, free)]


def take_layout(
    given: dict[str, Any], origins: dict[str, Origin], stored: Mapping[str, Any]
) -> list[str]:
    """Add the checkpoint's parallel sizes to what was given, flags first; return a line on it."""
    known, taken = specs(RunConfig), []
    for name in LAYOUT:
        if stored.get(name) is not None and name not in given:
            given[name] = _convert(known[name], stored[name])
            origins[name] = "checkpoint"
            taken.append(f"{known[name].flag} {as_words(given[name])}")
    return [f"layout of the checkpoint: {', '.join(taken)}"] if taken else []


def is_megatrons(folder: str) -> bool:
    """Return whether a folder holds checkpoints of Megatron-LM's and none of ours; no torch."""
    root = Path(folder)
    try:
        if not root.is_dir():
            return False
        places = [root, *(path for path in root.iterdir() if path.is_dir())]
        if any((path / "checkpoint.json").exists() for path in places):
            return False
        return any(
            (path / ".metadata").exists() or any(path.glob("mp_rank_*/*.pt")) for path in places
        )
    except PermissionError as error:
        raise UserError(f"--load ({folder}) cannot be read: {error}") from None


def keep_objective(
    given: dict[str, Any], origins: dict[str, Origin], stored: Mapping[str, Any]
) -> list[str]:
    """Let a checkpoint of Megatron-LM's keep its objective, unless a flag says otherwise."""
    name = "calculate_per_token_loss"
    if name not in stored:
        return [
            "warning: the checkpoint does not say how its loss was averaged: "
            "--calculate-per-token-loss or --no-calculate-per-token-loss (Megatron-LM's default) "
            "chooses, the first by default"
        ]
    given[name], origins[name] = bool(stored[name]), "checkpoint"
    flag = "--calculate-per-token-loss" if given[name] else "--no-calculate-per-token-loss"
    return [f"the loss is averaged as in the checkpoint of Megatron-LM's: {flag}"]


def _take_fixed(
    given: dict[str, Any],
    origins: dict[str, Origin],
    stored: Mapping[str, Any],
    fixed: Mapping[str, Spec],
) -> Iterator[str]:
    taken = []
    for name, spec in fixed.items():
        if name in stored and name not in given:
            given[name] = _convert(spec, stored[name])
            origins[name] = "checkpoint"
            if given[name] != spec.default:
                taken.append(f"{spec.flag} {as_words(given[name])}")
    if taken:
        yield f"from the checkpoint: {', '.join(taken)}"


def _adopt(
    given: dict[str, Any],
    origins: dict[str, Origin],
    stored: Mapping[str, Any],
    free: Mapping[str, Spec],
) -> Iterator[str]:
    tokenizer = specs(TokenizerConfig) if _has_other_tokenizer(given, stored) else {}
    for name, spec in free.items():
        if name not in stored:
            continue
        if name in given:
            if as_json(given[name]) != as_json(stored[name]):
                yield (
                    f"{spec.flag} {as_words(given[name])} ({origins[name]}) replaces the "
                    f"checkpoint's {as_words(stored[name])}"
                )
        elif name not in tokenizer:
            given[name] = _convert(spec, stored[name])
            origins[name] = "checkpoint"


def _has_other_tokenizer(given: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    """Return whether the user's tokenizer is of another kind, so that no stored file fits it."""
    if not given.get("use_tokenizer_model_from_checkpoint_args", True):
        return True
    kind = given.get("tokenizer_type")
    if kind is None and "vocab_file" in given and "merge_file" in given:
        kind = "GPT2BPETokenizer"
    return kind is not None and kind != stored.get("tokenizer_type")


def _convert(spec: Spec, value: Any) -> Any:
    try:
        return spec.convert(value)
    except ValueError as error:
        raise UserError(f"the checkpoint's {spec.name} cannot be used: {error}") from None
