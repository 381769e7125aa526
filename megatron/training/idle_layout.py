"""Settings of ranks that change nothing in a run, with the reasons, for `idle`."""

from megatron.training.config import RunConfig

BESIDE = {"overlap_moe_expert_parallel_comm", "delay_wgrad_compute"}
"""Settings of microbatches that run beside each other, with pipelines and without."""


def idle_layout(config: RunConfig) -> dict[str, str]:
    """Return the settings of axes, replicas and process groups that are not there, by name."""
    return _idle_axes(config) | _idle_sharing(config) | _idle_groups(config)


def _idle_axes(config: RunConfig) -> dict[str, str]:
    """Return the settings of axes that have size 1, and of ways to use an axis not taken here."""
    parallel, context = config.parallel, config.context
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp, dp = parallel.context_parallel_size, config.data_parallel_size
    idle: dict[str, str] = {}
    if config.model.moe.num_experts is None:
        idle["expert_tensor_parallel_size"] = "the model is dense"
    if tp == 1:
        why = f"{size_flag('tensor')} is 1"
        idle |= dict.fromkeys(("sequence_parallel", "tp_comm_overlap"), why)
    elif not parallel.sequence_parallel:
        idle["tp_comm_overlap"] = "no --sequence-parallel"
    if pp == 1:
        names = {*config.pipeline.flatten(), "use_tp_pp_dp_mapping"} - BESIDE
        idle |= dict.fromkeys(sorted(names), f"{size_flag('pipeline')} is 1")
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
    return idle


def _idle_sharing(config: RunConfig) -> dict[str, str]:
    """Return the settings of replicas, and of optimizer states on the host, that change nothing."""
    replicas, idle = config.replicas, dict[str, str]()
    if replicas.use_megatron_fsdp and replicas.data_parallel_sharding_strategy == "no_shard":
        idle["use_megatron_fsdp"] = "--data-parallel-sharding-strategy is no_shard"
    if config.data_parallel_size * config.parallel.context_parallel_size == 1:
        local = {
            "init_model_with_meta_device",
            "ddp_param_name_patterns_for_fp32_local_accumulation",
        }
        names = set(replicas.flatten()) - local
        names |= {"grad_reduce_in_bf16"}
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
    elif config.optimizer.optimizer_offload_fraction == 0:
        moved = ("optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d", *pins)
        idle |= dict.fromkeys(moved, "--optimizer-offload-fraction is 0")
    elif config.process.device == "cpu":
        idle |= dict.fromkeys(pins, "the device is the CPU")
    return idle


def size_flag(axis: str) -> str:
    """Return the flag of the ranks along an axis, ``tensor`` or ``pipeline``."""
    return f"--{axis}-model-parallel-size"


def _idle_groups(config: RunConfig) -> dict[str, str]:
    """Return the settings of process groups that are not there, or that are not NCCL's."""
    process = config.process
    recorder = tuple(process.flight_recorder.flatten())
    waiting = ("distributed_timeout_minutes", "distributed_timeout_seconds_after_init")
    nccl = ("nccl_communicator_config_path", "high_priority_stream_groups", *recorder)
    if process.world_size == 1:
        hashes = "check_weight_hash_across_dp_replicas_interval"
        return dict.fromkeys((*waiting, *nccl, hashes), "there is one process")
    if process.device == "cpu":
        return dict.fromkeys(nccl, "with --device cpu NCCL is not used")
    if process.distributed_backend == "gloo":
        return dict.fromkeys(nccl, "--distributed-backend is gloo")
    if process.flight_recorder.flight_recorder_dump_path is None:
        return dict.fromkeys(recorder, "no --flight-recorder-dump-path")
    return {}
