"""One rank's queries against the keys of any rank: what the ring and the all-gather have in common.

`attend` is one autograd function for both; an `Exchange` says how the keys and values of every rank
get here, one rank's at a time or all at once. Each rank's are two runs of positions (`partition`),
so that there are up to four blocks per pair of ranks; those that are wholly masked are skipped,
which leaves every rank the same work under a causal mask.

Shapes: s positions and t keys of a rank, B batch, n heads, g query groups, r = n / g, c queries of
one run of positions (s / 2), D head size, E value head size, X = D + E.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.context_parallel.partition import spans
from megatron.core.kernels.attention import Extras, Rule
from megatron.core.kernels.dtypes import accumulate_dtype
from megatron.core.kernels.ring_block import (
    BlockAttention,
    BlockBias,
    Rows,
    Sight,
    finish,
    merge,
    sink_gradient,
)
from megatron.core.mesh import Axis


class _Block(NamedTuple):
    queries: range
    keys: range
    rows: slice
    columns: slice
    """The same two runs, as they lie in a rank's tensors."""


def fuse(k_tBgD: Tensor, v_tBgE: Tensor) -> Tensor:
    """Return kv_BgtX, keys beside values, as they travel."""
    return torch.cat([x.permute(1, 2, 0, 3) for x in (k_tBgD, v_tBgE)], -1)


def group(q_sBnD: Tensor, groups: int) -> Tensor:
    """Return queries (or their gradients, or outputs) as [B, g, r, s, D]."""
    q_sBgrD: Tensor = q_sBnD.unflatten(2, (groups, -1))
    return q_sBgrD.permute(1, 2, 3, 0, 4)


