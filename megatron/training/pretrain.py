"""One run from its resolved flags to its exit code: the parts are made here, in this order.

    device and mesh -> tokenizer -> data sets -> model -> optimizer -> checkpoint -> loop -> end

An entry point brings a `Program`: how to build its model and its data sets, and a forward step.
"""

import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from megatron.core import held
from megatron.core.datasets.builder import Sizes
from megatron.core.datasets.cache import BuildPolicy
from megatron.core.datasets.sampler import sample_order
from megatron.core.dist_checkpointing.lease import Lease
from megatron.core.mesh import Mesh
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.optimizer.schedule import Schedule
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.vocabulary import Vocabulary, resolve_vocabulary
from megatron.core.utils import Say, UserError
from megatron.training import agreement, device_choices, external, memory, startup, stopping
from megatron.training import data as run_data
from megatron.training.arguments import ParsedRun
from megatron.training.batches import Batches, NoBatches, Samples, training_numbers
from megatron.training.build import BuildModel, build_chunks, build_passes, build_run_optimizer
from megatron.training.checkpoints.convert import convert
from megatron.training.checkpoints.facts import RunFacts
from megatron.training.checkpoints.load import Loaded, load_checkpoint
from megatron.training.checkpoints.recovery import check_places
from megatron.training.checkpoints.save import warn_of_space
from megatron.training.checkpoints.saver import Saver
from megatron.training.config import RunConfig
from megatron.training.data import RunData
from megatron.training.devices import peak_flops
from megatron.training.evaluation import EvaluationSet, Evaluator, HeldOut, open_set
from megatron.training.external import ExternalBatches, Loader
from megatron.training.failing import watchdog
from megatron.training.failing.failure import RunFailed, describe, write_error_file
from megatron.training.failing.heartbeat import Pulse
from megatron.training.failing.watchdog import Watchdog
from megatron.training.garbage import Garbage
from megatron.training.health import Health
from megatron.training.memory_use.log import MemoryLog
from megatron.training.memory_use.out_of_memory import explained
from megatron.training.memory_use.use import MemoryUse
from megatron.training.passes import ForwardStep, Passes
from megatron.training.plan import accounting
from megatron.training.planner import Planner
from megatron.training.processes import setup
from megatron.training.processes.launch import Launch
from megatron.training.processes.rank_zero import from_first
from megatron.training.profiling import Profiler
from megatron.training.records import log_line, run_status
from megatron.training.records.metrics import Facts, Metrics
from megatron.training.records.progress_file import ProgressFile
from megatron.training.records.writers import Writer, last_attempt, open_writers
from megatron.training.replica_check import ReplicaCheck
from megatron.training.signals import ExitSignal
from megatron.training.state import TrainState
from megatron.training.step import TrainStep
from megatron.training.stopping import Reason, Stopper
from megatron.training.timers import Timers, synchronizer
from megatron.training.trainer import Parts, Trainer


@dataclass(frozen=True, kw_only=True)
class Program:
    """What an entry point brings to a run."""

    build_model: BuildModel
    """Returns this rank's chunks of the model, one for each of its stages, with named records;
    initial values are drawn later."""
    build_datasets: Callable[[RunConfig, Sizes, Tokenizer, BuildPolicy, Say], RunData]
    """Returns the data sets, or loaders of the program's own (see `external`); the policy says
    whether this process builds index files or waits for them."""
    forward_step: ForwardStep


def pretrain(run: ParsedRun[RunConfig], launch: Launch, program: Program) -> int:
    """Train (or evaluate) as ``run`` says and return the process's exit code.

    What is raised among several processes ends this one here, with a word to the others.

    Raises:
        UserError: something that a user can fix; nothing was saved.
    """
    clock = startup.StartupClock()
    config, started = run.config, time.time()
    say = startup.printer(launch.rank)
    device_choices.check_device(config, torch.cuda.is_available())
    if run.invocation.rank not in (None, launch.rank):
        raise UserError(
            f"--rank ({run.invocation.rank}), but this is rank {launch.rank} by the launcher "
            f"({launch.source}): leave it out, ranks come from the launcher's environment"
        )
    say(f"launch: {launch}")
    mesh = setup.create_mesh(config, launch, say)
    pulse = Pulse(60.0 * config.process.distributed_timeout_minutes)
    name = Path(sys.argv[0]).stem
    try:
        with watchdog.watching(mesh.world, mesh.where, launch.master_addr, pulse, name) as watch:
            for line in (
                *startup.environment_lines(mesh),
                *startup.settings_lines(config.flatten(), run.origins),
                *run.lines(),
            ):
                say(line)
            clock.lap("set-up")
            # One process of each machine builds, since a cache folder may be a machine's own.
            build = launch.local_rank == 0
            policy = BuildPolicy(build=build, timeout=config.data.index_build_timeout)
            job = Job(config, mesh, program, policy, say, clock, started)
            job.pulse, job.watchdog, job.memory.origins = pulse, watch, run.origins
            if not config.training.exit_signal_handler:
                return job.run()
            with ExitSignal(config.training.exit_signal) as job.signal:
                return job.run()
    except RunFailed as error:
        failure = describe(error)
        write_error_file(failure.message, failure.stack)
        print(f"{mesh.where} {failure.line}", file=sys.stderr, flush=True)
        return failure.code
    finally:
        setup.disconnect()


