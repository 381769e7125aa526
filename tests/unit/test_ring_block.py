"""Attention in blocks of keys: merged, it is the attention of all of them, in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.kernels import ring_block
from megatron.core.kernels.attention import Extras, Packing, Rule, attention_reference
from megatron.core.kernels.ring_block import (
    BlockAttention,
    BlockBias,
    Rows,
    Sight,
    finish,
    merge,
    sink_gradient,
)

F64 = torch.float64
S, B, N, G, D, E = 12, 2, 4, 2, 4, 3
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=F64)
# Documents of 5, 1, 6 and of 12 tokens; 2, 6, 4.
PACKED = Packing(torch.tensor([0, 5, 6, 12, 14, 20, 24], dtype=torch.int32))
PADDED = torch.arange(S) < torch.tensor([[7], [1]])
CASES: dict[str, tuple[Rule, Extras]] = {
    "causal": (Rule(scale=0.5), Extras()),
    "full": (Rule(scale=0.5, causal=False), Extras()),
    "window": (Rule(scale=0.5, window=(2, 0)), Extras()),
    "two-sided window": (Rule(scale=0.5, causal=False, window=(1, 3)), Extras()),
    "packed": (Rule(scale=0.5), Extras(packing=PACKED)),
    "packed full": (Rule(scale=0.5, causal=False), Extras(packing=PACKED)),
    "packed window": (Rule(scale=0.5, window=(3, 0)), Extras(packing=PACKED)),
    "softcap": (Rule(scale=2.0, softcap=1.5), Extras()),
    "alibi": (Rule(scale=0.5), Extras(alibi_slopes_n=SLOPES)),
    "alibi, full": (Rule(scale=0.5, causal=False), Extras(alibi_slopes_n=SLOPES)),
    "padded": (Rule(scale=0.5, causal=False), Extras(valid_BT=PADDED)),
    "padded, causal": (Rule(scale=0.5), Extras(valid_BT=PADDED.flip(1))),
    "softcap alibi": (Rule(scale=2.0, softcap=1.5), Extras(alibi_slopes_n=SLOPES)),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    monkeypatch.setattr(ring_block, "TILE", 3)
    # Room for some of the tiles alone.
    monkeypatch.setattr(ring_block, "KEPT", 250)


def tensors() -> list[Tensor]:
    shapes = [(S, B, N, D), (S, B, G, D), (S, B, G, E), (N,)]
    return [torch.randn(shape, dtype=F64, requires_grad=True) for shape in shapes]


def grouped(x: Tensor, groups: int) -> Tensor:
    return x.detach().unflatten(2, (groups, -1)).permute(1, 2, 3, 0, 4).contiguous()


def in_blocks(
    blocks: BlockAttention, inputs: list[Tensor], sink: Tensor | None, grad: Tensor, cuts: list[int]
) -> dict[str, Any]:
    """Attend and go back over every pair of runs between ``cuts``."""
    q = grouped(inputs[0], G)
    k, v = (x.detach().permute(1, 2, 0, 3).contiguous() for x in inputs[1:3])
    out, lse = torch.zeros(*q.shape[:4], E, dtype=F64), torch.full(q.shape[:4], -torch.inf).double()
    runs = [range(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    pairs = [(rows, keys) for rows in runs for keys in reversed(runs)]
    skipped = 0
    for rows, keys in pairs:
        a, b = slice(rows.start, rows.stop), slice(keys.start, keys.stop)
        piece = blocks.forward(q[:, :, :, a], k[:, :, b], v[:, :, b], rows, keys)
        skipped += piece is None
        if piece is not None:
            merge(out[:, :, :, a], lse[:, :, :, a], *piece)
    finish(out, lse, sink)
    delta = (out * grouped(grad, G)).sum(-1)
    rows_of = Rows(grouped(grad, G), lse, delta, torch.zeros_like(q))
    grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys in pairs:
        a, b = slice(rows.start, rows.stop), slice(keys.start, keys.stop)
        part = Rows(*(x[:, :, :, a] for x in rows_of))
        operands = (q[:, :, :, a], k[:, :, b], v[:, :, b])
        blocks.backward(*operands, (rows, keys), part, grad_k[:, :, b], grad_v[:, :, b])
    found = {
        "out": out.permute(3, 0, 1, 2, 4).flatten(2, 3),
        "q": rows_of.grad_q_BgrcD.permute(3, 0, 1, 2, 4).flatten(2, 3),
        "k": grad_k.permute(2, 0, 1, 3),
        "v": grad_v.permute(2, 0, 1, 3),
        "skipped": skipped,
    }
    if sink is not None:
        found["sink"] = sink_gradient(sink, lse, delta)
    return found


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("cuts", [[0, 12], [0, 6, 12], [0, 1, 5, 6, 11, 12]])
@pytest.mark.parametrize("case", CASES)
def test_blocks_merge_to_the_whole(case: str, cuts: list[int], with_sink: bool, keep: bool) -> None:
    rule, extras = CASES[case]
    inputs = tensors()
    sink = inputs[3] if with_sink else None
    expected = attention_reference(*inputs[:3], rule, replace(extras, sink_n=sink))
    grad = torch.randn_like(expected)
    expected.backward(grad)
    sight = Sight(rule, extras.packing, B, S, grad.device, extras.valid_BT)
    blocks = BlockAttention.of(rule, extras, sight, keep=keep)
    found = in_blocks(blocks, inputs, None if sink is None else sink.detach(), grad, cuts)
    torch.testing.assert_close(found["out"], expected, rtol=1e-12, atol=1e-13)
    for name, x in zip(("q", "k", "v", "sink")[: 3 + with_sink], inputs, strict=False):
        torch.testing.assert_close(found[name], x.grad, rtol=1e-12, atol=1e-13, msg=name)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("shape", [(1, N, S, S), (B, N, S, S), (N, S, S), (B, 1, 1, S)])
def test_a_bias_is_cut_into_blocks(shape: tuple[int, ...], keep: bool) -> None:
    """Queries are two runs of positions, as a rank of several has them."""
    rule, inputs = Rule(scale=0.5, causal=False), tensors()
    bias = torch.randn(shape, dtype=F64, requires_grad=True)
    expected = attention_reference(*inputs[:3], rule, Extras(bias=bias, valid_BT=PADDED))
    grad = torch.randn_like(expected)
    expected.backward(grad)
    sight = Sight(rule, None, B, S, grad.device, PADDED)
    blocks = BlockAttention.of(rule, Extras(), sight, keep=keep)
    cuts = [0, 4, 12]
    runs = [range(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    added = BlockBias(bias.detach(), runs, G)
    found = in_blocks(replace(blocks, bias=added), inputs, None, grad, cuts)
    torch.testing.assert_close(found["out"], expected, rtol=1e-12, atol=1e-13)
    for name, x in zip(("q", "k", "v"), inputs, strict=False):
        torch.testing.assert_close(found[name], x.grad, rtol=1e-12, atol=1e-13, msg=name)
    assert added.grad is not None
    own = added.grad.flatten(1, 2).view(shape)
    torch.testing.assert_close(own, bias.grad, rtol=1e-12, atol=1e-13)


def test_probabilities_are_kept_while_there_is_room() -> None:
    rule = Rule(scale=0.5, causal=False)
    blocks = BlockAttention.of(
        rule, Extras(), Sight(rule, None, B, S, torch.device("cpu")), keep=True
    )
    in_blocks(blocks, tensors(), None, torch.zeros(S, B, N, E, dtype=F64), [0, 4, 12])
    assert blocks.kept is not None
    # Tiles of 3 and 1 queries for 8 samples' heads: 8 * 3 * 8 and 8 * 1 * 4, then 26 are left.
    assert blocks.kept.find(range(0, 3), range(4, 12)) is not None
    assert blocks.kept.find(range(3, 4), range(0, 4)) is not None
    assert blocks.kept.find(range(4, 7), range(4, 12)) is None


@pytest.mark.parametrize(
    ("case", "cuts", "skipped"),
    [
        ("full", [0, 3, 6, 9, 12], 0),
        ("causal", [0, 3, 6, 9, 12], 6),
        # A query sees two keys back: its own run of three and the one before.
        ("window", [0, 3, 6, 9, 12], 9),
        # With documents 0-5-6-12 and 0-2-8-12 the runs see 0-5, 0-8, 2-8, 2-12, 6-12.
        ("packed full", [0, 2, 5, 6, 8, 12], 3 + 1 + 2 + 1 + 3),
    ],
)
def test_blocks_without_a_visible_pair_are_skipped(
    case: str, cuts: list[int], skipped: int
) -> None:
    rule, extras = CASES[case]
    inputs = tensors()
    blocks = BlockAttention.of(rule, extras, Sight(rule, extras.packing, B, S, inputs[0].device))
    grad = torch.zeros(S, B, N, E, dtype=F64)
    assert in_blocks(blocks, inputs, None, grad, cuts)["skipped"] == skipped


def test_a_row_that_sees_no_key_of_a_block_counts_for_nothing() -> None:
    """The op that torch has gives such a row lse 0, as if it had seen a key with score 0."""
    q = torch.randn(1, 1, 1, 4, D, dtype=F64)
    k, v = torch.randn(1, 1, 4, D, dtype=F64), torch.randn(1, 1, 4, E, dtype=F64)
    rule = Rule(scale=1.0)
    blocks = BlockAttention.of(rule, Extras(), Sight(rule, None, 1, 8, q.device))
    piece = blocks.forward(q, k, v, range(0, 4), range(2, 6))
    assert piece is not None
    out, lse = piece
    assert torch.equal(lse[..., :2], torch.full_like(lse[..., :2], -torch.inf))
    assert torch.equal(out[..., :2, :], torch.zeros_like(out[..., :2, :]))
    scores = q[0, 0, 0] @ k[0, 0].T
    torch.testing.assert_close(lse[0, 0, 0, 3], torch.logsumexp(scores[3, :2], 0))
    # Merged with rows that have seen nothing either, and ended: zeros, and a finite lse.
    total, total_lse = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    merge(total, total_lse, out, lse)
    finish(total, total_lse, None)
    torch.testing.assert_close(total, out)
    assert total_lse.isfinite().all()


def test_half_precision_is_summed_in_single() -> None:
    rule = Rule(scale=0.5)
    inputs = [x.detach().bfloat16() for x in tensors()[:3]]
    expected = attention_reference(*(x.float() for x in inputs), rule)
    blocks = BlockAttention.of(rule, Extras(), Sight(rule, None, B, S, inputs[0].device))
    k, v = (x.permute(1, 2, 0, 3) for x in inputs[1:])
    piece = blocks.forward(grouped(inputs[0], G), k, v, range(S), range(S))
    assert piece is not None and piece[0].dtype == torch.float32
    torch.testing.assert_close(piece[0].permute(3, 0, 1, 2, 4).flatten(2, 3), expected)


def test_dropout_is_the_same_in_backward_and_differs_between_blocks() -> None:
    rule = Rule(scale=0.5, causal=False)
    inputs = tensors()
    sight = Sight(rule, None, B, S, inputs[0].device)
    blocks = BlockAttention.of(rule, Extras(dropout_p=0.4), sight, seed=11)
    grad = torch.randn(S, B, N, E, dtype=F64)
    cuts = [0, 6, 12]
    found = in_blocks(blocks, inputs, None, grad, cuts)
    again = in_blocks(blocks, inputs, None, grad, cuts)
    assert torch.equal(found["out"], again["out"])
    # The masks are fixed by the seed, so the output is a smooth function of the inputs: its
    # derivative along a direction is what the gradients say.
    step = 1e-6
    for name, x in zip(("q", "k", "v"), inputs[:3], strict=True):
        way = torch.randn_like(x)
        sides = []
        for sign in (1, -1):
            moved = [y + sign * step * way if y is x else y for y in inputs]
            sides.append((in_blocks(blocks, moved, None, grad, cuts)["out"] * grad).sum())
        slope = (sides[0] - sides[1]) / (2 * step)
        # Rounding of the two sums over the step, 1e-15 * 10 / 1e-6, is the larger error.
        torch.testing.assert_close((found[name] * way).sum(), slope, rtol=1e-6, atol=1e-7)
    # Kept probabilities have mean 1 / (1 - p): ones as values show each row's kept weight.
    ones = torch.ones(1, 1, 200, 1, dtype=F64)
    q, k = torch.zeros(1, 1, 1, 200, 2, dtype=F64), torch.zeros(1, 1, 200, 2, dtype=F64)
    sight = Sight(rule, None, 1, 400, q.device)
    wide = BlockAttention.of(rule, Extras(dropout_p=0.4), sight, seed=5)
    first = wide.forward(q, k, ones, range(0, 200), range(0, 200))
    other = wide.forward(q, k, ones, range(0, 200), range(200, 400))
    assert first is not None and other is not None
    assert not torch.equal(first[0], other[0])
    # 40,000 draws: the standard error of the mean is 0.004.
    assert first[0].mean().item() == pytest.approx(1, abs=0.02)
