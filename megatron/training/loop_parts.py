"""What the loop of a run is made of, from the parts that were built and loaded."""

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from megatron.core.datasets.sampler import sample_order
from megatron.core.mesh import Mesh
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.utils import Say
from megatron.training import data as run_data
from megatron.training import external, memory
from megatron.training.batches import Batches, NoBatches, Samples, training_numbers
from megatron.training.build import build_passes
from megatron.training.checkpoints.load import Loaded
from megatron.training.checkpoints.run import CheckpointedRun
from megatron.training.checkpoints.save import warn_of_space
from megatron.training.checkpoints.saver import Saver
from megatron.training.config import RunConfig
from megatron.training.data import RunData
from megatron.training.devices import peak_flops
from megatron.training.evaluation import EvaluationSet, Evaluator, HeldOut, open_set
from megatron.training.external import ExternalBatches, Loader
from megatron.training.failing.heartbeat import Pulse
from megatron.training.garbage import Garbage
from megatron.training.health import Health
from megatron.training.memory_use.log import MemoryLog
from megatron.training.memory_use.use import MemoryUse
from megatron.training.passes import ForwardStep, Passes
from megatron.training.planner import Planner
from megatron.training.profiling import Profiler
from megatron.training.records.metrics import Facts, Metrics
from megatron.training.records.progress_file import ProgressFile
from megatron.training.records.run_status import StatusFile
from megatron.training.records.writers import Writer, open_writers
from megatron.training.replica_check import ReplicaCheck
from megatron.training.signals import ExitSignal
from megatron.training.state import TrainState
from megatron.training.step import TrainStep
from megatron.training.stopping import Stopper
from megatron.training.timers import Timers, synchronizer
from megatron.training.trainer import Parts, Trainer


