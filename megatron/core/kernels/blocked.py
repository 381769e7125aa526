"""Attention in tiles of queries, each against only the keys that it can see: the CPU path.

torch's CPU attention computes masked scores as well as visible ones and knows no windows,
documents, sinks or soft caps. Here a tile of queries meets one range of keys that is cut to the
causal triangle, the window and the document, so that work is linear in what is visible, and a mask
is applied only on the columns where some pair of the tile is hidden. The products are plain
matrix products; heads that share a key group are rows of one of them.

Probabilities are kept for backward while they are small and computed again when they are not.

Shapes: S queries, T keys, B batch, n heads, g query groups, r = n / g, D head size, E value head
size; in a tile b samples, c queries, w keys, and R = r * c rows per group.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels.attention import NONE, Extras, Rule
from megatron.core.kernels.dtypes import accumulate_dtype

TILE = 64
"""Queries of a tile: few enough to skip most of the masked triangle, enough for the BLAS."""

SCORES = 2**21
"""Scores of a tile at most, so that they stay in the cache; samples share a tile up to there."""

KEPT = 2**25
"""Probabilities of one call that are kept for backward at most; beyond, they are recomputed."""


@dataclass(frozen=True)
class Tile:
    """A range of queries of some samples and the range of keys that they see."""

    samples: slice
    queries: slice
    keys: slice
    hidden: tuple[tuple[slice, Tensor], ...]
    """(columns, mask) pairs: in these columns the mask's True scores do not count."""
    positions: Tensor
    """Where the queries stand: [c], or [b, 1, 1, c] in cached decoding; key j stands at j."""

    @property
    def pairs(self) -> int:
        """Scores of one head of one sample."""
        return _length(self.queries) * _length(self.keys)

    def distance(self) -> Tensor:
        """Return position of key - position of query, [c, w] or [b, 1, 1, c, w].

        Not kept: over all tiles it would be a matrix of S squared integers.
        """
        keys = torch.arange(self.keys.start, self.keys.stop, device=self.positions.device)
        return keys - self.positions[..., None]


def _length(part: slice) -> int:
    return int(part.stop) - int(part.start)


def attention_blocked(
    q_SBnD: Tensor, k_TBgD: Tensor, v_TBgE: Tensor, rule: Rule, extras: Extras = NONE
) -> Tensor:
    """Return what `attention_reference` returns."""
    assert extras.alibi_slopes_n is None or not extras.alibi_slopes_n.requires_grad
    if extras.query_positions_BS is not None and rule.causal:
        # Keys past the last query are room in a cache: leave them out of the copies below.
        high = max(int(extras.query_positions_BS.max()) + 1, 1)
        k_TBgD, v_TBgE = k_TBgD[:high], v_TBgE[:high]
        if extras.bias is not None:
            extras = replace(extras, bias=extras.bias[..., :high])
        if extras.valid_BT is not None:
            extras = replace(extras, valid_BT=extras.valid_BT[:, :high])
    out: Tensor = _Blocked.apply(q_SBnD, k_TBgD, v_TBgE, extras.sink_n, extras.bias, rule, extras)
    return out


