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
from collections.abc import Iterator, Sequence
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

KEPT = 2**25
"""Probabilities of one call that are kept for backward at most; others are computed again."""


class Sight:
    """Which keys a run of queries sees; bounds are known on the host, so that work is skipped.

    Padding is not: all of it is looked at, and hidden.
    """

    def __init__(
        self,
        rule: Rule,
        packing: Packing | None,
        batch: int,
        sequence: int,
        device: torch.device,
        valid_BT: Tensor | None = None,
    ) -> None:
        left, right = rule.window or (-1, -1)
        self.left, self.right = left, 0 if rule.causal else right
        self.sequence, self.device, self._valid_BT = sequence, device, valid_BT
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

    def hidden(self, queries: range, keys: range) -> list[tuple[slice, Tensor]]:
        """Return (columns, mask) pairs: there the mask's True pairs do not count.

        A mask is [c, columns] or [B, 1, 1, c or 1, columns].
        """
        parts = []
        # The last query sees least to the left, the first one least to the right.
        far = queries.stop - 1 - self.left - keys.start
        near = queries.start + 1 + self.right - keys.start
        if self.left >= 0 and far > 0:
            distance = self.distance(queries, keys[:far])
            parts.append((slice(0, len(keys[:far])), distance < -self.left))
        if self.right >= 0 and near < len(keys):
            near = max(near, 0)
            distance = self.distance(queries, keys[near:])
            parts.append((slice(near, len(keys)), distance > self.right))
        if self._ids_BS is not None and not self._one_document(queries, keys):
            rows_Bc = self._ids_BS[:, queries.start : queries.stop]
            columns_Bw = self._ids_BS[:, keys.start : keys.stop]
            mask_Bcw = rows_Bc[:, :, None] != columns_Bw[:, None, :]
            parts.append((slice(0, len(keys)), mask_Bcw[:, None, None]))
        if self._valid_BT is not None:
            padding_Bw = ~self._valid_BT[:, keys.start : keys.stop]
            parts.append((slice(0, len(keys)), padding_Bw[:, None, None, None]))
        return parts

    def blind(self, queries: range, keys: range) -> bool:
        """Return whether some of the queries may see none of the keys."""
        if self._valid_BT is not None:
            return True
        if self._ids_BS is not None and not self._one_document(queries, keys):
            return True
        left = self.left >= 0 and queries.stop - 1 - self.left > keys.stop - 1
        return left or (self.right >= 0 and queries.start + self.right < keys.start)

    def distance(self, queries: range, keys: range) -> Tensor:
        """Return position of key - position of query, ``[c, w]``."""
        return self._positions(keys) - self._positions(queries)[:, None]

    def _positions(self, run: range) -> Tensor:
        return torch.arange(run.start, run.stop, device=self.device)

    def _one_document(self, queries: range, keys: range) -> bool:
        first, last = min(queries.start, keys.start), max(queries.stop, keys.stop) - 1
        return all(last < self._document(starts, first)[1] for starts in self._bounds)

    @staticmethod
    def _document(starts: list[int], position: int) -> tuple[int, int]:
        """Return the bounds of the document around a position of a sample."""
        at = bisect_right(starts, position)
        return starts[at - 1], starts[at]


class Rows(NamedTuple):
    """What backward knows of a run of queries, all keys seen."""

    grad_out_BgrcE: Tensor
    lse_Bgrc: Tensor
    """-inf nowhere: a row that sees nothing has any finite value."""
    delta_Bgrc: Tensor
    """Sum of out * grad_out over E."""
    grad_q_BgrcD: Tensor
    """Gradients are added here."""


