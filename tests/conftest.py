"""Fixtures of the whole suite."""

from collections.abc import Iterator

import pytest

from tests.harness import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for distributed tests; started by the first job."""
    workers = Pool(preload=["megatron.training.verification.equality", "pretrain_gpt"])
    yield workers
    workers.close()
