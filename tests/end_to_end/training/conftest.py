"""A tiny corpus, and what trains on it."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import pretrain_gpt
from megatron.core.datasets.indexed import IndexedDatasetBuilder
from tests.end_to_end.training.runs import (
    VOCABULARY,
    flags,
)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the prefix of a corpus of counting sequences, which a model can learn."""
    prefix = str(tmp_path_factory.mktemp("corpus") / "tiny")
    generator = np.random.default_rng(5)
    builder = IndexedDatasetBuilder(prefix, np.uint16)
    for _ in range(300):
        start, length = generator.integers(VOCABULARY), generator.integers(5, 40)
        tokens = (start + np.arange(length)) % VOCABULARY
        builder.add_document([*tokens.tolist(), VOCABULARY], [length + 1])
    builder.finalize()
    return prefix


@pytest.fixture
def run(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., int]]:
    """Yield what trains in this process, in a folder of its own, and returns the exit code."""
    others = set(multiprocessing.active_children())
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE") or name.startswith(("SLURM_", "OMPI_")):
            monkeypatch.delenv(name)

    def train(*more: object) -> int:
        return pretrain_gpt.main(flags(corpus, *more))

    yield train
    # A failed test's readers may ignore the signal that Python ends its children with.
    left = set(multiprocessing.active_children()) - others
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise
    for reader in left:
        reader.kill()
        reader.join()
    signal.signal(signal.SIGCHLD, before)
