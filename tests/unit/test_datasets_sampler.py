"""Order of samples in a run: resume, passes, and the last partial batch."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.datasets.sampler import Cyclic, sample_order
from megatron.core.utils import UserError
from megatron.training import batches


def replica(size: int, coordinate: int) -> Any:
    return SimpleNamespace(dp=SimpleNamespace(size=size, coordinate=coordinate))


def rotated(length: int, seed: int) -> np.ndarray:
    """Stand in for a shuffle: easy to follow by eye."""
    return np.roll(np.arange(length), -seed - 1)


def test_single_reads_front_to_back() -> None:
    order = sample_order("single", 10, 10, micro_batch_size=2, data_parallel_size=1)
    assert [order(i) for i in range(10)] == list(range(10))


def test_single_refuses_a_run_longer_than_the_data() -> None:
    with pytest.raises(UserError, match="takes 11 training samples"):
        sample_order("single", 10, 11, micro_batch_size=2, data_parallel_size=1)


def test_cyclic_goes_round_in_whole_steps() -> None:
    # 11 samples, microbatch 2: the shuffle covers 10; 2 replicas use 8 of them a pass.
    order = Cyclic(11, 2, 2, rotated)
    assert [order(i) for i in range(10)] == [1, 2, 3, 4, 5, 6, 7, 8, 2, 3]
    assert order(8) == 2 and order(0) == 1  # any position, in any order


def test_cyclic_equals_torchs_permutation_seeded_by_the_pass() -> None:
    order = Cyclic(101, 4, 1)
    for number in (0, 1, 5):
        generator = torch.Generator()
        generator.manual_seed(number)
        expected = torch.randperm(100, generator=generator).tolist()
        assert [order(number * 100 + i) for i in range(100)] == expected


def test_cyclic_refuses_less_than_one_step() -> None:
    with pytest.raises(UserError, match="7 samples, fewer than the 8"):
        Cyclic(7, 2, 4, rotated)


def read(kind: Any, consumed: int, iterations: int, dp: int = 2) -> list[list[list[int]]]:
    """Return the microbatches of each replica from a position on."""
    order = sample_order(
        kind, 64, 48, micro_batch_size=2, data_parallel_size=dp, permutation=rotated
    )
    return [
        list(
            batches.training_numbers(
                replica(dp, r),
                SimpleNamespace(at=lambda _: 8),  # type: ignore[arg-type]
                2,
                iteration=consumed // 8,
                consumed_samples=consumed,
                train_iters=consumed // 8 + iterations,
                skipped=frozenset(),
                order=order,
            )
        )
        for r in range(dp)
    ]


@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_res_08_a_resume_reads_on_where_it_stopped(kind: str) -> None:
    whole = read(kind, 0, 6)
    first, rest = read(kind, 0, 3), read(kind, 24, 3)
    assert [a + b for a, b in zip(first, rest, strict=True)] == whole
    assert rest[0][0] == whole[0][6]  # the first sample after the resume


def test_replicas_share_a_step_without_overlap() -> None:
    for dp in (1, 2, 4):
        replicas = read("single", 8, 1, dp)
        assert sorted(n for r in replicas for m in r for n in m) == list(range(8, 16))


def test_res_07_the_last_partial_batch_is_padded_on_every_replica() -> None:
    """Five samples, microbatch 2, two replicas: equal batches, and padding that counts nothing."""
    seen = []
    for coordinate in (0, 1):
        mesh = replica(2, coordinate)
        count = batches.whole_count(mesh, 2, 5)
        numbers = batches.whole_numbers(mesh, 2, 5)
        mine = [next(numbers) for _ in range(count)]
        assert [len(batch) for batch in mine] == [2, 2]
        seen += [n for batch in mine for n in batch]
    assert sorted(n for n in seen if n != batches.PADDING) == list(range(5))
    assert seen.count(batches.PADDING) == 3
