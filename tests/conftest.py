"""Fixtures of the whole suite."""

from collections.abc import Iterator

import pytest

from tests.harness import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for distributed tests; started by the first job."""
    # Torch's sharding takes long to import: once for all workers.
    preload = ["megatron.training.verification.equality", "pretrain_gpt"]
    workers = Pool(preload=[*preload, "megatron.core.distributed.torch_fsdp"])
    yield workers
    workers.close()
