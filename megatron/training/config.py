"""What a training run is told: the loop's own configs, and `RunConfig`, which holds all of them.

A part's config stands beside the part in `megatron.core`; here are those of the reference
application: batches and length of the run, validation, checkpoints, logs, health checks, profiling,
processes. Rules that look at two configs are in `rules.py` and those beside it.
"""

import signal
from collections.abc import Mapping
from typing import Any, Literal

from megatron.core.config import Config, check_at_least, check_at_most, option
from megatron.core.context_parallel.config import ContextParallelConfig
from megatron.core.datasets.config import DataConfig
from megatron.core.dist_checkpointing.config import SpeedConfig
from megatron.core.dist_checkpointing.strictness import Strictness
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.grid import ParallelConfig, divisions
from megatron.core.optimizer.config import OptimizerConfig, ScheduleConfig
from megatron.core.optimizer.schedule import Schedule, build_schedule
from megatron.core.pipeline_parallel.config import PipelineConfig
from megatron.core.pipeline_parallel.placement import Placement
from megatron.core.pipeline_parallel.stages import Stage
from megatron.core.precision.config import PrecisionConfig
from megatron.core.tokenizers.config import TokenizerConfig
from megatron.core.transformer.config import TransformerConfig
from megatron.core.utils import UserError
from megatron.training.batch_size import BatchSizes, parse_steps, ramp, round_down, steps_in_samples
from megatron.training.process_config import ProcessConfig
from megatron.training.recovery_config import RecoveryConfig

LARGEST_SEED = 2**32 - 1
"""What every random generator takes, numpy's too."""
MOST_EVALUATED = 10_000_000
"""Batches of an evaluation: the order of all of them is held in memory."""


def parse_signal(text: str) -> int:
    """Return the number of a signal given by number (``15``) or name (``SIGTERM``, ``TERM``)."""
    name = text.strip().upper()
    try:
        found = signal.Signals(int(name)) if name.isdigit() else signal.Signals[_signal(name)]
    except (KeyError, ValueError):
        raise ValueError(f"--exit-signal takes a signal's name or number, not {text!r}") from None
    if found in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(f"--exit-signal {text}: no process can handle {found.name}; try SIGTERM")
    return int(found)


def _signal(name: str) -> str:
    return name if name.startswith("SIG") else f"SIG{name}"


def parse_duration(text: str) -> int | Literal["auto"]:
    """Return minutes, or ``auto``."""
    if text == "auto":
        return "auto"
    try:
        return int(text.replace("_", ""))
    except ValueError:
        raise ValueError(f"--exit-duration-in-mins takes minutes or 'auto', not {text!r}") from None


