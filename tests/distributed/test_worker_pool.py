"""The pool that runs distributed jobs: a job has one deadline, whoever answers before it."""

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch.distributed as dist

from megatron.training.verification import worker_pool
from tests.harness import Pool


def number(rank: int) -> int:
    return rank


def test_an_answer_does_not_put_off_the_deadline(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = worker_pool.wait, list[float]()

    def one_by_one(connections: Sequence[Connection], timeout: float) -> list[Any]:
        left.append(timeout)
        return real(connections, timeout)[:1]

    monkeypatch.setattr(worker_pool, "wait", one_by_one)
    assert pool.run(3, number, timeout=50.0) == [0, 1, 2]
    assert len(left) == 3 and 50.0 + worker_pool.GRACE > left[0] > left[1] > left[2]


def left_alone(rank: int) -> None:
    if rank == 0:
        dist.barrier()
    time.sleep(20)


def test_a_rank_that_waits_too_long_is_no_failure_of_its_own() -> None:
    """Torch's own error would come with a traceback, which tells a user nothing."""
    with Pool() as own, pytest.raises(TimeoutError, match=r"^rank 0 waited longer than 2 s: ") as e:
        own.run(2, left_alone, timeout=2.0)
    assert "Traceback" not in str(e.value)
