"""Settings that change nothing in a run, each with the reason, for `flags without effect`."""

from megatron.core.config import specs
from megatron.training.config import RunConfig
from megatron.training.idle_data import idle_data
from megatron.training.idle_experts import idle_experts
from megatron.training.idle_layout import idle_layout, size_flag
from megatron.training.layout_rules import Origins
from megatron.training.processes.group_settings import without_group
from megatron.training.wording import flag


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
    notes += _idle_formats(config, given)
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
    return [*notes, *without_group(config.process)]


def _idle_formats(config: RunConfig, given: set[str]) -> list[str]:
    """Return what is said of formats of checkpoints."""
    checkpoint = config.checkpoint
    notes = []
    if "ckpt_format" in given:
        notes.append(
            f"--ckpt-format {checkpoint.ckpt_format} (any format is read, and this program's own "
            "is saved; --ckpt-convert-format torch_dist --ckpt-convert-save DIR exports that)"
        )
    if "ckpt_convert_save" in given and checkpoint.ckpt_convert_format is None:
        notes.append("--ckpt-convert-save (no --ckpt-convert-format)")
    if "use_mp_args_from_checkpoint_args" in given and not checkpoint.use_checkpoint_args:
        notes.append("--use-mp-args-from-checkpoint-args (no --use-checkpoint-args)")
    if "load_main_params_from_ckpt" in given and not (
        checkpoint.load or checkpoint.pretrained_checkpoint
    ):
        notes.append("--load-main-params-from-ckpt (no --load)")
    return notes


def _idle(config: RunConfig) -> dict[str, str]:
    """Return the settings that need another one that is not there, with what is missing."""
    idle: dict[str, str] = {}
    if config.model.attention.window_size is None:
        idle["window_attn_skip_freq"] = "no --window-size"
    kind = config.model.position.position_embedding_type
    if kind != "relative":
        names = ("relative_attention_num_buckets", "relative_attention_max_distance")
        idle |= dict.fromkeys(names, f"--position-embedding-type is {kind}")
    idle |= _idle_saving(config) | _idle_fusions(config)
    if not config.model.mtp.depths:
        idle["mtp_loss_scaling_factor"] = "no --mtp-num-layers"
    idle |= idle_experts(config) | _idle_schedule(config) | _idle_rules(config)
    if not config.training.exit_signal_handler:
        idle["exit_signal"] = "no --exit-signal-handler"
    idle |= _idle_evaluation(config)
    if config.process.device == "cpu":
        idle["empty_unused_memory_level"] = "--device is cpu"
    idle |= _idle_checkpoints(config) | _idle_dashboards(config)
    idle |= idle_layout(config) | _idle_precision(config) | idle_data(config)
    return idle | _idle_without_training(config)


_OF_SAVES = (
    *("save_interval", "save_retain_interval", "save_keep_last", "save_optim", "save_rng"),
    *("exit_on_failed_save", "log_progress", "non_persistent_save_interval"),
)
_OF_LOADS = ("load_optim", "load_rng", "verify_integrity", "dist_ckpt_strictness")


def _idle_checkpoints(config: RunConfig) -> dict[str, str]:
    """Return the settings of checkpoints that nobody saves or loads."""
    checkpoint = config.checkpoint
    idle = _idle_speed(config)
    if not checkpoint.save:
        idle |= dict.fromkeys(_OF_SAVES, "no --save")
    idle |= _idle_recovery(config)
    if not (checkpoint.load or checkpoint.pretrained_checkpoint):
        idle |= dict.fromkeys(_OF_LOADS, "no --load")
    if not checkpoint.load or checkpoint.finetune:
        why = "--finetune starts at iteration 0" if checkpoint.load else "no --load"
        idle["override_ckpt_iteration"] = why
    if not checkpoint.load or checkpoint.finetune:
        why = "--finetune starts a schedule of its own" if checkpoint.load else "no --load"
        names = ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler")
        idle |= dict.fromkeys(names, why)
    return idle


def _idle_recovery(config: RunConfig) -> dict[str, str]:
    """Return the settings of recovery checkpoints that are not made; --load looks for some."""
    checkpoint, recovery = config.checkpoint, config.checkpoint.recovery
    idle: dict[str, str] = {}
    places = ("non_persistent_global_ckpt_dir", "non_persistent_local_ckpt_dir")
    if recovery.non_persistent_save_interval is None:
        names = ("non_persistent_ckpt_type", "replication")
        idle |= dict.fromkeys(names, "no --non-persistent-save-interval")
        if not checkpoint.load:
            idle |= dict.fromkeys(places, "no --non-persistent-save-interval, and no --load")
    elif not recovery.is_local:
        idle["replication"] = "--non-persistent-ckpt-type is not local"
    if not recovery.replication:
        idle |= dict.fromkeys(("replication_jump", "replication_factor"), "no --replication")
    return idle