@dataclass(frozen=True, kw_only=True)
class Built:
    """What a run has when its checkpoint is loaded."""

    data: RunData
    chunks: Sequence[nn.Module]
    optimizer: Optimizer | None
    """None when there is only evaluation."""
    run: CheckpointedRun
    loaded: Loaded
    flops_per_sample: int


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a run has from its start to its end."""

    config: RunConfig
    mesh: Mesh
    forward_step: ForwardStep
    say: Say
    started: float
    signal: ExitSignal | None
    pulse: Pulse
    memory: MemoryUse
    status: StatusFile


class LoopParts:
    """Makes the loop's parts, each from what is built and what is around.

    Args:
        around: what the run has from its start.
        built: the parts that the run has made.
    """

    def __init__(self, around: Surroundings, built: Built) -> None:
        self._around, self._built = around, built
        self._config, self._mesh = around.config, around.mesh
        self._state: TrainState = built.loaded.state
        self._saver: Saver | None = None

    def rescue(self, *, alike: bool) -> None:
        """End a save that is under way, since training has failed."""
        if self._saver is not None:
            self._saver.rescue(alike=alike)

    def metrics(self) -> Metrics:
        """Return the records of this run, and their files where this rank writes any."""
        config, logging = self._config, self._config.logging
        facts = Facts(
            train_iters=config.total_iterations,
            seq_length=config.data.seq_length,
            world_size=self._mesh.world.size,
            flops_per_sample=self._built.flops_per_sample,
            peak_flops=peak_flops(self._mesh.device, config.precision.params_dtype),
            attempt=self._around.status.attempt,
            memory=memory.in_use(self._mesh.device),
            epochs=run_data.epochs(self._built.data.train),
        )
        writers: list[Writer] = []
        if self._mesh.rank == 0 and not config.training.skip_train:
            writers = open_writers(config, self._state.iteration)
        return Metrics(
            facts,
            writers,
            self._around.say,
            show_throughput=logging.log_throughput,
            show_experts=logging.moe_per_layer_logging,
        )

    def passes(self) -> Passes:
        """Return what takes microbatches through the model's chunks."""
        return build_passes(
            self._config,
            self._mesh,
            self._built.chunks,
            self._around.forward_step,
            Timers(self._config.logging.timing_log_level, synchronizer(self._mesh.device)),
            observe=self._around.pulse.action,
        )

    def held_out(self, passes: Passes, metrics: Metrics) -> HeldOut:
        """Return the evaluations of this run."""
        config, data, state = self._config, self._built.data, self._state

        def opened(
            dataset: Samples | Loader, name: str, key: str, eval_iters: int
        ) -> EvaluationSet:
            return open_set(
                dataset,
                self._mesh,
                name=name,
                eval_iters=eval_iters,
                global_batch_size=config.batch_sizes.final,
                micro_batch_size=config.training.micro_batch_size,
                consumed_samples=state.evaluated.get(key, 0),
                read=functools.partial(self._read, num_workers=min(1, config.data.num_workers)),
            )

        iterations = config.validation.eval_iters
        whole = -1 if config.data.full_validation else iterations
        names = list(data.valid_names) if len(data.valid) > 1 else [""] * len(data.valid)
        validation = [
            opened(dataset, name, f"valid {name}".strip(), whole)
            for dataset, name in zip(data.valid, names, strict=True)
        ]
        test = [opened(data.test, "", "test", iterations)] if data.test is not None else []
        evaluator = Evaluator(passes, self._empty_unused)
        return HeldOut(evaluator, validation, test, metrics, Garbage(config.training))

    def trainer(
        self, optimizer: Optimizer, passes: Passes, held_out: HeldOut, metrics: Metrics
    ) -> Trainer:
        """Return the loop; ``optimizer`` is the one that was built."""
        config, state, save_to = self._config, self._state, self._config.checkpoint.save
        schedule = self._built.loaded.schedule
        assert schedule is not None, "a run with an optimizer has a schedule"
        saver = self._made_saver() if save_to else None
        self._saver = self._around.memory.saver = saver
        step = TrainStep(
            passes,
            optimizer,
            Health(config.health),
            seed=config.training.seed,
            count_zeros=config.logging.log_num_zeros_in_grad,
            group_norms=config.logging.log_grad_norms_by_group,
            empty_unused=self._empty_unused,
            before_update=saver.settle if saver is not None else lambda: None,
        )
        warn_of_space(self._built.run)
        parts = Parts(
            step=step,
            batches=self._training_batches(self._built.data.train),
            planner=Planner(config, self._mesh, schedule),
            train_iters=config.total_iterations,
            held_out=held_out,
            metrics=metrics,
            stopper=Stopper(
                config.training,
                save=save_to,
                started=self._around.started,
                environ=os.environ,
                signal=self._around.signal,
            ),
            profiler=Profiler(
                config.profiling,
                self._mesh.rank,
                self._mesh.device,
                config.logging.tensorboard_dir or save_to or ".",
            ),
            garbage=Garbage(config.training),
            replica_check=self._replica_check(optimizer),
            report_memory=MemoryLog(self._around.memory, metrics, self._around.say).report,
            watch_memory=self._around.memory.watched,
            pulse=self._around.pulse,
            saver=saver,
            say=self._around.say,
            flops_per_sample=self._built.flops_per_sample,
        )
        return Trainer(config, parts, state)

    def _replica_check(self, optimizer: Optimizer) -> ReplicaCheck | None:
        interval = self._config.health.check_weight_hash_across_dp_replicas_interval
        if interval is None or self._mesh.world.size == 1:
            return None
        return ReplicaCheck(optimizer.data_parallel, self._mesh, interval)

    def _training_batches(self, train: Samples | Loader) -> Batches | ExternalBatches | NoBatches:
        """Return this rank's microbatches from the run's position to its end."""
        config, state = self._config, self._state
        micro = config.training.micro_batch_size
        if callable(train):
            return external.open_loader(train, self._mesh, micro, state.consumed_samples)
        kind = config.data.dataloader_type
        assert kind != "external", "loaders were told from data sets before"
        order = sample_order(
            kind,
            len(train),
            config.total_samples,
            micro_batch_size=micro,
            data_parallel_size=self._mesh.dp.size,
        )
        numbers = training_numbers(
            self._mesh,
            config.batch_sizes,
            micro,
            iteration=state.iteration,
            consumed_samples=state.consumed_samples,
            train_iters=config.total_iterations,
            skipped=frozenset(config.training.iterations_to_skip),
            order=order,
        )
        return self._read(train, numbers, config.data.num_workers)

    def _made_saver(self) -> Saver:
        state, status = self._state, self._around.status
        checkpoint = self._config.checkpoint
        assert checkpoint.save is not None
        progress = None
        if self._config.logging.log_progress and self._mesh.rank == 0:
            progress = ProgressFile(
                checkpoint.save, self._mesh.world.size, self._config.data.seq_length
            )
            progress.start(state)

        def saved(folder: Path, of: TrainState) -> None:
            status.checkpoint = folder
            # A kill from here on finds it; the run itself may be further by now.
            status.write("running", state.iteration)
            if progress is not None:
                progress.saved(of)

        return Saver(self._built.run, saved)

    def _read(
        self, dataset: Samples, numbers: Iterable[Sequence[int]], num_workers: int
    ) -> Batches | NoBatches:
        config = self._config
        if not run_data.is_read(config, self._mesh.pp.coordinate):
            return NoBatches()
        return Batches(
            dataset,
            numbers,
            self._mesh.device,
            num_workers,
            without=run_data.unneeded(config.data),
            exit_signal=self._around.signal.number if self._around.signal else None,
        )

    @property
    def _empty_unused(self) -> Callable[[int], None]:
        level = self._config.training.empty_unused_memory_level
        return memory.emptying(level, self._mesh.device)
