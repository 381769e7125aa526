"""pretrain_gpt.py under torchrun's agent, whose workers are forked with torch imported.

`agent` is what the command `torchrun` does with its words, but for the start of an interpreter for
each worker: rendezvous, restarts and the environment of the workers are torchrun's own.
"""

import os
import signal
import sys
from typing import NamedTuple

import pytest
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch

import pretrain_gpt
from megatron.training import arguments


class Death(NamedTuple):
    """A worker that kills itself, or its machine: all processes of its agent, and that."""

    restarts: int
    """Of its agent, before."""
    rank: int | None
    """None for any."""
    iteration: int
    of_machine: bool = False


def agent(words: list[str], program: list[str], folder: str, log: str, deaths: list[Death]) -> None:
    """Be one agent, in a session of its own; end with code 1 if its workers fail too often."""
    os.setsid()
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "TORCHELASTIC", "PMI_")):
            del os.environ[name]
    os.environ["OMP_NUM_THREADS"] = "1"
    # One store for all attempts, which keeps what the dead have written, as torchrun has it.
    os.environ.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)
    os.chdir(folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    os.dup2(os.open(log, flags), 1)
    os.dup2(1, 2)
    parsed = run.parse_args([*words, "--start-method", "fork", "pretrain_gpt.py"])
    config, _, _ = run.config_from_args(parsed)
    try:
        elastic_launch(config, worker)(program, deaths)
    except ChildFailedError:
        sys.exit(1)


def worker(program: list[str], deaths: list[Death]) -> None:
    """Be one process of the program."""
    sys.argv = ["pretrain_gpt.py", *program]
    restarts, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    forward_step = pretrain_gpt.forward_step
    mine = [one for one in deaths if one.restarts == restarts and one.rank in (None, rank)]

    def planted(model: object, batch: object, x: object, dropout: object) -> object:
        for death in mine:
            if getattr(dropout, "iteration", None) == death.iteration:
                os.kill(0 if death.of_machine else os.getpid(), signal.SIGKILL)
        return forward_step(model, batch, x, dropout)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain_gpt, "forward_step", planted)
        arguments.run_main(pretrain_gpt.main, "pretrain_gpt")
