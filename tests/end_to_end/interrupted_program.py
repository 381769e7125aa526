"""pretrain_gpt.py in which one rank does something in the middle of iteration 2.

Its first words are the rank and what it does, in each microbatch: ``signal``, ``late`` or ``file``.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import pretrain_gpt
from megatron.training import stopping


def main(words: list[str]) -> int:
    """Run the program and return its exit code."""
    rank, act, *rest = words
    mine, original = os.environ["RANK"] == rank, pretrain_gpt.forward_step
    seen = stopping.Stopper.seen
    acted = False

    def forward_step(model: Any, batch: Any, x: Any, dropout: Any) -> Any:
        nonlocal acted
        if mine and dropout is not None and dropout.iteration == 2:
            acted = True
            if act == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            elif act == "file":
                Path("save", stopping.STOP_FILE).touch()
        return original(model, batch, x, dropout)

    def told(stopper: stopping.Stopper) -> tuple[bool, bool, bool]:
        received, _, found = seen(stopper)
        return (
            received,
            acted and act == "late",
            found and mine,
        )  # another machine's disk may show the file later

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain_gpt, "forward_step", forward_step)
        patch.setattr(stopping.Stopper, "seen", told)
        return pretrain_gpt.main(rest)
