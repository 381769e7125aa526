"""`RunConfig`: all that a training run is told, part by part.

A part's config stands beside the part in `megatron.core`; those of the reference application are in
modules of their own here, whose names end in ``_config``. Rules that look at two configs are in
`rules.py` and those beside it.
"""

from megatron.core.config import Config
from megatron.core.context_parallel.config import ContextParallelConfig
from megatron.core.datasets.config import DataConfig
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
from megatron.training.batch_size import BatchSizes, ramp, round_down, steps_in_samples
from megatron.training.checkpoint_config import CheckpointConfig
from megatron.training.log_config import HealthConfig, LoggingConfig, ProfilingConfig
from megatron.training.loop_config import TrainingConfig, ValidationConfig
from megatron.training.process_config import ProcessConfig


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
    def positions(self) -> int:
        """Return the positions of a sample in all of a model's stacks."""
        return self.data.seq_length + (self.data.t5.decoder_seq_length or 0)

    @property
    def target_positions(self) -> int:
        """Return the positions of a sample that have a loss: all, or those of the decoder."""
        return self.data.t5.decoder_seq_length or self.data.seq_length

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
    def expert_shares(self) -> int:
        """Return into how many shares the replicas of experts divide what they share out."""
        groups = self.replicas.num_distributed_optimizer_instances
        return self.axis_sizes["edp"] // groups if self.shares > 1 else 1

    @property
    def shared_by_torch(self) -> bool:
        """Return whether it is torch's ``fully_shard`` that shares weights out."""
        return self.replicas.use_torch_fsdp2 and self.shares > 1

    @property
    def placement(self) -> Placement:
        """Return where the stages of the pipeline live."""
        ranks = self.parallel.pipeline_model_parallel_size
        return self.pipeline.placement(self.model.all_layers, ranks, self._encoder_layers)

    @property
    def stages(self) -> list[Stage]:
        """Return every stage of the pipeline, by position."""
        ranks = self.parallel.pipeline_model_parallel_size
        model = self.model
        return self.pipeline.stages(model.all_layers, ranks, model.mtp.depths, self._encoder_layers)

    @property
    def _encoder_layers(self) -> int | None:
        return self.model.num_layers if self.model.has_two_stacks else None

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
