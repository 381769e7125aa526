"""Which positions a context-parallel rank holds, and what the flags must satisfy."""

from typing import Any

import pytest
import torch

from megatron.core.context_parallel import checks, partition
from megatron.core.context_parallel.config import ContextParallelConfig
from megatron.core.utils import UserError


def test_two_ranks_hold_the_outer_and_the_inner_chunks() -> None:
    assert partition.positions(8, 0, 2).tolist() == [0, 1, 6, 7]
    assert partition.positions(8, 1, 2).tolist() == [2, 3, 4, 5]
    assert partition.positions(5, 0, 1).tolist() == [0, 1, 2, 3, 4]
    assert partition.spans(12, 1, 3) == (range(2, 4), range(8, 10))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_position_is_held_once_and_causal_work_is_even(size: int) -> None:
    sequence = 48
    held = [partition.positions(sequence, c, size).tolist() for c in range(size)]
    assert sorted(sum(held, [])) == list(range(sequence))
    # A query at position p sees p + 1 keys.
    assert len({sum(p + 1 for p in positions) for positions in held}) == 1


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_join_undoes_cut(size: int, dim: int) -> None:
    x = torch.randn(24, 24, 24)
    shares = [partition.cut(x, dim, c, size) for c in range(size)]
    for c, share in enumerate(shares):
        expected = x.index_select(dim, partition.positions(24, c, size))
        assert torch.equal(share, expected)
    assert torch.equal(partition.join(shares, dim), x)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_zigzag_is_the_shares_in_order_and_unzigzag_its_inverse(size: int) -> None:
    x = torch.arange(24)[:, None]
    shares = [partition.positions(24, c, size) for c in range(size)] if size > 1 else [x[:, 0]]
    assert torch.equal(partition.zigzag(x, size)[:, 0], torch.cat(shares))
    assert torch.equal(partition.unzigzag(partition.zigzag(x, size), size), x)


def test_neighbours_together_hold_a_share_of_the_coarser_cut() -> None:
    """What lets a ring of groups stand around an all-to-all within them."""
    for group in range(3):
        together = [partition.positions(24, 2 * group + i, 6).tolist() for i in range(2)]
        assert sorted(sum(together, [])) == partition.positions(24, group, 3).tolist()


def test_labels_are_shifted_before_the_cut() -> None:
    text = torch.arange(100, 109)[None]
    batch = {"tokens": text[:, :-1], "labels": text[:, 1:]}
    tokens, labels = partition.cut_microbatch(batch, 0, 2).values()
    assert tokens.tolist() == [[100, 101, 106, 107]]
    # 102 stands on the other rank, 108 after the last token.
    assert labels.tolist() == [[101, 102, 107, 108]]
    tokens, labels = partition.cut_microbatch(batch, 1, 2).values()
    assert tokens.tolist() == [[102, 103, 104, 105]]
    assert labels.tolist() == [[103, 104, 105, 106]]


def test_a_microbatch_keeps_its_documents_and_its_global_positions() -> None:
    bounds = torch.tensor([0, 3, 8, 16], dtype=torch.int32)
    batch = {
        "tokens": torch.arange(16).view(2, 8),
        "position_ids": torch.arange(8).repeat(2, 1),
        "cu_seqlens": bounds,
    }
    share = partition.cut_microbatch(batch, 1, 2)
    assert share["tokens"].tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert share["position_ids"].tolist() == [[2, 3, 4, 5]] * 2
    assert share["cu_seqlens"] is bounds


@pytest.mark.parametrize(
    ("sequence", "cp", "tp"), [(8, 2, 1), (8, 2, 2), (12, 3, 2), (24, 4, 3), (7, 1, 1), (6, 1, 3)]
)
def test_lengths_that_can_be_cut(sequence: int, cp: int, tp: int) -> None:
    checks.check_sequence(sequence, cp, tp)


@pytest.mark.parametrize(
    ("sequence", "cp", "tp", "choices"),
    [
        (10, 2, 1, "8 or 12"),
        (3, 2, 1, "4"),
        # 12 = 2 x 2 x 3: twelve tokens a rank do not share out over three otherwise.
        (8, 2, 3, "12"),
        # A rank's 4 chunks of 2 x cp make 4 tokens for 4 tensor-parallel ranks at least.
        (20, 2, 4, "16 or 24"),
        (7, 1, 2, "6 or 8"),
    ],
)
def test_other_lengths_are_refused_with_the_nearest(
    sequence: int, cp: int, tp: int, choices: str
) -> None:
    with pytest.raises(UserError, match=rf"--seq-length \({sequence}\).*try {choices}$"):
        checks.check_sequence(sequence, cp, tp)


def test_all_to_all_needs_a_head_per_rank() -> None:
    checks.check_heads("a2a", 8, 2, 4, None)
    checks.check_heads("p2p", 2, 1, 4, None)
    checks.check_heads("a2a+p2p", 4, 2, 4, (2, 2))
    with pytest.raises(UserError, match=r"--num-attention-heads \(4\).*\(2\) x .*\(4\)"):
        checks.check_heads("a2a", 4, 2, 4, None)
    with pytest.raises(UserError, match="first of --hierarchical-context-parallel-sizes"):
        checks.check_heads("a2a+p2p", 4, 2, 8, (4, 2))


@pytest.mark.parametrize("sizes", [None, (2,), (2, 2), (8, 0), (2, 2, 2)])
def test_two_sizes_make_up_the_context_parallel_size(sizes: tuple[int, ...] | None) -> None:
    assert checks.check_sizes((2, 4), 8) == (2, 4)
    with pytest.raises(UserError, match="try 2 4 or 4 2"):
        checks.check_sizes(sizes, 8)


def context(**given: Any) -> ContextParallelConfig:
    return ContextParallelConfig.resolve(**given)


def test_kinds_per_layer() -> None:
    assert context(cp_comm_type=("a2a",)).kinds(3) == ("a2a",) * 3
    assert context(cp_comm_type=("p2p", "a2a")).kinds(2) == ("p2p", "a2a")
    with pytest.raises(UserError, match=r"allgather: choose from .*did you mean all_gather\?"):
        context(cp_comm_type=("p2p", "allgather"))
    with pytest.raises(UserError, match="without a value: choose from p2p"):
        context(cp_comm_type=())
    with pytest.raises(UserError, match=r"2 values.*--num-layers \(3\)"):
        context(cp_comm_type=("p2p", "a2a")).kinds(3)


def test_ranks_of_an_all_to_all_beside_a_ring() -> None:
    sizes = {"hierarchical_context_parallel_sizes": (2, 4)}
    assert context(cp_comm_type=("p2p", "a2a+p2p"), **sizes).inner_size(8) == 2
    assert context(cp_comm_type=("a2a",), **sizes).inner_size(8) == 1
    assert context(cp_comm_type=("a2a+p2p",)).inner_size(1) == 1
    with pytest.raises(UserError, match="try 2 2"):
        context(cp_comm_type=("a2a+p2p",), **sizes).inner_size(4)
