"""Fixtures of the whole suite."""

import signal
from collections.abc import Iterator

import pytest

from tests.harness import Pool


def pytest_configure() -> None:
    # What a shell script starts by `&` ignores Ctrl-C, and so would the programs of the tests.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for distributed tests; started by the first job."""
    # Torch's sharding takes long to import: once for all workers.
    preload = ["megatron.training.verification.equality", "pretrain_gpt"]
    workers = Pool(preload=[*preload, "megatron.core.distributed.torch_fsdp"])
    yield workers
    workers.close()