def ungroup(runs_BgrcD: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return runs of queries one after the other as [s, B, n, D], in ``dtype``."""
    x_sBgrD = torch.cat([x.permute(3, 0, 1, 2, 4) for x in runs_BgrcD])
    return x_sBgrD.flatten(2, 3).to(dtype)


Seen = dict[range, tuple[Tensor, Tensor]]
"""What each of the two runs of queries has seen so far: out_BgrcE and lse_Bgrc."""


class Share:
    """The queries of this rank."""

    def __init__(self, q_BgrsD: Tensor, head_size: int, blocks: BlockAttention, axis: Axis) -> None:
        self.q, self.head_size, self.blocks, self.axis = q_BgrsD, head_size, blocks, axis
        self.dtype = accumulate_dtype(q_BgrsD.dtype)

    def see(self, kv_BgtX: Tensor, source: int, seen: Seen) -> None:
        """Take the keys of coordinate ``source`` in."""
        k, v = self._split(kv_BgtX)
        for block in self._blocks(kv_BgtX, source):
            q, keys = self.q[:, :, :, block.rows], block.columns
            piece = self.blocks.forward(q, k[:, :, keys], v[:, :, keys], block.queries, block.keys)
            if piece is None:
                continue
            before = seen.get(block.queries)
            if before is None:
                seen[block.queries] = piece
            else:
                merge(*before, *piece)

    def back(self, kv_BgtX: Tensor, source: int, rows: Rows, grad_kv_BgtX: Tensor) -> None:
        """Add to ``rows.grad_q`` and ``grad_kv`` what the keys of ``source`` give."""
        k, v = self._split(kv_BgtX)
        grad_k, grad_v = self._split(grad_kv_BgtX)
        for block in self._blocks(kv_BgtX, source):
            keys = block.columns
            self.blocks.backward(
                self.q[:, :, :, block.rows],
                k[:, :, keys],
                v[:, :, keys],
                (block.queries, block.keys),
                Rows(*(x[:, :, :, block.rows] for x in rows)),
                grad_k[:, :, keys],
                grad_v[:, :, keys],
            )

    def no_gradient(self, kv_BgtX: Tensor) -> Tensor:
        """Return zeros to sum the gradients of keys and values in: at least fp32."""
        return torch.zeros_like(kv_BgtX, dtype=self.dtype)

    def _split(self, kv_BgtX: Tensor) -> tuple[Tensor, Tensor]:
        return kv_BgtX[..., : self.head_size], kv_BgtX[..., self.head_size :]

    def _blocks(self, kv_BgtX: Tensor, source: int) -> Iterator[_Block]:
        size, here = self.axis.size, self.axis.coordinate
        s, t = self.q.shape[3], kv_BgtX.shape[2]
        halves = [(slice(0, n // 2), slice(n // 2, n)) for n in (s, t)]
        for queries, rows in zip(spans(s * size, here, size), halves[0], strict=True):
            for keys, columns in zip(spans(t * size, source, size), halves[1], strict=True):
                yield _Block(queries, keys, rows, columns)


class Exchange(NamedTuple):
    """How the keys and values of all ranks get here, and their gradients back."""

    axis: Axis
    """Ranks that hold the sequence."""
    forward: Callable[[Share, Tensor, Seen], None]
    """Take every rank's keys in, given this rank's kv_BgtX."""
    backward: Callable[[Share, Tensor, Rows], Tensor]
    """Return the gradient of this rank's kv_BgtX from all ranks' queries; fill ``rows.grad_q``."""


def attend(
    q_sBnD: Tensor,
    k_tBgD: Tensor,
    v_tBgE: Tensor,
    rule: Rule,
    extras: Extras,
    exchange: Exchange,
) -> Tensor:
    """Return out_sBnE of this rank's queries over the whole sequence's keys."""
    out_sBnE: Tensor = _Attention.apply(
        q_sBnD, k_tBgD, v_tBgE, extras.sink_n, extras.bias, _Call(rule, extras, exchange)
    )
    return out_sBnE


class _Call(NamedTuple):
    """What a call is told besides its tensors."""

    rule: Rule
    extras: Extras
    exchange: Exchange


class _Attention(torch.autograd.Function):
    """Between forward and backward a rank keeps its share, however many ranks there are."""

    @staticmethod
    def forward(
        ctx: Any,
        q_sBnD: Tensor,
        k_tBgD: Tensor,
        v_tBgE: Tensor,
        sink_n: Tensor | None,
        bias: Tensor | None,
        call: _Call,
    ) -> Tensor:
        rule, extras, exchange = call
        axis, (s, B, _, D) = exchange.axis, q_sBnD.shape
        whole = s * axis.size
        if k_tBgD.shape[0] != s:
            assert not (rule.causal or rule.window or extras.packing), "keys of another sequence"
        longest = max(whole, k_tBgD.shape[0] * axis.size)
        sight = Sight(rule, extras.packing, B, longest, q_sBnD.device, extras.valid_BT)
        keep = any(ctx.needs_input_grad)
        seed = _seed(extras, q_sBnD.device)
        blocks = BlockAttention.of(rule, extras, sight, seed=seed, keep=keep)
        runs, groups = spans(whole, axis.coordinate, axis.size), k_tBgD.shape[2]
        if bias is not None:
            blocks = replace(blocks, bias=BlockBias(bias, runs, groups))
        q_BgrsD = group(q_sBnD, k_tBgD.shape[2]).contiguous()
        share, kv_BgtX, seen = Share(q_BgrsD, D, blocks, axis), fuse(k_tBgD, v_tBgE), Seen()
        exchange.forward(share, kv_BgtX, seen)
        # Keys of its own position are visible to every query, or all keys are looked at, so that
        # both runs have seen some.
        parts = [seen[run] for run in runs]
        for part in parts:
            finish(*part, sink_n)
        out_sBnE = ungroup([out for out, _ in parts], q_sBnD.dtype)
        lse_Bgrs = torch.cat([lse for _, lse in parts], 3)
        kept = blocks.kept.give_up() if blocks.kept is not None else ()
        ctx.save_for_backward(q_BgrsD, kv_BgtX, sink_n, bias, out_sBnE, lse_Bgrs, *kept)
        # The bias is saved, and with it what is saved of a recomputed region.
        ctx.head_size, ctx.blocks, ctx.exchange = D, replace(blocks, bias=None), exchange
        ctx.runs = runs
        return out_sBnE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_out_sBnE,) = grads
        q_BgrsD, kv_BgtX, sink_n, bias, out_sBnE, lse_Bgrs, *kept = ctx.saved_tensors
        if ctx.blocks.kept is not None:
            ctx.blocks.kept.take_back(kept)
        added = None if bias is None else BlockBias(bias, ctx.runs, q_BgrsD.shape[1])
        blocks = replace(ctx.blocks, bias=added)
        share = Share(q_BgrsD, ctx.head_size, blocks, ctx.exchange.axis)
        products_sBnE = out_sBnE.to(share.dtype) * grad_out_sBnE
        groups, D, dtype = q_BgrsD.shape[1], share.head_size, q_BgrsD.dtype
        delta_Bgrs = group(products_sBnE.sum(-1, keepdim=True), groups)[..., 0]
        grad_q_BgrsD = torch.zeros_like(q_BgrsD, dtype=share.dtype)
        rows = Rows(group(grad_out_sBnE, groups), lse_Bgrs, delta_Bgrs, grad_q_BgrsD)
        grad_sink_n = None if sink_n is None else sink_gradient(sink_n, lse_Bgrs, delta_Bgrs)
        grad_kv_BgtX = ctx.exchange.backward(share, kv_BgtX, rows)
        if ctx.blocks.kept is not None:
            ctx.blocks.kept.give_up()  # else they would live as long as the graph
        grad_kv_tBgX = grad_kv_BgtX.permute(2, 0, 1, 3).to(dtype)
        grad_k_tBgD, grad_v_tBgE = grad_kv_tBgX[..., :D], grad_kv_tBgX[..., D:]
        grad_q_sBnD = ungroup([grad_q_BgrsD], dtype)
        grad_bias = None
        if added is not None and bias is not None and added.grad is not None:
            grad_bias = added.grad.flatten(1, 2).view(bias.shape)
        grads_of = (grad_q_sBnD, grad_k_tBgD, grad_v_tBgE, grad_sink_n, grad_bias)
        return (*grads_of, None)


def _seed(extras: Extras, device: torch.device) -> int:
    """Return a number from the generator that the dropout is to come from."""
    if extras.dropout_p == 0:
        return 0
    with extras.dropout_scope or nullcontext():
        return int(torch.randint(2**62, (), device=device))