def tiles(q_SBnD: Tensor, k_TBgD: Tensor, rule: Rule, extras: Extras) -> Iterator[Tile]:
    """Cut the queries into tiles, sample by sample, document by document."""
    S, B = q_SBnD.shape[:2]
    T = k_TBgD.shape[0]
    if extras.query_positions_BS is not None:
        yield from _decoding_tiles(extras.query_positions_BS, T, rule)
        return
    assert S == T or not (rule.causal or rule.window or extras.packing), f"{S} queries, {T} keys"
    left, right = rule.window or (-1, -1)
    right = 0 if rule.causal else right
    if extras.packing is None:
        together = max(1, SCORES // (q_SBnD.shape[2] * TILE * T))
        spans = [(slice(b, min(b + together, B)), 0, S, T) for b in range(0, B, together)]
    else:
        spans = [(slice(b, b + 1), s, end, end) for b, s, end in extras.packing.documents(S)]
    everyone = torch.arange(S, device=q_SBnD.device)
    seen: dict[tuple[int, int, int], tuple[tuple[slice, Tensor], ...]] = {}
    for samples, start, stop, last in spans:
        for first in range(start, stop, TILE):
            end = min(first + TILE, stop)
            low = start if left < 0 else max(start, first - left)
            high = last if right < 0 else min(last, end + right)
            shape = (end - first, high - low, low - first)
            if shape not in seen:
                seen[shape] = _masks(*shape, left, right, q_SBnD.device)
            queries, keys = slice(first, end), slice(low, high)
            yield Tile(samples, queries, keys, seen[shape], everyone[queries])


def _masks(
    c: int, w: int, offset: int, left: int, right: int, device: torch.device
) -> tuple[tuple[slice, Tensor], ...]:
    """Return the hidden parts of ``w`` keys that start ``offset`` from a tile of ``c`` queries."""
    distance = torch.arange(w, device=device) + offset - torch.arange(c, device=device)[:, None]
    hidden = []
    # The last query of the tile sees least to the left, the first one least to the right.
    far, near = c - 1 - left - offset, right + 1 - offset
    if left >= 0 and far > 0:
        hidden.append((slice(0, far), distance[:, :far] < -left))
    if right >= 0 and near < w:
        hidden.append((slice(max(near, 0), w), distance[:, max(near, 0) :] > right))
    return tuple(hidden)


def _decoding_tiles(positions_BS: Tensor, T: int, rule: Rule) -> Iterator[Tile]:
    left, right = rule.window or (-1, -1)
    right = 0 if rule.causal else right
    B, S = positions_BS.shape
    for first in range(0, S, TILE):
        queries = slice(first, min(first + TILE, S))
        here = positions_BS[:, queries]
        high = T if right < 0 else max(min(T, int(here.max()) + right + 1), 1)
        low = 0 if left < 0 else min(max(0, int(here.min()) - left), high - 1)
        distance = torch.arange(low, high, device=here.device) - here[..., None]
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if left >= 0:
            hidden |= distance < -left
        if right >= 0:
            hidden |= distance > right
        parts = ((slice(0, high - low), hidden[:, None, None]),)
        yield Tile(slice(0, B), queries, slice(low, high), parts, here[:, None, None])


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_SBnD: Tensor,
        k_TBgD: Tensor,
        v_TBgE: Tensor,
        sink: Tensor | None,
        bias: Tensor | None,
        rule: Rule,
        extras: Extras,
    ) -> Tensor:
        plan = list(tiles(q_SBnD, k_TBgD, rule, extras))
        dtype = accumulate_dtype(q_SBnD.dtype)
        groups = k_TBgD.shape[2]
        # Contiguous copies feed the products; kept for backward in place of the arguments.
        q = q_SBnD.unflatten(2, (groups, -1)).permute(1, 2, 3, 0, 4).to(dtype) * rule.scale
        q = q.contiguous()
        k, v = (
            x.permute(1, 2, 0, 3).to(dtype, memory_format=torch.contiguous_format)
            for x in (k_TBgD, v_TBgE)
        )
        work = _Work(q, k, v, rule, replace(extras, sink_n=sink, bias=bias))
        out = q_SBnD.new_empty(*q_SBnD.shape[:3], v.shape[3])
        needed = any(ctx.needs_input_grad)
        size = q.shape[:3].numel() * sum(tile.pairs for tile in plan)
        keep = needed and size <= KEPT and rule.softcap is None
        probs_kept: list[Tensor] = []
        dropped: list[Tensor] = []
        scope = extras.dropout_scope if extras.dropout_p > 0 else None
        with scope or nullcontext():
            for tile in plan:
                probs = work.probabilities(tile)
                if keep:
                    probs_kept.append(probs)
                if extras.dropout_p > 0:
                    factor = F.dropout(torch.ones_like(probs), extras.dropout_p)
                    probs = probs * factor
                    if needed:
                        dropped.append(factor)
                work.scatter(out, tile, torch.bmm(probs, work.values(tile)))
        ctx.save_for_backward(q, k, v, sink, bias, *probs_kept, *dropped)
        ctx.rule, ctx.plan, ctx.kept = rule, plan, len(probs_kept)
        ctx.extras, ctx.dtype = replace(extras, dropout_scope=None), q_SBnD.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, bias, *rest = ctx.saved_tensors
        kept, dropped = rest[: ctx.kept], rest[ctx.kept :]
        work = _Work(q, k, v, ctx.rule, replace(ctx.extras, sink_n=sink, bias=bias))
        grads = _Gradients(work, ctx.dtype)
        for i, tile in enumerate(ctx.plan):
            probs = kept[i] if kept else work.probabilities(tile)
            grads.add(tile, grad_out, probs, dropped[i] if dropped else None)
        return (*grads.result(ctx.dtype), None, None)