class BlockBias:
    """What is added to the scores of two runs of queries, for the keys of the whole sample.

    Args:
        bias: broadcasts to [B, n, c of both runs, T].
        runs: positions of the queries, in their order.
        groups: query groups.
    """

    def __init__(self, bias: Tensor, runs: Sequence[range], groups: int) -> None:
        wide = bias[(None,) * (4 - bias.dim())]
        heads = groups if wide.shape[1] > 1 else 1
        self._bias, self._runs = wide.unflatten(1, (heads, -1)), runs
        self.grad: Tensor | None = None
        """Filled by `add`."""

    def part(self, run: range, seen: range) -> Tensor:
        """Return what is added to the scores of a run, broadcasting to [B, g, r, c, w]."""
        part: Tensor = self._bias[self._cut(run, seen)]
        return part

    def add(self, run: range, seen: range, grad_Bgrcw: Tensor) -> None:
        """Add the gradients of the scores of a run."""
        if self.grad is None:
            self.grad = torch.zeros_like(self._bias)
        part = self.grad[self._cut(run, seen)]
        part += grad_Bgrcw.sum_to_size(part.shape)

    def _cut(self, run: range, seen: range) -> tuple[slice, ...]:
        first = 0
        for whole in self._runs:
            if run.start in whole:
                first += run.start - whole.start
                break
            first += len(whole)
        whole, rows, columns = self._bias.shape, slice(first, first + len(run)), slice(None)
        if whole[4] > 1:
            columns = slice(seen.start, seen.stop)
        return (slice(None),) * 3 + (rows if whole[3] > 1 else slice(None), columns)


class Kept:
    """Probabilities of each tile over its own keys, and their lse, as far as there is room."""

    def __init__(self) -> None:
        self._room = KEPT
        self._tiles: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._places: tuple[tuple[int, int], ...] = ()

    def add(self, run: range, seen: range, probs: Tensor, lse: Tensor) -> None:
        if probs.numel() <= self._room:
            self._room -= probs.numel()
            self._tiles[run.start, seen.start] = probs, lse

    def find(self, run: range, seen: range) -> tuple[Tensor, Tensor] | None:
        return self._tiles.get((run.start, seen.start))

    def give_up(self) -> tuple[Tensor, ...]:
        """Return all tensors for autograd to save: so that whoever watches what is saved sees them.

        Until `take_back` gets them, in this order, there are only the places that they belong to.
        """
        self._places = tuple(self._tiles)
        tensors = tuple(tensor for tile in self._tiles.values() for tensor in tile)
        self._tiles.clear()
        return tensors

    def take_back(self, tensors: Sequence[Tensor]) -> None:
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        self._tiles = dict(zip(self._places, pairs, strict=True))