@dataclass(frozen=True, kw_only=True)
class _Built:
    """What a run has when its checkpoint is loaded."""

    data: RunData
    chunks: Sequence[nn.Module]
    optimizer: Optimizer | None
    """None when there is only evaluation."""
    facts: RunFacts
    loaded: Loaded


class Job:
    """The parts of one run in one process, and how it ends."""

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        program: Program,
        policy: BuildPolicy,
        say: Say,
        clock: startup.StartupClock,
        started: float,
    ) -> None:
        self.config, self.mesh = config, mesh
        self.program, self.policy = program, policy
        self.say, self.clock, self.started = say, clock, started
        self.signal: ExitSignal | None = None
        self.pulse = Pulse()
        self.watchdog: Watchdog | None = None
        self.attempt = 0
        self.flops_per_sample = 0
        self.memory = MemoryUse(config, mesh)
        self.saver: Saver | None = None
        self.lease: Lease | None = None
        """Rank 0's right to save to --save."""
        self.newest: Path | None = None
        """The newest checkpoint of this run."""

    def run(self) -> int:
        """Build the parts, load, train, evaluate; return the exit code.

        Raises:
            RunFailed: training cannot go on, for want of memory too.
        """
        try:
            with held.counting() as self.memory.passing, explained(self.memory, self.pulse):
                return self._run()
        finally:
            if self.lease is not None:
                self.lease.release()

    def _run(self) -> int:
        config = self.config
        startup.check_outputs(config)
        if config.checkpoint.ckpt_convert_format is not None:
            convert(config.checkpoint, self.mesh, self.say)
            return 0
        if not config.training.skip_train:
            agreement.check_save_folder(self.mesh.world, config.checkpoint.save)
            check_places(config.checkpoint, self.mesh)
            # Before anything is written there, and before it is known what to start from.
            from_first(self.mesh.world, self._take_lease)
        tokenizer = build_tokenizer(config.tokenizer)
        tensor_parallel = config.parallel.tensor_model_parallel_size
        vocabulary = resolve_vocabulary(config.tokenizer, tokenizer.vocab_size, tensor_parallel)
        self.memory.padded_rows = vocabulary.padded_rows
        self.flops_per_sample = accounting.flops_per_sample(
            config.model, config.data.seq_length, vocabulary.padded_rows
        )
        self.pulse.untimed("building the data sets")
        wanted = run_data.sizes(config, self.say)
        agreement.check_sources(self.mesh.world, config.data)
        data = self.program.build_datasets(config, wanted, tokenizer, self.policy, self.say)
        external.check(config.data.dataloader_type == "external", data)
        for line in run_data.index_lines(data):
            self.say(line)
        agreement.check_inputs(self.mesh.world, tokenizer, data)
        self.clock.lap("data")
        self.pulse.untimed("building the model")
        chunks = self._build_model(vocabulary)
        optimizer, schedule = self._optimizer(chunks)
        self.memory.optimizer = optimizer
        self.clock.lap("model")
        facts = RunFacts(
            config=config.flatten(),
            schedule=schedule,
            tokenizer=tokenizer.fingerprint(),
            vocabulary=vocabulary.ids_in_use,
            vocabulary_rows=vocabulary.rows,
            objective="tokens" if config.training.calculate_per_token_loss else "microbatches",
        )
        self.pulse.untimed("loading the checkpoint")
        loaded = load_checkpoint(
            config.checkpoint, config.schedule, self.mesh, chunks, optimizer, facts, self.say
        )
        # The next checkpoint stores the schedule that is followed, not the one the flags gave.
        facts = replace(facts, schedule=loaded.schedule)
        self.newest = loaded.folder
        self.clock.lap("load")
        if self._is_complete(loaded.state):
            return 0
        built = _Built(data=data, chunks=chunks, optimizer=optimizer, facts=facts, loaded=loaded)
        return self._work(built)

    def _take_lease(self) -> None:
        save = self.config.checkpoint.save
        if save is not None:
            self.lease = Lease(Path(save), say=self.say)

    def _build_model(self, vocabulary: Vocabulary) -> Sequence[nn.Module]:
        chunks = build_chunks(self.config, self.mesh, vocabulary, self.program.build_model)
        dtype = getattr(torch, self.config.precision.params_dtype)
        lines = startup.kernel_lines(chunks[0], self.mesh.device, dtype)
        for line in (*lines, *startup.parameter_table(chunks)):
            self.say(line)
        count = sum(parameter.numel() for parameter in startup.parameters(chunks))
        self.say(log_line.parameter_line(self.mesh.pp.coordinate, self.mesh.tp.coordinate, count))
        return chunks

    def _optimizer(self, chunks: Sequence[nn.Module]) -> tuple[Optimizer | None, Schedule | None]:
        config = self.config
        if config.training.skip_train:
            return None, None
        optimizer = build_run_optimizer(config, chunks, self.mesh)
        groups = [f"optimizer group {line}" for line in optimizer.describe()]
        for line in (*startup.sharing_lines(config), *groups):
            self.say(line)
        return optimizer, config.learning_schedule

    def _is_complete(self, state: TrainState) -> bool:
        total = self.config.total_iterations
        if self.config.training.skip_train or not 0 < total <= state.iteration:
            return False
        self.say(
            f"training is already complete: the checkpoint is at iteration {state.iteration} of "
            f"{total}; nothing is done (a longer run needs a higher --train-iters or "
            "--train-samples)"
        )
        # A run that was killed after its last save has left another status behind.
        save = self.config.checkpoint.save
        if not run_status.is_complete(save):
            self.attempt = run_status.attempt(save) or 0
            self._status("complete", state, None)
        return True

    def _work(self, built: _Built) -> int:
        """Train and evaluate from the state that was loaded; leave a status behind."""
        config, state = self.config, built.loaded.state
        self._announce(state)
        metrics = self._metrics(built.data, state)
        reason: Reason = "failure"
        message = None
        try:
            timers = Timers(config.logging.timing_log_level, synchronizer(self.mesh.device))
            passes = self._passes(built.chunks, timers)
            held_out = self._held_out(built.data, passes, metrics, state)
            if built.optimizer is None:
                reason = "complete"
            else:
                trainer = self._trainer(built, built.optimizer, passes, held_out, metrics)
                reason = trainer.train(lambda seconds: self.say(self.clock.line(seconds)))
            if reason == "complete":
                self.pulse.timed("the last evaluation")
                held_out.finish(state)
                self.pulse.untimed("the end")
        except RunFailed as failure:
            message = str(failure)
            self._rescue(alike=True)
            raise
        except BaseException as failure:
            reason, message = "failure", f"{type(failure).__name__}: {failure}"
            self._rescue(alike=False)
            raise
        finally:
            metrics.close()
            # Where there is a watchdog, it knows the first cause of a failure, and writes that.
            if reason != "failure" or self.watchdog is None:
                self._status(reason, state, message)
        if reason != "complete":
            self.say(f"stopped after iteration {state.iteration}: {reason}")
            return config.training.exit_code_on_early_stop
        return 0

    def _rescue(self, *, alike: bool) -> None:
        """End a save that is under way, since training has failed."""
        if self.saver is not None:
            self.saver.rescue(alike=alike)

    def _passes(self, chunks: Sequence[nn.Module], timers: Timers) -> Passes:
        return build_passes(
            self.config,
            self.mesh,
            chunks,
            self.program.forward_step,
            timers,
            observe=self.pulse.action,
        )

    def _announce(self, state: TrainState) -> None:
        save, total = self.config.checkpoint.save, self.config.total_iterations
        previous = (last_attempt(self.config.logging.metrics_file), run_status.attempt(save))
        self.attempt = max((one + 1 for one in previous if one is not None), default=0)
        if self.mesh.rank == 0 and stopping.clear_stop_file(save):
            self.say(f"removed a file {stopping.STOP_FILE} in {save} from before this run")
        if not self.config.training.skip_train:
            self.say(
                f"training from iteration {state.iteration} to {total}; the first sample is "
                f"number {state.consumed_samples} of the training set"
            )
            self._status("running", state, None)
        if self.watchdog is not None:
            self.watchdog.on_failure = lambda cause: self._status("failure", state, cause)

    def _status(self, reason: run_status.Reason, state: TrainState, message: str | None) -> None:
        if self.mesh.rank != 0 or self.config.training.skip_train:
            return
        run_status.write(
            self.config.checkpoint.save,
            reason=reason,
            iteration=state.iteration,
            checkpoint=str(self.newest) if self.newest else None,
            attempt=self.attempt,
            message=message,
        )

    @property
    def _empty_unused(self) -> Callable[[int], None]:
        level = self.config.training.empty_unused_memory_level
        return memory.emptying(level, self.mesh.device)

    def _metrics(self, data: RunData, state: TrainState) -> Metrics:
        config, logging = self.config, self.config.logging
        facts = Facts(
            train_iters=config.total_iterations,
            seq_length=config.data.seq_length,
            world_size=self.mesh.world.size,
            flops_per_sample=self.flops_per_sample,
            peak_flops=peak_flops(self.mesh.device, config.precision.params_dtype),
            attempt=self.attempt,
            memory=memory.in_use(self.mesh.device),
            epochs=run_data.epochs(data.train),
        )
        writers: list[Writer] = []
        if self.mesh.rank == 0 and not config.training.skip_train:
            writers = open_writers(config, state.iteration)
        return Metrics(facts, writers, self.say, show_throughput=logging.log_throughput)

    def _read(
        self, dataset: Samples, numbers: Iterable[Sequence[int]], num_workers: int
    ) -> Batches | NoBatches:
        config = self.config
        if not run_data.is_read(config, self.mesh.pp.coordinate):
            return NoBatches()
        return Batches(
            dataset,
            numbers,
            self.mesh.device,
            num_workers,
            without=run_data.unneeded(config.data),
            exit_signal=self.signal.number if self.signal else None,
        )

    def _held_out(
        self, data: RunData, passes: Passes, metrics: Metrics, state: TrainState
    ) -> HeldOut:
        config = self.config

        def opened(
            dataset: Samples | Loader, name: str, key: str, eval_iters: int
        ) -> EvaluationSet:
            return open_set(
                dataset,
                self.mesh,
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

    def _trainer(
        self,
        built: _Built,
        optimizer: Optimizer,
        passes: Passes,
        held_out: HeldOut,
        metrics: Metrics,
    ) -> Trainer:
        config, state, save_to = self.config, built.loaded.state, self.config.checkpoint.save
        chunks, schedule = built.chunks, built.loaded.schedule
        assert schedule is not None, "a run with an optimizer has a schedule"
        saver = self._saver(chunks, optimizer, built.facts, state) if save_to else None
        self.saver = self.memory.saver = saver
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
        warn_of_space(config.checkpoint, self.mesh, chunks, optimizer, self.say)
        parts = Parts(
            step=step,
            batches=self._training_batches(built.data.train, state),
            planner=Planner(config, self.mesh, schedule),
            train_iters=config.total_iterations,
            held_out=held_out,
            metrics=metrics,
            stopper=Stopper(
                config.training,
                save=save_to,
                started=self.started,
                environ=os.environ,
                signal=self.signal,
            ),
            profiler=Profiler(
                config.profiling,
                self.mesh.rank,
                self.mesh.device,
                config.logging.tensorboard_dir or save_to or ".",
            ),
            garbage=Garbage(config.training),
            replica_check=self._replica_check(optimizer),
            report_memory=MemoryLog(self.memory, metrics, self.say).report,
            watch_memory=self.memory.watched,
            pulse=self.pulse,
            saver=saver,
            say=self.say,
            flops_per_sample=self.flops_per_sample,
        )
        return Trainer(config, parts, state)

    def _replica_check(self, optimizer: Optimizer) -> ReplicaCheck | None:
        interval = self.config.health.check_weight_hash_across_dp_replicas_interval
        if interval is None or self.mesh.world.size == 1:
            return None
        return ReplicaCheck(optimizer.data_parallel, self.mesh, interval)

    def _training_batches(
        self, train: Samples | Loader, state: TrainState
    ) -> Batches | ExternalBatches | NoBatches:
        """Return this rank's microbatches from the run's position to its end."""
        config, micro = self.config, self.config.training.micro_batch_size
        if callable(train):
            return external.open_loader(train, self.mesh, micro, state.consumed_samples)
        kind = config.data.dataloader_type
        assert kind != "external", "loaders were told from data sets before"
        order = sample_order(
            kind,
            len(train),
            config.total_samples,
            micro_batch_size=micro,
            data_parallel_size=self.mesh.dp.size,
        )
        numbers = training_numbers(
            self.mesh,
            config.batch_sizes,
            micro,
            iteration=state.iteration,
            consumed_samples=state.consumed_samples,
            train_iters=config.total_iterations,
            skipped=frozenset(config.training.iterations_to_skip),
            order=order,
        )
        return self._read(train, numbers, config.data.num_workers)

    def _saver(
        self, chunks: Sequence[nn.Module], optimizer: Optimizer, facts: RunFacts, state: TrainState
    ) -> Saver:
        checkpoint = self.config.checkpoint
        assert checkpoint.save is not None
        progress = None
        if self.config.logging.log_progress and self.mesh.rank == 0:
            progress = ProgressFile(
                checkpoint.save, self.mesh.world.size, self.config.data.seq_length
            )
            progress.start(state)

        def saved(folder: Path, of: TrainState) -> None:
            self.newest = folder
            # A kill from here on finds it; the run itself may be further by now.
            self._status("running", state, None)
            if progress is not None:
                progress.saved(of)

        return Saver(checkpoint, self.mesh, chunks, optimizer, facts, self.say, saved, self.lease)
