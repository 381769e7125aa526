"""One run from its resolved flags to its exit code: processes meet, watch each other, do the job.

An entry point brings a `Program`: how to build its model and its data sets, and a forward step.
"""

import sys
import time
from pathlib import Path

import torch

from megatron.core.datasets.cache import BuildPolicy
from megatron.core.utils import UserError
from megatron.training import device_choices, startup
from megatron.training.arguments import ParsedRun
from megatron.training.config import RunConfig
from megatron.training.failing import watchdog
from megatron.training.failing.failure import RunFailed, describe, write_error_file
from megatron.training.failing.heartbeat import Pulse
from megatron.training.job import Job
from megatron.training.processes import setup
from megatron.training.processes.launch import Launch
from megatron.training.program import Program
from megatron.training.signals import ExitSignal


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
