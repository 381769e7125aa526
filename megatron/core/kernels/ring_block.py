"""Attention of a run of queries to a run of keys, when a softmax is spread over several such runs.

A block gives the softmax over its own keys and the log of the sum that it was divided by; `merge`
joins the blocks of a query:

    lse = log(exp(lse_1) + exp(lse_2)),  out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

Backward needs no merge: with the joined lse, exp(score - lse) is the final probability, so each
block gives its part of the gradients alone (Dao et al., 2022; Liu et al., 2023). A query that sees
no key of a block has lse -inf there, and zeros.

Runs are ranges of global positions; masks and ALiBi follow from those and from the documents.

Shapes: S positions of a sample, B batch, g query groups, r query heads of a group, n = g * r heads;
in a block c queries, w keys, D head size, E value head size.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.kernels.attention import Extras, Packing, Rule
from megatron.core.kernels.dtypes import accumulate_dtype

TILE = 64
"""Queries whose scores are held at once, at most."""

SCORES = 2**22
"""Scores that are held at once, about; long rows of keys make for fewer queries."""


class Sight:
    """Which keys a run of queries sees; bounds are known on the host, so that work is skipped."""

    def __init__(
        self, rule: Rule, packing: Packing | None, batch: int, sequence: int, device: torch.device
    ) -> None:
        left, right = rule.window or (-1, -1)
        self.left, self.right = left, 0 if rule.causal else right
        self.sequence = sequence
        self._ids_BS: Tensor | None = None
        self._bounds: list[list[int]] = []
        if packing is not None:
            self._ids_BS = packing.document_ids(batch, sequence).to(device)
            self._bounds = [[] for _ in range(batch)]
            for sample, start, _ in packing.documents(sequence):
                self._bounds[sample].append(start)
            for starts in self._bounds:
                starts.append(sequence)

    def reach(self, queries: range, keys: range) -> range:
        """Return the part of ``keys`` outside of which these queries see nothing."""
        low, high = keys.start, keys.stop
        if self.left >= 0:
            low = max(low, queries.start - self.left)
        if self.right >= 0:
            high = min(high, queries.stop + self.right)
        if self._bounds:
            low = max(low, min(self._document(b, queries.start)[0] for b in self._bounds))
            high = min(high, max(self._document(b, queries.stop - 1)[1] for b in self._bounds))
        return range(low, max(low, high))

    def hidden(self, queries: range, keys: range, distance_cw: Tensor) -> Tensor | None:
        """Return the mask of pairs that do not count, ``[c, w]`` or ``[B, 1, 1, c, w]``."""
        parts = []
        if self.left >= 0 and keys.start < queries.stop - 1 - self.left:
            parts.append(distance_cw < -self.left)
        if self.right >= 0 and keys.stop - 1 > queries.start + self.right:
            parts.append(distance_cw > self.right)
        if self._ids_BS is not None and not self._one_document(queries, keys):
            rows_Bc = self._ids_BS[:, queries.start : queries.stop]
            columns_Bw = self._ids_BS[:, keys.start : keys.stop]
            parts.append((rows_Bc[:, :, None] != columns_Bw[:, None, :])[:, None, None])
        mask = None
        for part in parts:
            mask = part if mask is None else mask | part
        return mask

    def _one_document(self, queries: range, keys: range) -> bool:
        first, last = min(queries.start, keys.start), max(queries.stop, keys.stop) - 1
        return all(last < self._document(starts, first)[1] for starts in self._bounds)

    @staticmethod
    def _document(starts: list[int], position: int) -> tuple[int, int]:
        """Return the bounds of the document around a position of a sample."""
        at = bisect_right(starts, position)
        return starts[at - 1], starts[at]


class Scores(NamedTuple):
    """The scores of one tile."""

    z: Tensor
    """[B, g, r * c, w], hidden ones -inf."""
    slope: Tensor | None
    """Derivative of the soft cap."""
    q: Tensor
    """The queries behind them, scaled, [B, g, r * c, D]."""


class Rows(NamedTuple):
    """What backward knows of a run of queries, all keys seen."""

    grad_out_BgrcE: Tensor
    lse_Bgrc: Tensor
    """-inf nowhere: a row that sees nothing has any finite value."""
    delta_Bgrc: Tensor
    """Sum of out * grad_out over E."""
    grad_q_BgrcD: Tensor
    """Gradients are added here."""


@dataclass(frozen=True)
class BlockAttention:
    """Attention block by block, of one layer's call."""

    rule: Rule
    sight: Sight
    alibi_slopes_n: Tensor | None = None
    dropout_p: float = 0.0
    seed: int = 0
    """Of the dropout; masks also depend on the block's place, and are the same in backward."""

    @classmethod
    def of(cls, rule: Rule, extras: Extras, sight: Sight, seed: int = 0) -> "BlockAttention":
        """Return the blocks of a call; what stands for the whole S x T matrix is not supported."""
        assert extras.bias is None, "a bias covers the whole sequence"
        assert extras.query_positions_BS is None, "cached decoding is not cut over ranks"
        slopes = extras.alibi_slopes_n
        assert slopes is None or not slopes.requires_grad, "ALiBi slopes are constants"
        return cls(rule, sight, slopes, extras.dropout_p, seed)

    def forward(
        self, q_BgrcD: Tensor, k_BgwD: Tensor, v_BgwE: Tensor, queries: range, keys: range
    ) -> tuple[Tensor, Tensor] | None:
        """Return out_BgrcE and lse_Bgrc over ``keys`` alone; None when none of them is seen."""
        if not self.sight.reach(queries, keys):
            return None
        dtype = accumulate_dtype(q_BgrcD.dtype)
        out = q_BgrcD.new_zeros(*q_BgrcD.shape[:4], v_BgwE.shape[3], dtype=dtype)
        lse = torch.full_like(out[..., 0], -torch.inf)
        generator = self._generator(queries, keys, out.device)
        for rows, run, columns, seen in self._tiles(q_BgrcD, queries, keys):
            z = self._scores(q_BgrcD[:, :, :, rows], k_BgwD[:, :, columns], run, seen).z
            top = z.amax(-1, keepdim=True)
            # A row of -inf has no largest score; 0 makes its weights exp(-inf) = 0.
            top.masked_fill_(top == -torch.inf, 0)
            weights = z.sub_(top).exp_()
            total = weights.sum(-1, keepdim=True)
            shape = (*out.shape[:3], len(run))
            lse[:, :, :, rows] = (top + total.log()).view(shape)
            total.masked_fill_(total == 0, 1)
            if generator is not None:
                weights.mul_(self._kept(weights, generator))
            part = (weights @ v_BgwE[:, :, columns].to(dtype)).div_(total)
            out[:, :, :, rows] = part.view(*shape, -1)
        return out, lse

    def backward(
        self,
        q_BgrcD: Tensor,
        k_BgwD: Tensor,
        v_BgwE: Tensor,
        at: tuple[range, range],
        rows_of: Rows,
        grad_k_BgwD: Tensor,
        grad_v_BgwE: Tensor,
    ) -> None:
        """Add this block's part of the gradients to ``rows_of.grad_q``, ``grad_k``, ``grad_v``."""
        dtype = accumulate_dtype(q_BgrcD.dtype)
        generator = self._generator(*at, q_BgrcD.device)
        for rows, run, columns, seen in self._tiles(q_BgrcD, *at):
            k, v = (x[:, :, columns].to(dtype) for x in (k_BgwD, v_BgwE))
            z, slope, q = self._scores(q_BgrcD[:, :, :, rows], k, run, seen)
            grad, lse, delta, grad_q = (x[:, :, :, rows] for x in rows_of)
            probs = z.sub_(lse.flatten(2)[..., None]).exp_()
            grad = grad.to(dtype).flatten(2, 3)
            dp = grad @ v.transpose(-1, -2)
            used = probs
            if generator is not None:
                factor = self._kept(probs, generator)
                used = probs * factor
                dp.mul_(factor)
            grad_v_BgwE[:, :, columns] += used.transpose(-1, -2) @ grad
            dz = dp.sub_(delta.flatten(2)[..., None]).mul_(probs)
            if slope is not None:
                dz.mul_(slope)
            grad_q += (dz @ k).mul_(self.rule.scale).view(grad_q.shape)
            grad_k_BgwD[:, :, columns] += dz.transpose(-1, -2) @ q

    def _tiles(
        self, q_BgrcD: Tensor, queries: range, keys: range
    ) -> Iterator[tuple[slice, range, slice, range]]:
        """Yield (local queries, their positions, local keys, theirs) where something is seen."""
        heads = q_BgrcD.shape[:3].numel()
        tile = min(TILE, max(SCORES // (heads * len(keys)), 8))
        for first in range(queries.start, queries.stop, tile):
            run = range(first, min(first + tile, queries.stop))
            seen = self.sight.reach(run, keys)
            if seen:
                rows = slice(run.start - queries.start, run.stop - queries.start)
                yield rows, run, slice(seen.start - keys.start, seen.stop - keys.start), seen

    def _scores(self, q_BgrcD: Tensor, k_BgwD: Tensor, run: range, seen: range) -> Scores:
        dtype = accumulate_dtype(q_BgrcD.dtype)
        q = (q_BgrcD.to(dtype) * self.rule.scale).flatten(2, 3)
        z = q @ k_BgwD.to(dtype).transpose(-1, -2)
        slope, cap = None, self.rule.softcap
        if cap is not None:
            z.div_(cap).tanh_()
            slope = 1 - z.square()
            z.mul_(cap)
        distance_cw = torch.arange(seen.start, seen.stop, device=z.device)
        distance_cw = distance_cw - torch.arange(run.start, run.stop, device=z.device)[:, None]
        view_Bgrcw = z.view(*q_BgrcD.shape[:4], len(seen))
        if self.alibi_slopes_n is not None:
            slopes = self.alibi_slopes_n.to(dtype).view(*q_BgrcD.shape[1:3], 1, 1)
            view_Bgrcw.sub_(slopes * distance_cw.abs())
        mask = self.sight.hidden(run, seen, distance_cw)
        if mask is not None:
            view_Bgrcw.masked_fill_(mask, -torch.inf)
        return Scores(z, slope, q)

    def _generator(
        self, queries: range, keys: range, device: torch.device
    ) -> torch.Generator | None:
        if self.dropout_p == 0:
            return None
        place = queries.start * self.sight.sequence + keys.start
        # An odd multiplier keeps neighbouring places far apart and distinct.
        mixed = (self.seed + place * 0x9E3779B97F4A7C15) % 2**63
        return torch.Generator(device).manual_seed(mixed)

    def _kept(self, weights: Tensor, generator: torch.Generator) -> Tensor:
        """Return 0 for what is dropped and 1 / (1 - p) for the rest."""
        kept = 1 - self.dropout_p
        return torch.empty_like(weights).bernoulli_(kept, generator=generator).div_(kept)


def merge(out: Tensor, lse: Tensor, piece_out: Tensor, piece_lse: Tensor) -> None:
    """Join a piece into ``out`` and ``lse``, in place; both start as zeros and -inf."""
    joined = torch.logaddexp(lse, piece_lse)
    # A row that has seen nothing yet stays zero: exp(-inf - 0).
    base = joined.masked_fill(joined == -torch.inf, 0)
    out.mul_((lse - base).exp_()[..., None])
    out.addcmul_(piece_out, (piece_lse - base).exp_()[..., None])
    lse.copy_(joined)


def finish(out: Tensor, lse: Tensor, sink_n: Tensor | None) -> None:
    """End a merge in place: the sink takes its share, and rows that saw nothing get lse 0."""
    if sink_n is not None:
        total = torch.logaddexp(lse, sink_n.to(lse.dtype).view(*lse.shape[1:3], 1))
        out.mul_((lse - total).exp_()[..., None])
        lse.copy_(total)
    lse.masked_fill_(lse == -torch.inf, 0)


def sink_gradient(sink_n: Tensor, lse_Bgrc: Tensor, delta_Bgrc: Tensor) -> Tensor:
    """Return the gradient that these rows give the sinks.

    A sink's value is zero, so its score gets -p_sink * sum(p * grad of p).
    """
    logits = sink_n.to(lse_Bgrc.dtype).view(*lse_Bgrc.shape[1:3], 1)
    share = (logits - lse_Bgrc).exp_().mul_(delta_Bgrc)
    return share.sum((0, 3)).flatten().neg_().to(sink_n.dtype)