class _Work:
    """Inputs of one call in the layout of the products, at least fp32.

    ``q`` is [B, g, r, S, D] and scaled, ``k`` and ``v`` are [B, g, T, D].
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, rule: Rule, extras: Extras) -> None:
        self.q, self.k, self.v, self.rule, self.extras = q, k, v, rule, extras
        self.groups, self.repeats = q.shape[1:3]

    def queries(self, tile: Tile) -> Tensor:
        """Return the scaled queries of a tile as [b * g, R, D]."""
        return self.q[tile.samples, :, :, tile.queries].flatten(2, 3).flatten(0, 1)

    def keys(self, tile: Tile) -> Tensor:
        return self.k[tile.samples, :, tile.keys].flatten(0, 1)

    def values(self, tile: Tile) -> Tensor:
        return self.v[tile.samples, :, tile.keys].flatten(0, 1)

    def gather(self, x_SBnD: Tensor, tile: Tile) -> Tensor:
        """Return a tile of a query-like tensor as [b * g, R, D], at least fp32."""
        x: Tensor = x_SBnD[tile.queries, tile.samples].to(self.q.dtype)
        x = x.unflatten(2, (self.groups, -1)).permute(1, 2, 3, 0, 4)
        return x.reshape(x.shape[0] * x.shape[1], -1, x.shape[-1])

    def scatter(self, out_SBnD: Tensor, tile: Tile, x: Tensor) -> None:
        """Write [b * g, R, D] where `gather` would read it."""
        to = out_SBnD[tile.queries, tile.samples]
        c, b = to.shape[:2]
        to.copy_(x.view(b, -1, c, x.shape[-1]).permute(2, 0, 1, 3))

    def heads(self, x: Tensor) -> Tensor:
        """View the rows [b * g, R, w] of a tile as [b, g, r, c, w]."""
        return x.view(-1, self.groups, self.repeats, x.shape[1] // self.repeats, x.shape[-1])

    def bias(self, tile: Tile, bias: Tensor) -> Tensor:
        """Return the part of a bias (or of its gradient) that a tile uses, as [b, n, c, w]."""
        bias = bias[(None,) * (4 - bias.dim())]
        whole = slice(None)
        cuts = zip((tile.samples, whole, tile.queries, tile.keys), bias.shape, strict=True)
        return bias[tuple(cut if size > 1 else whole for cut, size in cuts)]

    def scores(self, tile: Tile) -> tuple[Tensor, Tensor | None]:
        """Return scores [b * g, R, w], hidden ones -inf, and the slope of the soft cap."""
        z = torch.bmm(self.queries(tile), self.keys(tile).transpose(1, 2))
        slope = None
        cap = self.rule.softcap
        if cap is not None:
            z.div_(cap).tanh_()
            slope = 1 - z.square()
            z.mul_(cap)
        view = self.heads(z)
        if self.extras.alibi_slopes_n is not None:
            slopes = self.extras.alibi_slopes_n.to(z.dtype).view(self.groups, -1, 1, 1)
            view.sub_(slopes * tile.distance().abs())
        if self.extras.bias is not None:
            view.flatten(1, 2).add_(self.bias(tile, self.extras.bias))
        for columns, mask in tile.hidden:
            view[..., columns].masked_fill_(mask, -torch.inf)
        if self.extras.valid_BT is not None:
            valid_bw = self.extras.valid_BT[tile.samples, tile.keys]
            view.masked_fill_(~valid_bw[:, None, None, None], -torch.inf)
        return z, slope

    def probabilities(self, tile: Tile) -> Tensor:
        """Return the softmax of a tile's scores; a row that sees nothing is zero."""
        z, _ = self.scores(tile)
        sink = self.extras.sink_n
        extras = self.extras
        may_see_none = (extras.bias, extras.query_positions_BS, extras.valid_BT)
        if sink is None and all(one is None for one in may_see_none):
            # In place, as in backward: both read a row before they write it, and a buffer less is
            # a third of the time of the step between the products.
            return torch.softmax(z, -1, out=z if z.is_cpu else None)
        if sink is None:
            return torch.softmax(z, -1).masked_fill_(z.amax(-1, keepdim=True) == -torch.inf, 0)
        total = self.heads(torch.logsumexp(z, -1, keepdim=True))
        total = torch.logaddexp(total, sink.to(z.dtype).view(self.groups, -1, 1, 1))
        return torch.exp(z - total.view(*z.shape[:2], 1))


