"""The facts of a checkpoint in Megatron-LM's words: what it reads beside the tensors.

The other direction is `common`. Lengths of its schedule are samples; its arguments are our flat
config, since flags have its names, and those few that its loading asks for by name.
"""

import argparse
from collections.abc import Mapping
from typing import Any

import torch

ROWS = "vocabulary_rows"
"""An argument of our exports: how many rows stand for an id, which Megatron-LM does not store."""
_VERSION = 3.0
"""Of Megatron-LM's checkpoints today."""


def common_state(facts: Mapping[str, Any], *, has_masters: bool) -> dict[str, Any]:
    """Return the state that is no tensor of the model.

    Args:
        facts: of any checkpoint, in our words.
        has_masters: whether its optimizer keeps fp32 masters, which nests its state once more.
    """
    progress, scalars = facts.get("progress") or {}, facts.get("optimizer") or {}
    common: dict[str, Any] = {
        "args": argparse.Namespace(**_arguments(facts, progress)),
        "checkpoint_version": _VERSION,
        "iteration": int(facts.get("iteration", 0)),
        "num_floating_point_operations_so_far": float(progress.get("flops", 0.0)),
        "content_metadata": {
            "distrib_optim_sharding_type": "fully_reshardable",
            "singleton_local_shards": False,
        },
    }
    if not facts["parts"]["optimizer"]:
        return common
    step = int(scalars.get("step", 0))
    optimizer: dict[str, Any] = {
        "state": {"common_step": torch.tensor(float(step))},
        "param_groups": _groups(facts),
    }
    if has_masters:
        optimizer = {"optimizer": optimizer}
        scale = scalars.get("loss_scale")
        if scale:
            optimizer["grad_scaler"] = {
                "scale": torch.tensor([float(scale["scale"])]),
                "growth_tracker": int(scale["steps"]),
                "hysteresis_tracker": int(scale["overflows_left"]),
            }
    common["optimizer"] = optimizer
    scheduler = _scheduler(facts, progress)
    if scheduler is not None:
        common["opt_param_scheduler"] = scheduler
    return common


def _arguments(facts: Mapping[str, Any], progress: Mapping[str, Any]) -> dict[str, Any]:
    config = dict(facts.get("config") or {})
    config.setdefault("add_position_embedding", True)
    config.setdefault("data_parallel_random_init", False)
    config.setdefault("world_size", 1)
    for axis in ("tensor", "pipeline"):
        config.setdefault(f"{axis}_model_parallel_size", 1)
    config |= {
        "no_save_optim": not facts["parts"]["optimizer"],
        "no_save_rng": True,  # its generators are its own
        "consumed_train_samples": int(progress.get("consumed_samples", 0)),
        "skipped_train_samples": int(progress.get("skipped_samples", 0)),
        "consumed_valid_samples": 0,
    }
    if "objective" in facts:
        config["calculate_per_token_loss"] = facts["objective"] == "tokens"
    if "vocabulary_rows" in facts:
        config["padded_vocab_size"] = config[ROWS] = facts["vocabulary_rows"]
    return config


def _scheduler(facts: Mapping[str, Any], progress: Mapping[str, Any]) -> dict[str, Any] | None:
    schedule = facts.get("schedule")
    if schedule is None:
        return None
    unit = 1
    if schedule["unit"] == "iterations":
        unit = int(facts["config"].get("global_batch_size", 1))
    return {
        "max_lr": schedule["lr"],
        "min_lr": schedule["min_lr"],
        "lr_warmup_steps": schedule["warmup"] * unit,
        "num_steps": int(progress.get("consumed_samples", 0)),
        "lr_decay_style": schedule["decay_style"],
        "lr_decay_steps": schedule["decay"] * unit,
        "start_wd": schedule["start_weight_decay"],
        "end_wd": schedule["end_weight_decay"],
        "wd_incr_style": schedule["weight_decay_style"],
        "wd_incr_steps": schedule["length"] * unit,
    }


def _groups(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return Megatron's two groups of parameters: those that decay, and those that do not."""
    config, schedule = facts.get("config") or {}, facts.get("schedule") or {}
    peak, end = schedule.get("lr"), schedule.get("min_lr")
    decay = schedule.get("end_weight_decay", config.get("weight_decay", 0.01))
    common = {
        "is_expert_parallel": False,
        "default_config": True,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "max_lr": peak,
        "min_lr": end,
        "lr": peak,  # set anew before each step
        "betas": (config.get("adam_beta1", 0.9), config.get("adam_beta2", 0.999)),
        "eps": config.get("adam_eps", 1e-8),
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": bool(config.get("decoupled_weight_decay", True)),
        "step": int((facts.get("optimizer") or {}).get("step", 0)),
    }
    return [{**common, "wd_mult": mult, "weight_decay": decay * mult} for mult in (1.0, 0.0)]
