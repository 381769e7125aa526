"""What a checkpoint of Megatron-LM says besides tensors, in the words of our own.

Its schedule counts in samples, whatever the run was counted in; its arguments are those of the
command line, defaults and derived values filled in, under names that are ours too.
"""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core.dist_checkpointing.format import CheckpointError, Index
from megatron.core.dist_checkpointing.megatron_formats.state import ROWS
from megatron.core.dist_checkpointing.megatron_formats.unpickling import plain

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
"""Weights whose rows are ids of the vocabulary, and rows that pad it."""

_SCHEDULE = {
    "max_lr": "lr",
    "min_lr": "min_lr",
    "lr_warmup_steps": "warmup",
    "lr_decay_steps": "decay",
    "lr_decay_style": "decay_style",
    "start_wd": "start_weight_decay",
    "end_wd": "end_weight_decay",
    "wd_incr_style": "weight_decay_style",
    "wd_incr_steps": "length",
}
"""Our word by Megatron's, in the state of its schedule."""

_MEANINGS = {
    "moe_mlp_glu_interleave_size": "rows of gates and values alternate in blocks",
    "moe_shared_expert_glu_interleave_size": "rows of gates and values alternate in blocks",
    "moe_apply_probs_on_input": "weights of choices scale the inputs of experts",
    "apply_residual_connection_post_layernorm": "the residual stream is taken after the norm",
    "use_mup": "activations and logits are scaled by widths",
}
"""Arguments under which weights of the same names and shapes compute something else, and what."""


def facts(state: Mapping[str, Any], *, has_states: bool, buckets: bool = False) -> dict[str, Any]:
    """Return what our own checkpoints would say.

    ``progress`` is None where the checkpoint does not tell the number of samples, and ``tokenizer``
    and the size of the vocabulary are absent: Megatron-LM stores neither.

    Args:
        state: the state that is no tensor.
        has_states: whether states of the optimizer can be read.
        buckets: whether some are there that only the layout which wrote them could read.

    Raises:
        CheckpointError: its weights mean something else than the same ones would here.
    """
    iteration = int(state.get("iteration", 0))
    args = arguments(state)
    _check_meaning(args)
    scheduler = state.get("opt_param_scheduler") or {}
    found: dict[str, Any] = {
        "iteration": iteration,
        "progress": _progress(iteration, state, args, scheduler),
        "parts": {"optimizer": has_states, "random": False},
        "optimizer": _optimizer(state, iteration) if has_states else {},
        "schedule": _schedule(scheduler),
        "config": _config(args, state),
    }
    if buckets:
        found["parts"]["why"] = (
            "its optimizer's states are buckets of the layout that wrote it (dp_reshardable); save "
            "it from Megatron-LM with --dist-ckpt-optim-fully-reshardable"
        )
    if "calculate_per_token_loss" in args:
        per_token = bool(args["calculate_per_token_loss"])
        found["objective"] = "tokens" if per_token else "microbatches"
    if ROWS in args:
        found["vocabulary_rows"] = args[ROWS]
    return found


def arguments(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the run, {} where they were not stored."""
    args = state.get("args")
    if isinstance(args, argparse.Namespace):
        args = vars(args)
    return dict(plain(args)) if isinstance(args, Mapping) else {}


def _check_meaning(args: Mapping[str, Any]) -> None:
    """Raise if weights fit by names and shapes, but compute something else here."""
    found = [
        f"--{name.replace('_', '-')} {args[name]}: {meaning}"
        for name, meaning in _MEANINGS.items()
        if args.get(name)
    ]
    if found:
        raise CheckpointError(
            "the checkpoint of Megatron-LM's cannot be loaded, since its weights mean something "
            f"else here ({'; '.join(found)}); load one of a run without this, or convert its "
            "weights in Megatron-LM first"
        )


def _progress(
    iteration: int, state: Mapping[str, Any], args: Mapping[str, Any], scheduler: Mapping[str, Any]
) -> dict[str, Any] | None:
    consumed = args.get("consumed_train_samples", scheduler.get("num_steps"))
    if consumed is None and iteration > 0:
        return None
    return {
        "iteration": iteration,
        "consumed_samples": int(consumed or 0),
        "skipped_samples": int(args.get("skipped_train_samples") or 0),
        "flops": float(state.get("num_floating_point_operations_so_far") or 0.0),
        "evaluated": {},
    }


def _optimizer(state: Mapping[str, Any], iteration: int) -> dict[str, Any]:
    steps = list(_found(state.get("optimizer"), ("common_step", "step")))
    scale = next(_found(state.get("optimizer"), ("grad_scaler",)), None)
    scalars: dict[str, Any] = {"step": int(max(steps, default=iteration))}
    if isinstance(scale, Mapping) and "growth_tracker" in scale:
        scalars["loss_scale"] = {
            "scale": float(scale["scale"]),
            "steps": int(scale["growth_tracker"]),
            "overflows_left": int(scale.get("hysteresis_tracker", 1)),
        }
    return scalars


def _found(value: Any, names: tuple[str, ...]) -> Iterator[Any]:
    """Yield the values of ``names`` at any depth."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key in names and item is not None:
                yield item
            else:
                yield from _found(item, names)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _found(item, names)


def _schedule(scheduler: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what is known of the schedule, in samples."""
    if "max_lr" not in scheduler:
        return None
    known = {ours: scheduler[name] for name, ours in _SCHEDULE.items() if name in scheduler}
    return {"unit": "samples", **known}


def _config(args: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as a flat config of ours; other programs' names do no harm."""
    config = {name: value for name, value in args.items() if value is not None}
    if not config.get("group_query_attention"):
        config.pop("num_query_groups", None)  # there as 1, without effect
    groups = next(_found(state.get("optimizer"), ("param_groups",)), None)
    if isinstance(groups, list) and groups and isinstance(groups[0], Mapping):
        if "betas" in groups[0]:
            config["adam_beta1"], config["adam_beta2"] = groups[0]["betas"]
        if "eps" in groups[0]:
            config["adam_eps"] = groups[0]["eps"]
    return config


def mark_padding(index: Index) -> None:
    """Note which tensors have rows that only pad the vocabulary, and to which multiple."""
    config = index.facts["config"]
    multiple = int(config.get("make_vocab_size_divisible_by", 128))
    multiple *= int(config.get("tensor_model_parallel_size", 1))
    rows = index.facts.get("vocabulary_rows")
    for key, tensor in index.tensors.items():
        if key.endswith(VOCABULARY) and tensor.shape[0] != rows:
            tensor.padded_to = multiple