def _idle_dashboards(config: RunConfig) -> dict[str, str]:
    """Return the settings of dashboards that are not written."""
    logging = config.logging
    idle: dict[str, str] = {}
    if not logging.tensorboard_dir:
        why = "no --tensorboard-dir"
        idle |= dict.fromkeys(("tensorboard_queue_size", "tensorboard_log_interval"), why)
        if not logging.wandb_project:
            shown = [name for name in logging.flatten() if name.endswith("_to_tensorboard")]
            idle |= dict.fromkeys(shown, f"{why} and no --wandb-project")
    if not logging.wandb_project:
        names = ("wandb_exp_name", "wandb_entity", "wandb_save_dir")
        idle |= dict.fromkeys(names, "no --wandb-project")
    return idle


def _idle_without_training(config: RunConfig) -> dict[str, str]:
    """Return the settings of updates, for a run that only evaluates."""
    if not config.training.skip_train:
        return {}
    precision = (
        *("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        *("accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16", "main_grads_dtype"),
        *("use_precision_aware_optimizer", "main_params_dtype", "exp_avg_dtype"),
        "exp_avg_sq_dtype",
    )
    health = ("skip_non_finite_iterations", "check_for_spiky_loss")
    logs = ("log_num_zeros_in_grad", "log_grad_norms_by_group", "log_params_norm")
    schedule = set(config.schedule.flatten()) - {"lr"}  # which scripts may give all the same
    names = (*config.optimizer.flatten(), *sorted(schedule), *precision, *health, *logs)
    return dict.fromkeys(names, "--skip-train")


def _idle_schedule(config: RunConfig) -> dict[str, str]:
    """Return the settings of learning rate and weight decay that another one leaves unused."""
    schedule, idle = config.schedule, dict[str, str]()
    style = f"--lr-decay-style is {schedule.lr_decay_style}"
    if schedule.lr_decay_style != "WSD":
        names = ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples")
        idle |= dict.fromkeys(names, style)
    if schedule.lr_decay_style == "constant":
        idle |= dict.fromkeys(("min_lr", "decoupled_min_lr"), style)
    if not (schedule.lr_warmup_iters or schedule.lr_warmup_samples or schedule.lr_warmup_fraction):
        idle["lr_warmup_init"] = "no --lr-warmup-iters, -samples or -fraction"
    if schedule.weight_decay_incr_style != "constant":
        idle["weight_decay"] = "--start-weight-decay and --end-weight-decay stand for it"
    return idle


def _idle_speed(config: RunConfig) -> dict[str, str]:
    """Return the settings of how checkpoints are written that nothing is done with."""
    speed = config.checkpoint.speed
    if not config.checkpoint.save:
        return dict.fromkeys(speed.flatten(), "no --save")
    if not speed.async_save:
        names = [name for name in speed.flatten() if name.startswith("async_")]
        return dict.fromkeys(names, "no --async-save")
    if speed.async_save_host_gib == 0:
        names = ["async_ckpt_cpu_priority", "async_ckpt_io_priority"]
        return dict.fromkeys(names, "--async-save-host-gib 0 leaves nothing to the background")
    return {}


def _idle_rules(config: RunConfig) -> dict[str, str]:
    """Return the settings of update rules that the run does not have."""
    optimizer = config.optimizer
    idle: dict[str, str] = {}
    settings = {
        "adam": ("adam_beta1", "adam_beta2", "adam_eps"),
        "sgd": ("sgd_momentum",),
        "lion": ("lion_beta1", "lion_beta2"),
        "muon": tuple(name for name in optimizer.flatten() if name.startswith("muon_")),
    }
    for rule, names in settings.items():
        if rule not in optimizer.rules:
            idle |= dict.fromkeys(names, f"--optimizer is {optimizer.optimizer}")
    if optimizer.optimizer == "muon":
        parts = (config.axis_sizes["tp"], config.axis_sizes["etp"])
        if parts[0] == 1 and (parts[1] == 1 or config.model.moe.num_experts is None):
            idle["muon_tp_mode"] = f"{size_flag('tensor')} is 1"
        if config.model.mla.multi_latent_attention:
            idle["muon_split_qkv"] = "--multi-latent-attention has no fused matrix"
        if config.precision.fp64:
            idle["muon_fp32_matmul_prec"] = "with --fp64 all is float64"
    if not config.model.attention.qk_layernorm:
        idle["apply_wd_to_qk_layernorm"] = "no --qk-layernorm"
    if optimizer.decoupled_lr is None:
        idle["decoupled_min_lr"] = "no --decoupled-lr"
    if optimizer.optimizer == "sgd":
        idle["decoupled_weight_decay"] = "--optimizer is sgd"
    return idle


def _idle_precision(config: RunConfig) -> dict[str, str]:
    """Return the settings of number formats that are not used."""
    precision = config.precision
    idle: dict[str, str] = {}
    if not precision.is_scale_dynamic:
        names = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
        why = "--loss-scale is constant" if precision.fp16 else "no --fp16"
        idle |= dict.fromkeys(names, why)
    if not precision.bf16:
        idle["grad_reduce_in_bf16"] = "no --bf16"
    dtypes = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    if all(getattr(precision, name) == "fp32" for name in dtypes):
        idle["use_precision_aware_optimizer"] = "every dtype it chooses is fp32"
    if precision.params_dtype == precision.accumulation_dtype:
        idle["accumulate_allreduce_grads_in_fp32"] = f"weights are {precision.params_dtype}"
    # A rule refuses these where sums are coarser.
    scattered, local = "reduce_scatter_with_fp32", "param_name_patterns_for_fp32_local"
    idle[f"ddp_{scattered}_accumulation"] = f"gradients are summed in {precision.reduce_dtype}"
    idle[f"ddp_{local}_accumulation"] = f"gradients add up in {precision.grad_dtype}"
    return idle


def _idle_saving(config: RunConfig) -> dict[str, str]:
    """Return the settings of recomputation and offload that nothing is done with."""
    recompute, offload = config.model.recompute, config.model.offload
    if config.training.skip_train:
        return dict.fromkeys((*recompute.flatten(), *offload.flatten()), "--skip-train")
    idle: dict[str, str] = {}
    if recompute.granularity is None:
        names = ("recompute_method", "recompute_num_layers", "recompute_modules")
        idle |= dict.fromkeys(names, "no --recompute-granularity")
    elif recompute.granularity == "full":
        idle["recompute_modules"] = "--recompute-granularity full takes whole layers"
        if recompute.recompute_num_layers == 0:
            names = ("recompute_granularity", "recompute_method", "distribute_saved_activations")
            idle |= dict.fromkeys(names, "--recompute-num-layers 0 takes no layer")
    if not offload.fine_grained_activation_offloading:
        idle["offload_modules"] = "no --fine-grained-activation-offloading"
    if not offload.is_on:
        idle["min_offloaded_tensor_size"] = "nothing is offloaded"
    return idle


def _idle_fusions(config: RunConfig) -> dict[str, str]:
    """Return the choices of fused operations for what the model does not have."""
    model, idle = config.model, dict[str, str]()
    if model.attention_backend not in ("unfused", "local"):
        idle["masked_softmax_fusion"] = "--attention-backend is not unfused"
    if not model.mlp.is_gated:
        idle["bias_swiglu_fusion"] = "no gated activation"
    if model.mlp.is_gated or not model.mlp.activation.startswith("gelu"):
        idle["bias_gelu_fusion"] = "no plain GELU"
    if not (model.position.is_rotary or model.mla.multi_latent_attention):
        idle["rope_fusion"] = "no rotary positions"
    if not model.fusion.cross_entropy_loss_fusion:
        idle["cross_entropy_fusion_impl"] = "no --cross-entropy-loss-fusion"
    return idle


def _idle_positions(config: RunConfig, given: set[str]) -> list[str]:
    """Return the given settings that the kind of positions and attention does not use."""
    position = config.model.position
    if config.model.mla.multi_latent_attention:
        idle = _idle_with_latents(config)
        return [f"{flag(name)} ({reason})" for name, reason in idle.items() if name in given]
    kind = position.position_embedding_type
    rotary = ("rotary_base", "rotary_percent", "rotary_interleaved", "no_rope_freq")
    scaling = ("rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor")
    yarn = tuple(name for name in position.flatten() if name.startswith("yarn_"))
    why = f"--position-embedding-type is {kind}"
    idle = dict.fromkeys(config.model.mla.flatten(), "no --multi-latent-attention")
    if kind == "yarn":
        idle |= dict.fromkeys(scaling, why)
    elif kind == "rope":
        idle |= dict.fromkeys(yarn, why)
        if not position.use_rope_scaling:
            idle["rope_scaling_factor"] = "no --use-rope-scaling"
    else:
        idle |= dict.fromkeys((*rotary, *scaling, *yarn), why)
    return [f"{flag(name)} ({reason})" for name, reason in idle.items() if name in given]


def _idle_with_latents(config: RunConfig) -> dict[str, str]:
    """Return the settings of other attention that multi-latent attention has its own for."""
    latent, yarn = config.model.mla, ("beta_fast", "beta_slow", "mscale")
    others = (
        *("kv_channels", "add_qkv_bias", "softmax_scale", "no_rope_freq"),
        *("rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor"),
        *(name for name in config.model.position.flatten() if name.startswith("yarn_")),
    )
    idle = dict.fromkeys(others, "--multi-latent-attention has its own")
    unused: tuple[str, ...] = ("rotary_percent",)
    if latent.rope_type == "rope":
        unused = ("original_max_position_embeddings", *yarn)
    return idle | dict.fromkeys(unused, f"--rope-type is {latent.rope_type}")


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