class _Gradients:
    """Gradients of one call, filled tile by tile."""

    def __init__(self, work: _Work, dtype: torch.dtype) -> None:
        self.work = work
        B, g, r, S, D = work.q.shape
        self.q = work.q.new_empty(S, B, g * r, D, dtype=dtype)
        self.k, self.v = torch.zeros_like(work.k), torch.zeros_like(work.v)
        sink, bias = work.extras.sink_n, work.extras.bias
        self.sink = None if sink is None else torch.zeros_like(sink)
        self.bias = None if bias is None else torch.zeros_like(bias)

    def add(self, tile: Tile, grad_out: Tensor, probs: Tensor, factor: Tensor | None) -> None:
        """Add what one tile contributes."""
        work = self.work
        g = work.gather(grad_out, tile)
        used = probs if factor is None else probs * factor
        self.v[tile.samples, :, tile.keys].flatten(0, 1).add_(torch.bmm(used.transpose(1, 2), g))
        dp = torch.bmm(g, work.values(tile).transpose(1, 2))
        if factor is not None:
            dp.mul_(factor)
        if self.sink is not None:
            # The sink's value is zero, so its score gets -p_sink * sum(p * dp).
            delta = (probs * dp).sum(-1) * (1 - probs.sum(-1))
            self.sink -= work.heads(delta[..., None]).sum((0, 3, 4)).flatten()
        backward = torch.ops.aten._softmax_backward_data
        if dp.is_cpu:
            dz = backward.out(dp, probs, -1, dp.dtype, grad_input=dp)
        else:
            dz = backward(dp, probs, -1, dp.dtype)
        if self.bias is not None:
            part = work.bias(tile, self.bias)
            part += work.heads(dz).flatten(1, 2).sum_to_size(part.shape)
        if work.rule.softcap is not None:
            dz = dz * work.scores(tile)[1]
        work.scatter(self.q, tile, torch.bmm(dz, work.keys(tile)).mul_(work.rule.scale))
        dk = self.k[tile.samples, :, tile.keys].flatten(0, 1)
        dk.add_(torch.bmm(dz.transpose(1, 2), work.queries(tile)))

    def result(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v, sink and bias."""
        k, v = (x.permute(2, 0, 1, 3).to(dtype) for x in (self.k, self.v))
        return self.q, k, v, self.sink, self.bias
