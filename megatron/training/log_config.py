"""What a run tells: logs and dashboards, health checks, profiles."""

from typing import Literal

from megatron.core.config import Config, check_at_least, option
from megatron.core.utils import UserError


class LoggingConfig(Config):
    """What a run says, and where."""

    log_interval: int = option(100)
    """Iterations between lines of the log."""

    log_throughput: bool = option(False)
    """Add TFLOP/s per device to the line."""

    log_progress: bool = option(False)
    """Append tokens and operations so far to progress.txt in --save, at start and at each save."""

    log_params_norm: bool = option(False)
    """Compute and log the norm of the parameters."""

    log_grad_norms_by_group: bool = option(False)
    """Log the gradient's norm for each optimizer group too."""

    log_num_zeros_in_grad: bool = option(False)
    """Count and log the gradient's zeros."""

    timing_log_level: int = option(0, choices=(0, 1, 2))
    """Detail of the timers: 0 iterations, 1 their phases, 2 everything."""

    timing_log_option: Literal["max", "minmax", "all"] = option("minmax")
    """How the ranks' timers are shown."""

    moe_per_layer_logging: bool = option(False)
    """Log loads of experts and losses of routers of every layer: lines beside the training line,
    tags in TensorBoard and W&B. (The metrics file has them in any case.)"""

    log_moe_overload_factor: bool = option(False)
    """Log by how much the fullest rank of experts works on more choices than each would under even
    loads, over an iteration; it depends on --expert-model-parallel-size."""

    tensorboard_dir: str | None = option(None, metavar="DIR")
    """Folder for TensorBoard."""

    tensorboard_log_interval: int = option(1)
    """Iterations between TensorBoard points."""

    tensorboard_queue_size: int = option(1000)
    """Points that TensorBoard's writer may hold back."""

    log_timers_to_tensorboard: bool = option(False)
    """Write timers to TensorBoard."""

    log_loss_scale_to_tensorboard: bool = option(
        True, aliases={"--disable-log-loss-scale-to-tensorboard": False}
    )
    """Write the loss scale to TensorBoard."""

    log_validation_ppl_to_tensorboard: bool = option(False)
    """Write the validation perplexity to TensorBoard."""

    log_memory_to_tensorboard: bool = option(False)
    """Write memory use to TensorBoard."""

    log_memory_interval: int | None = option(None)
    """Iterations between reports of memory by category, each beside the bytes that were planned."""

    wandb_project: str | None = option(None)
    """Weights & Biases project; giving it turns W&B on."""

    wandb_exp_name: str | None = option(None)
    """Name of the W&B run."""

    wandb_entity: str | None = option(None)
    """W&B team or user."""

    wandb_save_dir: str | None = option(None, metavar="DIR")
    """Folder for W&B's local files."""

    metrics_file: str | None = option(None, metavar="FILE")
    """Append one JSON object per iteration, with full precision, to this file."""

    def __post_init__(self) -> None:
        check_at_least(
            self,
            1,
            "log_interval",
            "tensorboard_log_interval",
            "tensorboard_queue_size",
            "log_memory_interval",
        )


class HealthConfig(Config):
    """What stops a run that has gone wrong."""

    check_for_nan_in_loss_and_grad: bool = option(True)
    """Stop with exit code 1 when a loss or gradient is not finite."""

    skip_non_finite_iterations: int = option(0, metavar="LIMIT")
    """Skip up to LIMIT iterations in a row whose loss or gradient is not finite, not stop."""

    check_for_spiky_loss: bool = option(False)
    """Stop when a loss is far above those before it."""

    check_weight_hash_across_dp_replicas_interval: int | None = option(None)
    """Iterations between comparisons of weights that several ranks hold: all replicas, and what is
    not split within one."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "check_weight_hash_across_dp_replicas_interval")
        if self.skip_non_finite_iterations < 0:
            raise UserError(
                f"--skip-non-finite-iterations ({self.skip_non_finite_iterations}) must not be "
                "negative; 0 stops at the first one"
            )


class ProfilingConfig(Config):
    """Profiles of time and memory."""

    profile: bool = option(False)
    """Profile the iterations from --profile-step-start to --profile-step-end."""

    profile_step_start: int = option(10)
    """First profiled iteration."""

    profile_step_end: int = option(12)
    """Iteration at which the profile ends; it is not part of it."""

    profile_ranks: tuple[int, ...] = option((), metavar="RANK")
    """Ranks that are profiled; none given means rank 0."""

    use_pytorch_profiler: bool = option(False)
    """Use torch's profiler (a trace in --tensorboard-dir) instead of markers for Nsight."""

    record_memory_history: bool = option(False)
    """Record the CUDA allocator's history."""

    memory_snapshot_path: str = option("snapshot.pickle", metavar="FILE")
    """File for that history."""

    def __post_init__(self) -> None:
        if self.profile and self.profile_step_end <= self.profile_step_start:
            raise UserError(
                f"--profile-step-end ({self.profile_step_end}) must be after "
                f"--profile-step-start ({self.profile_step_start})"
            )
