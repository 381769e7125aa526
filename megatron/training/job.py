"""The parts of one run in one process, made in this order, and how it ends.

tokenizer -> data sets -> model -> optimizer -> checkpoint -> loop -> end
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from megatron.core import held
from megatron.core.datasets.cache import BuildPolicy
from megatron.core.dist_checkpointing.lease import Lease
from megatron.core.mesh import Mesh
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.optimizer.schedule import Schedule
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.vocabulary import Vocabulary, resolve_vocabulary
from megatron.core.utils import Say, UserError
from megatron.training import agreement, external, startup, stopping
from megatron.training import data as run_data
from megatron.training.build import build_chunks, build_run_optimizer
from megatron.training.checkpoints.convert import convert
from megatron.training.checkpoints.facts import RunFacts
from megatron.training.checkpoints.load import load_checkpoint
from megatron.training.checkpoints.recovery import check_places
from megatron.training.checkpoints.run import CheckpointedRun
from megatron.training.config import RunConfig
from megatron.training.failing.failure import RunFailed, describe
from megatron.training.failing.heartbeat import Pulse
from megatron.training.failing.watchdog import Watchdog
from megatron.training.loop_parts import Built, LoopParts, Surroundings
from megatron.training.memory_use.out_of_memory import explained
from megatron.training.memory_use.use import MemoryUse
from megatron.training.plan import operations
from megatron.training.processes.rank_zero import from_first
from megatron.training.program import Program
from megatron.training.records import log_line, run_status
from megatron.training.records.run_status import StatusFile
from megatron.training.records.writers import last_attempt
from megatron.training.signals import ExitSignal
from megatron.training.state import TrainState


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
        self.memory = MemoryUse(config, mesh)
        self.lease: Lease | None = None
        """Rank 0's right to save to --save."""
        trains = not config.training.skip_train
        self.status = StatusFile(config.checkpoint.save, writes=mesh.rank == 0 and trains)

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
        run = CheckpointedRun(
            config.checkpoint, self.mesh, chunks, optimizer, facts, self.say, self.lease
        )
        loaded = load_checkpoint(run, config.schedule)
        # The next checkpoint stores the schedule that is followed, not the one the flags gave.
        run = replace(run, facts=replace(facts, schedule=loaded.schedule))
        self.status.checkpoint = loaded.folder
        self.clock.lap("load")
        if self._is_complete(loaded.state):
            return 0
        built = Built(
            data=data,
            chunks=chunks,
            optimizer=optimizer,
            run=run,
            loaded=loaded,
            flops_per_sample=operations.flops_per_sample(config, vocabulary.padded_rows),
        )
        return self._work(built)

    def _take_lease(self) -> None:
        save = self.config.checkpoint.save
        if save is not None:
            try:
                self.lease = Lease(Path(save), say=self.say)
            except OSError as error:
                raise UserError(f"--save ({save}) cannot be saved to: {error}") from None

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
            self.status.attempt = run_status.attempt(save) or 0
            self.status.write("complete", state.iteration)
        return True

    def _work(self, built: Built) -> int:
        """Train and evaluate from the state that was loaded; leave a status behind."""
        state = built.loaded.state
        self._announce(state)
        parts = LoopParts(self._surroundings, built)
        metrics = parts.metrics()
        reason: run_status.Reason = "failure"
        failed: tuple[str, int] | None = None
        try:
            passes = parts.passes()
            held_out = parts.held_out(passes, metrics)
            if built.optimizer is None:
                reason = "complete"
            else:
                trainer = parts.trainer(built.optimizer, passes, held_out, metrics)
                reason = trainer.train(lambda seconds: self.say(self.clock.line(seconds)))
            if reason == "complete":
                self.pulse.timed("the last evaluation")
                held_out.finish(state)
                self.pulse.untimed("the end")
        except BaseException as error:
            failure = describe(error)
            failed = failure.message, failure.code
            parts.rescue(alike=isinstance(error, RunFailed))
            raise
        finally:
            metrics.close()
            if failed is None:
                self.status.write(reason, state.iteration)
            elif self.watchdog is None:  # else it knows the first cause, and writes that
                self.status.failed(state.iteration, *failed)
        if reason != "complete":
            self.say(f"stopped after iteration {state.iteration}: {reason}")
            return self.config.training.exit_code_on_early_stop
        return 0

    @property
    def _surroundings(self) -> Surroundings:
        return Surroundings(
            config=self.config,
            mesh=self.mesh,
            forward_step=self.program.forward_step,
            say=self.say,
            started=self.started,
            signal=self.signal,
            pulse=self.pulse,
            memory=self.memory,
            status=self.status,
        )

    def _announce(self, state: TrainState) -> None:
        save, total = self.config.checkpoint.save, self.config.total_iterations
        previous = (last_attempt(self.config.logging.metrics_file), run_status.attempt(save))
        self.status.attempt = max((one + 1 for one in previous if one is not None), default=0)
        if self.mesh.rank == 0 and stopping.clear_stop_file(save):
            self.say(f"removed a file {stopping.STOP_FILE} in {save} from before this run")
        if not self.config.training.skip_train:
            self.say(
                f"training from iteration {state.iteration} to {total}; the first sample is "
                f"number {state.consumed_samples} of the training set"
            )
            self.status.write("running", state.iteration)
        if self.watchdog is not None:
            self.watchdog.on_failure = lambda cause, code: self.status.failed(
                state.iteration, cause, code
            )