@dataclass(frozen=True)
class BlockAttention:
    """Attention block by block, of one layer's call."""

    rule: Rule
    sight: Sight
    alibi_slopes_n: Tensor | None = None
    dropout_p: float = 0.0
    seed: int = 0
    """Of the dropout; masks also depend on the block's place, and are the same in backward."""
    kept: Kept | None = None
    """Where probabilities are kept for backward; not under a soft cap, whose slope they lack."""
    bias: BlockBias | None = None

    @classmethod
    def of(
        cls, rule: Rule, extras: Extras, sight: Sight, *, seed: int = 0, keep: bool = False
    ) -> "BlockAttention":
        """Return the blocks of a call, without its bias."""
        assert extras.query_positions_BS is None, "cached decoding is not cut over ranks"
        slopes = extras.alibi_slopes_n
        assert slopes is None or not slopes.requires_grad, "ALiBi slopes are constants"
        kept = Kept() if keep and rule.softcap is None else None
        return cls(rule, sight, slopes, extras.dropout_p, seed, kept)

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
            queries_tile = self._queries(q_BgrcD[:, :, :, rows])
            z, _ = self._scores(queries_tile, k_BgwD[:, :, columns], run, seen)
            probs, total = _softmax(z, self.sight.blind(run, seen))
            if self.kept is not None:
                self.kept.add(run, seen, probs, total)
            if generator is not None:
                probs = probs * self._dropped(probs, generator)
            shape = (*out.shape[:3], len(run))
            lse[:, :, :, rows] = total.view(shape)
            part = probs @ v_BgwE[:, :, columns].to(dtype)
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
            q = self._queries(q_BgrcD[:, :, :, rows])
            grad, lse, delta, grad_q = (x[:, :, :, rows] for x in rows_of)
            grad, lse, delta = grad.to(dtype).flatten(2, 3), lse.flatten(2), delta.flatten(2)
            slope = None
            found = self.kept.find(run, seen) if self.kept is not None else None
            if found is None:
                z, slope = self._scores(q, k, run, seen)
                probs = z.sub_(lse[..., None]).exp_()
            else:
                # Over the tile's own keys: they lack a factor per row, which the gradients take.
                probs, own = found
                share = (own - lse).exp_()
                grad, delta = grad * share[..., None], delta * share
            dp, used = grad @ v.transpose(-1, -2), probs
            if generator is not None:
                factor = self._dropped(probs, generator)
                used = probs * factor
                dp.mul_(factor)
            grad_v_BgwE[:, :, columns] += used.transpose(-1, -2) @ grad
            dz = dp.sub_(delta[..., None]).mul_(probs)
            if self.bias is not None:
                self.bias.add(run, seen, dz.unflatten(2, (-1, len(run))))
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

    def _queries(self, q_BgrcD: Tensor) -> Tensor:
        """Return the queries of a tile, scaled, [B, g, r * c, D]."""
        q_BgrcD = q_BgrcD.to(accumulate_dtype(q_BgrcD.dtype)) * self.rule.scale
        return q_BgrcD.flatten(2, 3)

    def _scores(
        self, q: Tensor, k_BgwD: Tensor, run: range, seen: range
    ) -> tuple[Tensor, Tensor | None]:
        """Return scores [B, g, r * c, w], hidden ones -inf, and the slope of the soft cap."""
        z = q @ k_BgwD.to(q.dtype).transpose(-1, -2)
        slope, cap = None, self.rule.softcap
        if cap is not None:
            z.div_(cap).tanh_()
            slope = 1 - z.square()
            z.mul_(cap)
        view_Bgrcw = z.unflatten(2, (-1, len(run)))
        if self.alibi_slopes_n is not None:
            slopes = self.alibi_slopes_n.to(z.dtype).view(*view_Bgrcw.shape[1:3], 1, 1)
            view_Bgrcw.sub_(slopes * self.sight.distance(run, seen).abs())
        if self.bias is not None:
            view_Bgrcw.add_(self.bias.part(run, seen))
        for columns, mask in self.sight.hidden(run, seen):
            view_Bgrcw[..., columns].masked_fill_(mask, -torch.inf)
        return z, slope

    def _generator(
        self, queries: range, keys: range, device: torch.device
    ) -> torch.Generator | None:
        if self.dropout_p == 0:
            return None
        place = queries.start * self.sight.sequence + keys.start
        # An odd multiplier keeps neighbouring places far apart and distinct.
        mixed = (self.seed + place * 0x9E3779B97F4A7C15) % 2**63
        return torch.Generator(device).manual_seed(mixed)

    def _dropped(self, weights: Tensor, generator: torch.Generator) -> Tensor:
        """Return 0 for what is dropped and 1 / (1 - p) for the rest."""
        kept = 1 - self.dropout_p
        mask = torch.empty_like(weights, memory_format=torch.contiguous_format)
        return mask.bernoulli_(kept, generator=generator).div_(kept)


def _softmax(z: Tensor, blind: bool) -> tuple[Tensor, Tensor]:
    """Return the softmax of ``z``, which is overwritten, and its lse, [B, g, r * c].

    A row of -inf, which there can be if ``blind``, is zeros, and its lse -inf.
    """
    top = z.amax(-1)
    probs = torch.softmax(z, -1, out=z if z.is_cpu else None)
    # The largest probability is exp(top - lse).
    lse = top - probs.amax(-1).log_()
    if blind:
        dead = top == -torch.inf
        probs.masked_fill_(dead[..., None], 0)
        lse.masked_fill_(dead, -torch.inf)
    return probs, lse


def merge(out: Tensor, lse: Tensor, piece_out: Tensor, piece_lse: Tensor) -> None:
    """Join a piece into ``out`` and ``lse``, in place."""
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
