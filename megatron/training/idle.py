"""Settings that change nothing in a run, each with the reason, for `flags without effect`."""

from megatron.core.config import specs
from megatron.training.config import RunConfig
from megatron.training.rules import Origins, flag


def without_effect(config: RunConfig, origins: Origins) -> list[str]:
    """Return the given settings that change nothing in this run, each with the reason."""
    # A file written by --dump-config gives every value; those that say nothing new ask for nothing.
    flat, declared = config.flatten(), specs(type(config))
    given = {
        name
        for name, origin in origins.items()
        if origin == "flag" or (origin == "file" and flat[name] != declared[name].default)
    }
    notes = []
    if not config.checkpoint.save:
        for name in ("save_interval", "save_retain_interval", "save_keep_last"):
            if name in given:
                notes.append(f"{flag(name)} (no --save)")
    if config.parallel.sequence_parallel and config.parallel.tensor_model_parallel_size == 1:
        notes.append("--sequence-parallel (--tensor-model-parallel-size is 1)")
    if "manual_gc_interval" in given and not config.training.manual_gc:
        notes.append("--manual-gc-interval (no --manual-gc)")
    if not config.data.fim.fim_data:
        idle = [name for name in config.data.fim.flatten() if name in given - {"fim_data"}]
        notes += [f"{flag(name)} (no --fim-data)" for name in idle]
    if config.checkpoint.finetune and not (
        config.checkpoint.load or config.checkpoint.pretrained_checkpoint
    ):
        notes.append("--finetune (no --load)")
    notes += _idle_positions(config, given)
    notes += [f"{flag(name)} ({why})" for name, why in _idle(config).items() if name in given]
    return notes


def _idle(config: RunConfig) -> dict[str, str]:
    """Return the settings that need another one that is not there, with what is missing."""
    checkpoint = config.checkpoint
    idle: dict[str, str] = {}
    if config.model.attention.window_size is None:
        idle["window_attn_skip_freq"] = "no --window-size"
    if config.schedule.lr_decay_style != "WSD":
        names = ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples")
        idle |= dict.fromkeys(names, f"--lr-decay-style is {config.schedule.lr_decay_style}")
    if config.optimizer.optimizer != "sgd":
        idle["sgd_momentum"] = f"--optimizer is {config.optimizer.optimizer}"
    else:
        names = ("adam_beta1", "adam_beta2", "adam_eps")
        idle |= dict.fromkeys(names, "--optimizer is sgd")
    if not config.training.exit_signal_handler:
        idle["exit_signal"] = "no --exit-signal-handler"
    idle |= _idle_evaluation(config)
    if not checkpoint.save:
        idle["log_progress"] = "no --save"
    if not (checkpoint.load or checkpoint.pretrained_checkpoint):
        idle |= dict.fromkeys(("load_optim", "load_rng"), "no --load")
    return idle


def _idle_positions(config: RunConfig, given: set[str]) -> list[str]:
    """Return the given rotary settings that the kind of positions does not use."""
    position = config.model.position
    kind = position.position_embedding_type
    rotary = ("rotary_base", "rotary_percent", "rotary_interleaved", "no_rope_freq")
    scaling = ("rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor")
    yarn = tuple(name for name in position.flatten() if name.startswith("yarn_"))
    why = f"--position-embedding-type is {kind}"
    idle: dict[str, str] = {}
    if kind == "yarn":
        idle = dict.fromkeys(scaling, why)
    elif kind == "rope":
        idle = dict.fromkeys(yarn, why)
        if not position.use_rope_scaling:
            idle["rope_scaling_factor"] = "no --use-rope-scaling"
    else:
        idle = dict.fromkeys((*rotary, *scaling, *yarn), why)
    return [f"{flag(name)} ({reason})" for name, reason in idle.items() if name in given]


def _idle_evaluation(config: RunConfig) -> dict[str, str]:
    """Return the settings of evaluations that do not happen or need none of them."""
    validation = config.validation
    idle: dict[str, str] = {}
    if config.training.skip_train:
        idle |= dict.fromkeys(("start_eval_at_iter", "eval_interval"), "--skip-train")
    elif validation.eval_iters == 0:
        idle |= dict.fromkeys(("start_eval_at_iter", "eval_interval"), "--eval-iters is 0")
    elif validation.eval_interval is None:
        idle["start_eval_at_iter"] = "no --eval-interval"
    if config.data.full_validation and validation.eval_iters != 0:  # 0 turns it off all the same
        idle["eval_iters"] = "--full-validation takes the whole validation set"
    return idle