class TrainingConfig(Config):
    """Batches, length of the run, and how it ends."""

    micro_batch_size: int = option()
    """Samples in one forward and backward pass of a replica."""

    global_batch_size: int = option(derived="--micro-batch-size x data-parallel size")
    """Samples in one optimizer step, over all replicas and microbatches."""

    rampup_batch_size: tuple[int, int, int] | None = option(None, metavar="START INCREMENT SAMPLES")
    """Grow the global batch from START by INCREMENTs while the first SAMPLES are consumed."""

    step_batch_size_schedule: str | None = option(None, metavar="'0:SIZE TOKENS:SIZE ...'")
    """Global batch size by consumed tokens, such as ``0:768 250B:1536``; suffixes K, M, B, T."""

    decrease_batch_size_if_needed: bool = option(False)
    """Round the global batch down to what the replicas divide, instead of refusing it."""

    train_iters: int | None = option(None)
    """Length of the run in iterations (optimizer steps)."""

    train_samples: int | None = option(None)
    """Length of the run in samples; give this or --train-iters."""

    skip_train: bool = option(False)
    """Evaluate only."""

    seed: int = option(1234)
    """Seed of initial values, dropout and data order."""

    deterministic_mode: bool = option(False)
    """Use only kernels whose results are the same bit for bit in every run."""

    calculate_per_token_loss: bool = option(True)
    """Average the loss over all valid tokens of the global batch; off, average the means of the
    microbatches."""

    iterations_to_skip: tuple[int, ...] = option((), metavar="ITERATION")
    """Iterations whose data is consumed without training on it."""

    exit_interval: int | None = option(None)
    """Save and stop at the first iteration that this number divides."""

    exit_duration_in_mins: int | Literal["auto"] | None = option(
        None, parse=parse_duration, metavar="MINUTES|auto"
    )
    """Save and stop after this wall time; ``auto`` is Slurm's end time less the time of a save."""

    exit_signal_handler: bool = option(False)
    """Save and stop cleanly when the exit signal arrives."""

    exit_signal: int = option(int(signal.SIGTERM), parse=parse_signal, metavar="SIGNAL")
    """The signal that --exit-signal-handler waits for, by name or number."""

    exit_code_on_early_stop: int = option(0)
    """Exit code of a run that stopped cleanly before its end, for schedulers that resubmit."""

    manual_gc: bool = option(False)
    """Collect Python's garbage at fixed iterations only, so that ranks pause together."""

    manual_gc_interval: int = option(0)
    """Iterations between collections under --manual-gc; 0 never collects during training."""

    manual_gc_eval: bool = option(True, aliases={"--disable-manual-gc-eval": False})
    """Under --manual-gc, collect at the start and end of an evaluation too."""

    empty_unused_memory_level: int = option(0, choices=(0, 1, 2))
    """Give memory that torch's allocator holds and nobody uses back to the device: 1 after
    backwards and evaluations, 2 after the optimizer too; on CUDA."""

    @classmethod
    def derive(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Let the global batch be one microbatch per replica, or the last of a given schedule."""
        replica = (
            values["tensor_model_parallel_size"]
            * values["pipeline_model_parallel_size"]
            * values["context_parallel_size"]
        )
        replicas = max(1, values["world_size"] // max(1, replica))
        size = (values["micro_batch_size"] or 1) * replicas
        schedule = values["step_batch_size_schedule"]
        if schedule:
            size = parse_steps(schedule)[-1][1]
        return {"global_batch_size": size}

    def __post_init__(self) -> None:
        check_at_least(self, 1, "micro_batch_size", "global_batch_size", "exit_interval")
        check_at_least(self, 0, "train_iters", "train_samples", "manual_gc_interval")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise UserError(f"--seed ({self.seed}) must be 0 to {LARGEST_SEED}")
        if self.exit_duration_in_mins != "auto":
            check_at_least(self, 1, "exit_duration_in_mins")
        if not 0 <= self.exit_code_on_early_stop <= 255:
            raise UserError(
                f"--exit-code-on-early-stop ({self.exit_code_on_early_stop}) must be 0 to 255"
            )


class ValidationConfig(Config):
    """When to evaluate, and on how much."""

    eval_iters: int = option(100)
    """Batches of one evaluation; 0 never evaluates, -1 takes the whole validation set."""

    eval_interval: int | None = option(None)
    """Iterations between evaluations; when absent, only the end of the run is evaluated."""

    start_eval_at_iter: int | None = option(None)
    """First iteration after which the periodic evaluations begin."""

    def __post_init__(self) -> None:
        if self.eval_iters < -1:
            raise UserError(
                f"--eval-iters ({self.eval_iters}) must be a number of batches, 0 for none or -1 "
                "for the whole validation set"
            )
        check_at_most(self, MOST_EVALUATED, "eval_iters")
        if self.eval_interval is not None and self.eval_interval < 1:
            raise UserError(
                f"--eval-interval ({self.eval_interval}) must be at least 1; "
                "--eval-iters 0 turns evaluation off"
            )


class CheckpointConfig(Config):
    """What is saved and loaded, where and when."""

    save: str | None = option(None, metavar="DIR")
    """Folder for checkpoints."""

    save_interval: int | None = option(None, aliases=("--persistent-save-interval",))
    """Iterations between checkpoints; one is always written at the end when --save is given."""

    save_retain_interval: int | None = option(None)
    """Keep older checkpoints only where this number divides the iteration (and the newest)."""

    save_keep_last: int | None = option(None)
    """Keep the newest N checkpoints, and those that --save-retain-interval keeps."""

    save_optim: bool = option(True)
    """Store the optimizer's state."""

    save_rng: bool = option(True)
    """Store the state of the random generators."""

    load: str | None = option(None, metavar="DIR")
    """Folder to continue from; absent or empty, training starts from scratch with a warning."""

    ckpt_step: int | None = option(None)
    """Load this iteration instead of the newest: of --load, or of --pretrained-checkpoint when only
    that is given."""

    override_ckpt_iteration: int | None = option(None)
    """Count on from this iteration, whatever the checkpoint says; samples go on as stored."""

    load_optim: bool = option(True)
    """Restore the optimizer's state."""

    load_rng: bool = option(True)
    """Restore the state of the random generators."""

    finetune: bool = option(False)
    """Load weights only and start at iteration 0."""

    pretrained_checkpoint: str | None = option(None, metavar="DIR")
    """Weights to start from when --load holds no checkpoint."""

    exit_on_missing_checkpoint: bool = option(False)
    """Stop instead of starting from scratch when --load holds no checkpoint."""

    verify_integrity: bool = option(True)
    """Compare every checksum of a checkpoint before it is loaded; off reads its bytes once."""

    dist_ckpt_strictness: Strictness = option("raise_all")
    """What to do when checkpoint and run do not hold the same tensors."""

    exit_on_failed_save: bool = option(False)
    """Stop when a checkpoint cannot be written, instead of training on without it."""

    speed: SpeedConfig = SpeedConfig.resolve()

    use_checkpoint_args: bool = option(False)
    """Take the model's architecture from the checkpoint."""

    use_mp_args_from_checkpoint_args: bool = option(False)
    """Under --use-checkpoint-args, take the sizes of tensor and pipeline parallelism too."""

    load_main_params_from_ckpt: bool = option(False)
    """Make fp32 masters of the loaded weights instead of loading those that were stored."""

    ckpt_format: Literal["torch", "torch_dist", "torch_dcp", "fsdp_dtensor"] | None = option(None)
    """Accepted from scripts: checkpoints are saved in one format of this program's own, and any
    format is recognised on load."""

    ckpt_convert_format: Literal["torch", "torch_dist"] | None = option(None)
    """Write the checkpoint of --load in this format of Megatron-LM and exit; torch_dist only."""

    ckpt_convert_save: str | None = option(None, metavar="DIR")
    """Folder for what --ckpt-convert-format writes, in a folder named after the format."""

    use_tokenizer_model_from_checkpoint_args: bool = option(
        True, aliases={"--disable-use-tokenizer-model-from-checkpoint-args": False}
    )
    """Under --use-checkpoint-args, take the tokenizer too, unless the command line names one."""

    recovery: RecoveryConfig = RecoveryConfig.resolve()

    def __post_init__(self) -> None:
        check_at_least(self, 1, "save_interval", "save_retain_interval", "save_keep_last")
        check_at_least(self, 0, "override_ckpt_iteration")
        self._check_conversion()

    def _check_conversion(self) -> None:
        if self.ckpt_convert_format is None:
            return
        if self.ckpt_convert_format == "torch":
            raise UserError(
                "--ckpt-convert-format torch: files for each rank of one layout are not written; "
                "give torch_dist, which Megatron-LM reads on any layout"
            )
        if self.load is None or self.ckpt_convert_save is None:
            raise UserError(
                f"--ckpt-convert-format {self.ckpt_convert_format} needs --load DIR (what to "
                "convert) and --ckpt-convert-save DIR (where to)"
            )

    @property
    def pretrained_step(self) -> int | None:
        """Return the iteration to take of --pretrained-checkpoint; None for the newest."""
        return None if self.load else self.ckpt_step


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


class RunConfig(Config):
    """Everything a training run is told."""

    model: TransformerConfig
    tokenizer: TokenizerConfig
    data: DataConfig
    precision: PrecisionConfig
    parallel: ParallelConfig
    pipeline: PipelineConfig
    context: ContextParallelConfig
    replicas: DataParallelConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    training: TrainingConfig
    validation: ValidationConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    health: HealthConfig
    profiling: ProfilingConfig
    process: ProcessConfig

    @property
    def data_parallel_size(self) -> int:
        """Return the number of replicas."""
        return self.parallel.data_parallel_size(self.process.world_size)

    @property
    def parted_axes(self) -> dict[str, int]:
        """Return what parts the axes of the mesh further: `Mesh.create`'s keywords."""
        return {
            "num_query_groups": self.model.attention.num_query_groups,
            "cp_inner_size": self.context.inner_size(self.parallel.context_parallel_size),
            "optimizer_instances": self.replicas.num_distributed_optimizer_instances,
        }

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Return the ranks of every axis by its name, as `Mesh` has them; of ``ends`` its ends'."""
        world = self.process.world_size
        parted = divisions(self.parallel, world, **self.parted_axes)
        return {name: axis.size for name, axis in parted.items()} | {"world": world}

    @property
    def shares(self) -> int:
        """Return into how many shares replicas divide what they share out; 1 for nothing."""
        ranks = self.data_parallel_size * self.parallel.context_parallel_size
        return self.replicas.shares(ranks)

    @property
    def shared_by_torch(self) -> bool:
        """Return whether it is torch's ``fully_shard`` that shares weights out."""
        return self.replicas.use_torch_fsdp2 and self.shares > 1

    @property
    def placement(self) -> Placement:
        """Return where the stages of the pipeline live."""
        ranks = self.parallel.pipeline_model_parallel_size
        return self.pipeline.placement(self.model.num_layers, ranks)

    @property
    def stages(self) -> list[Stage]:
        """Return every stage of the pipeline, by position."""
        ranks = self.parallel.pipeline_model_parallel_size
        return self.pipeline.stages(self.model.num_layers, ranks, self.model.mtp.depths)

    @property
    def sequence_shares(self) -> int:
        """Return how many ranks split the sequence of what travels between stages."""
        parallel = self.parallel
        tp = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
        return parallel.context_parallel_size * tp

    @property
    def residual_dtype(self) -> str:
        """Return the dtype of hidden states between blocks and between stages."""
        fp32 = self.model.fp32_residual_connection
        return self.precision.accumulation_dtype if fp32 else self.precision.params_dtype

    @property
    def samples_per_pass(self) -> int:
        """Return the samples that all replicas take in one pass: the unit of the global batch."""
        return self.training.micro_batch_size * self.data_parallel_size

    @property
    def batch_sizes(self) -> BatchSizes:
        """Return the global batch size as a function of the samples consumed."""
        training = self.training
        if training.step_batch_size_schedule is not None:
            return steps_in_samples(training.step_batch_size_schedule, self.data.seq_length)
        if training.rampup_batch_size is not None:
            start, increment, samples = training.rampup_batch_size
            sizes = ramp(start, increment, samples, training.global_batch_size)
        else:
            sizes = BatchSizes.constant(training.global_batch_size)
        if training.decrease_batch_size_if_needed:
            return round_down(sizes, self.samples_per_pass)
        return sizes

    @property
    def learning_schedule(self) -> Schedule:
        """Return learning rate and weight decay as functions of progress."""
        return build_schedule(
            self.schedule,
            self.optimizer.weight_decay,
            train_iters=self.training.train_iters,
            train_samples=self.training.train_samples,
            decoupled_lr=self.optimizer.decoupled_lr,
            decoupled_min_lr=self.optimizer.decoupled_min_lr,
        )

    @property
    def total_iterations(self) -> int:
        """Return the length of the run in iterations."""
        if self.training.train_samples is not None:
            return self.batch_sizes.iterations(self.training.train_samples)
        return self.training.train_iters or 0

    @property
    def total_samples(self) -> int:
        """Return the samples that the run consumes: those of its full iterations."""
        return self.batch_sizes.samples(self.total_iterations)
