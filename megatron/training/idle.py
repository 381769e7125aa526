"""Settings that change nothing in a run, each with the reason, for `flags without effect`."""

from megatron.core.config import specs
from megatron.training.config import RunConfig
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
    if not config.checkpoint.save:
        for name in ("save_interval", "save_retain_interval", "save_keep_last"):
            if name in given:
                notes.append(f"{flag(name)} (no --save)")
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


def _idle(config: RunConfig) -> dict[str, str]:
    """Return the settings that need another one that is not there, with what is missing."""
    checkpoint = config.checkpoint
    idle: dict[str, str] = {}
    if config.model.attention.window_size is None:
        idle["window_attn_skip_freq"] = "no --window-size"
    idle |= _idle_saving(config) | _idle_fusions(config)
    if not config.model.mtp.depths:
        idle["mtp_loss_scaling_factor"] = "no --mtp-num-layers"
    if config.schedule.lr_decay_style != "WSD":
        names = ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples")
        idle |= dict.fromkeys(names, f"--lr-decay-style is {config.schedule.lr_decay_style}")
    idle |= _idle_rules(config)
    if not config.training.exit_signal_handler:
        idle["exit_signal"] = "no --exit-signal-handler"
    idle |= _idle_evaluation(config)
    if config.process.device == "cpu":
        idle["empty_unused_memory_level"] = "--device is cpu"
    if not checkpoint.save:
        idle["log_progress"] = "no --save"
    if not (checkpoint.load or checkpoint.pretrained_checkpoint):
        idle |= dict.fromkeys(("load_optim", "load_rng"), "no --load")
    return idle | _idle_precision(config) | _idle_layout(config) | _idle_groups(config)


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
        if config.parallel.tensor_model_parallel_size == 1:
            idle["muon_tp_mode"] = f"{_size('tensor')} is 1"
        if config.model.mla.multi_latent_attention:
            idle["muon_split_qkv"] = "--multi-latent-attention has no fused matrix"
        if config.precision.fp64:
            idle["muon_fp32_matmul_prec"] = "with --fp64 all is float64"
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


def _idle_layout(config: RunConfig) -> dict[str, str]:
    """Return the settings of axes that have size 1, and of ways to use an axis not taken here."""
    parallel, context = config.parallel, config.context
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp, dp = parallel.context_parallel_size, config.data_parallel_size
    idle: dict[str, str] = {"expert_tensor_parallel_size": "the model is dense"}
    if tp == 1:
        idle |= dict.fromkeys(("sequence_parallel", "tp_comm_overlap"), f"{_size('tensor')} is 1")
    elif not parallel.sequence_parallel:
        idle["tp_comm_overlap"] = "no --sequence-parallel"
    if pp == 1:
        names = (*config.pipeline.flatten(), "use_tp_pp_dp_mapping")
        idle |= dict.fromkeys(names, f"{_size('pipeline')} is 1")
    elif dp == 1:
        idle["use_tp_pp_dp_mapping"] = "there is one replica"
    if pp > 1 and config.placement.num_chunks == 1:
        idle["microbatch_group_size_per_vp_stage"] = "there is one stage per rank"
    if cp == 1:
        idle |= dict.fromkeys(context.flatten(), "--context-parallel-size is 1")
    else:
        if "a2a+p2p" not in context.cp_comm_type:
            idle["hierarchical_context_parallel_sizes"] = "--cp-comm-type is not a2a+p2p"
        if not any("a2a" in kind for kind in context.cp_comm_type):
            kinds = " ".join(context.cp_comm_type)
            idle["attention_backend"] = f"--cp-comm-type {kinds} has a kernel of its own"
    return idle | _idle_sharing(config)


def _idle_sharing(config: RunConfig) -> dict[str, str]:
    """Return the settings of replicas, and of optimizer states on the host, that change nothing."""
    replicas, idle = config.replicas, dict[str, str]()
    if config.data_parallel_size * config.parallel.context_parallel_size == 1:
        local = {
            "init_model_with_meta_device",
            "ddp_param_name_patterns_for_fp32_local_accumulation",
        }
        names = set(replicas.flatten()) - local
        idle |= dict.fromkeys(sorted(names), "there is one replica")
    elif replicas.shards_gradients:
        why = "where gradients are shared out, a bucket is a layer"
        idle |= dict.fromkeys(("ddp_bucket_size", "ddp_num_buckets"), why)
        if replicas.use_torch_fsdp2:
            names = {"overlap_grad_reduce", "overlap_param_gather"}
            idle |= dict.fromkeys(sorted(names), "with --use-torch-fsdp2 torch overlaps by itself")
        elif replicas.shards_weights:
            idle["overlap_param_gather"] = "a layer's weights are always gathered ahead"
    if not replicas.use_torch_fsdp2:
        idle["torch_fsdp2_reshard_after_forward"] = "no --use-torch-fsdp2"
    pins = ("pin_cpu_grads", "pin_cpu_params")
    if not config.optimizer.optimizer_cpu_offload:
        names = {"optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d", *pins}
        idle |= dict.fromkeys(sorted(names), "no --optimizer-cpu-offload")
    elif config.process.device == "cpu":
        idle |= dict.fromkeys(pins, "the device is the CPU")
    return idle


def _size(axis: str) -> str:
    return f"--{axis}-model-parallel-size"


def _idle_groups(config: RunConfig) -> dict[str, str]:
    """Return the settings of process groups that are not there, or that are not NCCL's."""
    process = config.process
    recorder = tuple(process.flight_recorder.flatten())
    waiting = ("distributed_timeout_minutes", "distributed_timeout_seconds_after_init")
    nccl = ("nccl_communicator_config_path", "high_priority_stream_groups", *recorder)
    if process.world_size == 1:
        return dict.fromkeys((*waiting, *nccl), "there is one process")
    if process.device == "cpu":
        return dict.fromkeys(nccl, "with --device cpu NCCL is not used")
    if process.distributed_backend == "gloo":
        return dict.fromkeys(nccl, "--distributed-backend is gloo")
    if process.flight_recorder.flight_recorder_dump_path is None:
        return dict.fromkeys(recorder, "no --flight-recorder-dump-path")
    return {}


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
