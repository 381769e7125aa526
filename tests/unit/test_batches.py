"""Which samples a rank reads, and how they become tensors."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.mesh import Axis, Mesh
from megatron.training.batch_size import BatchSizes
from megatron.training.batches import (
    PADDING,
    Batches,
    collate,
    evaluation_numbers,
    training_numbers,
    whole_numbers,
)

ONE_TO_ONE = int


def mesh_of(replicas: int, replica: int) -> Mesh:
    """Return a mesh that stands at one of several replicas, without any group."""
    axes = dict(Mesh.serial().axes)
    axes["dp"] = Axis("dp", tuple(range(replicas)), replica, None)
    return Mesh(axes, replica, torch.device("cpu"))


def read(replicas: int, micro: int, sizes: BatchSizes, **changes: Any) -> list[list[list[int]]]:
    """Return, for each replica, the numbers of its microbatches."""
    settings: dict[str, Any] = {
        "iteration": 0,
        "consumed_samples": 0,
        "train_iters": 3,
        "skipped": frozenset(),
        "order": ONE_TO_ONE,
    }
    return [
        list(training_numbers(mesh_of(replicas, r), sizes, micro, **(settings | changes)))
        for r in range(replicas)
    ]


def test_replicas_take_microbatches_in_turns() -> None:
    first, second = read(2, 2, BatchSizes.constant(8), train_iters=1)
    assert first == [[0, 1], [4, 5]]
    assert second == [[2, 3], [6, 7]]


@pytest.mark.parametrize(("replicas", "micro"), [(1, 1), (1, 4), (2, 2), (4, 1)])
def test_a_global_batch_is_the_same_samples_on_any_layout(replicas: int, micro: int) -> None:
    sizes = BatchSizes((0, 8), (4, 8))  # two batches of 4, then 8
    everyone = read(replicas, micro, sizes)
    assert sorted(n for one in everyone for numbers in one for n in numbers) == list(range(16))
    microbatches = {tuple(numbers) for one in everyone for numbers in one}
    assert microbatches == {tuple(range(n, n + micro)) for n in range(0, 16, micro)}


def test_a_resume_starts_where_the_run_was() -> None:
    sizes = BatchSizes((0, 8), (4, 8))
    whole = read(2, 2, sizes)
    rest = read(2, 2, sizes, iteration=1, consumed_samples=4)
    assert [one[1:] for one in whole] == rest


def test_skipped_iterations_are_not_read() -> None:
    (numbers,) = read(1, 4, BatchSizes.constant(4), skipped=frozenset({2}))
    assert numbers == [[0, 1, 2, 3], [8, 9, 10, 11]]


def test_evaluation_goes_round() -> None:
    numbers = evaluation_numbers(mesh_of(1, 0), 4, 2, consumed_samples=4, length=5)
    assert list(islice(numbers, 3)) == [[4, 0], [1, 2], [3, 4]]


def test_res_07_a_whole_pass_is_padded_alike_on_all_ranks() -> None:
    # Five samples, micro-batch 2, two replicas: the last rank would have nothing to read.
    found = [list(islice(whole_numbers(mesh_of(2, r), 2, 5), 2)) for r in range(2)]
    assert found == [[[0, 1], [4, PADDING]], [[2, 3], [PADDING, PADDING]]]


class Counting:
    """Sample i holds i."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        assert 0 <= index < 10
        return {
            "tokens": np.full(3, index, dtype=np.int64),
            "loss_mask": np.ones(3, dtype=np.float32),
            "position_ids": np.arange(3, dtype=np.int64),
        }


def test_padding_counts_for_nothing() -> None:
    batches = Batches(Counting(), [[4, PADDING], [9, 9]], torch.device("cpu"), 0, ["position_ids"])
    first, second = batches.take(2)
    assert set(first) == {"tokens", "loss_mask"}
    assert first["tokens"][0].tolist() == [4, 4, 4]
    assert first["loss_mask"].tolist() == [[1, 1, 1], [0, 0, 0]]
    assert second["loss_mask"].sum() == 6


def test_reading_does_not_move_the_process_generator() -> None:
    before = torch.get_rng_state()
    list(Batches(Counting(), [[0]], torch.device("cpu"), 0).take(1))
    assert torch.equal(before, torch.get_rng_state())


def test_document_bounds_are_joined_over_the_batch() -> None:
    samples = [
        {"tokens": np.zeros(4, np.int64), "cu_seqlens": np.array([0, 1, 4], np.int32)},
        {"tokens": np.zeros(4, np.int64), "cu_seqlens": np.array([0, 4], np.int32)},
        {"tokens": np.zeros(4, np.int64), "cu_seqlens": np.array([0, 2, 3, 4], np.int32)},
    ]
    bounds = collate(samples)["cu_seqlens"]
    assert bounds.tolist() == [0, 1, 4, 8, 10, 11, 12]
    assert bounds.dtype == torch.int32
