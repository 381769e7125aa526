"""Scaled dot-product attention: what every backend computes, and the readable reference.

For head i of query group i // (n / g):

    score[i, j] = cap(scale * q_i . k_j) - slope * |i - j| + bias[i, j]     over visible keys j
    out[i]      = sum_j softmax(score)[i, j] * v_j

Key j is visible to query i when it stands at or before it (causal), inside the window
(i - left <= j <= i + right), in the same document, and is valid: no padding. A sink is one more
logit per head that takes part in the softmax and is then dropped (0 gives the off-by-one softmax).
A query that sees no key gets zeros: the masked score is -inf, where Megatron-LM has -10000 and a
uniform row.

Layouts: the queries of a whole sample (T == S, query i at position i), keys of another sequence
(T != S, not causal), or cached decoding: queries stand at ``query_positions_BS`` and key j at j.

Shapes: S queries, T keys, B batch, n heads, g query groups, D head size, E value head size.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels.dtypes import accumulate_dtype


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a layer decides once, in its constructor."""

    scale: float
    causal: bool = True
    window: tuple[int, int] | None = None
    """Keys that a query sees to its left and to its right; -1 is no limit."""
    softcap: float | None = None
    """Scores are bent into (-softcap, softcap) by tanh."""


@dataclass(frozen=True)
class Packing:
    """Documents that attend only within themselves; made once per microbatch.

    ``cu_seqlens`` holds the documents' bounds over the flattened B * S tokens, sample by sample:
    0 first, B * S last, every multiple of S among them, empty documents allowed.
    """

    cu_seqlens: Tensor

    @cached_property
    def bounds(self) -> list[int]:
        """The bounds on the host, without empty documents."""
        bounds = self.cu_seqlens.tolist()
        assert bounds[0] == 0 and bounds == sorted(bounds), "cu_seqlens must ascend from 0"
        return [0, *(end for start, end in zip(bounds, bounds[1:], strict=False) if end > start)]

    @cached_property
    def max_length(self) -> int:
        """Length of the longest document."""
        return max(e - s for s, e in zip(self.bounds, self.bounds[1:], strict=False))

    def documents(self, sequence: int) -> list[tuple[int, int, int]]:
        """Return (sample, start, end) of every document, positions within the sample."""
        pairs = zip(self.bounds, self.bounds[1:], strict=False)
        found = [(s // sequence, s % sequence, s % sequence + e - s) for s, e in pairs]
        assert all(end <= sequence for _, _, end in found), "a document crosses two samples"
        return found

    def document_ids(self, batch: int, sequence: int) -> Tensor:
        """Return the number of each token's document, in [B, S]."""
        assert self.bounds[-1] == batch * sequence, f"{self.bounds[-1]} != {batch} x {sequence}"
        bounds = torch.tensor(self.bounds, device=self.cu_seqlens.device)
        ids = torch.repeat_interleave(
            torch.arange(len(bounds) - 1, device=bounds.device), bounds.diff()
        )
        return ids.view(batch, sequence)


@dataclass(frozen=True, kw_only=True)
class Extras:
    """What changes from call to call; everything may be absent."""

    packing: Packing | None = None
    query_positions_BS: Tensor | None = None
    """Cached decoding: where each query stands among the keys."""
    sink_n: Tensor | None = None
    """The extra logit of each head; zeros give the off-by-one softmax."""
    alibi_slopes_n: Tensor | None = None
    bias: Tensor | None = None
    """Added to the scores; broadcasts to [B, n, S, T]."""
    valid_BT: Tensor | None = None
    """Keys that any query may see, bool; None for all. The others are padding."""
    dropout_p: float = 0.0
    dropout_scope: AbstractContextManager[None] | None = None
    """Entered around the dropout, so that torch's default generator is seeded in it."""


NONE = Extras()
AttentionFunction = Callable[[Tensor, Tensor, Tensor, Rule, Extras], Tensor]


def attention_reference(
    q_SBnD: Tensor, k_TBgD: Tensor, v_TBgE: Tensor, rule: Rule, extras: Extras = NONE
) -> Tensor:
    """Return out_SBnE with every score written out; the specification of the other backends."""
    S, B, n, _ = q_SBnD.shape
    T, g = k_TBgD.shape[0], k_TBgD.shape[2]
    dtype = accumulate_dtype(q_SBnD.dtype)
    q_BnSD = q_SBnD.to(dtype).permute(1, 2, 0, 3)
    # Each group's key and value serve n / g heads in a row.
    k_BnTD = k_TBgD.to(dtype).permute(1, 2, 0, 3).repeat_interleave(n // g, 1)
    v_BnTE = v_TBgE.to(dtype).permute(1, 2, 0, 3).repeat_interleave(n // g, 1)
    scores_BnST = q_BnSD @ k_BnTD.transpose(-1, -2) * rule.scale
    if rule.softcap is not None:
        scores_BnST = rule.softcap * torch.tanh(scores_BnST / rule.softcap)
    distance_B1ST = key_distance(S, T, extras.query_positions_BS, q_SBnD.device)
    if extras.alibi_slopes_n is not None:
        slopes_n11 = extras.alibi_slopes_n.to(dtype)[:, None, None]
        scores_BnST = scores_BnST - slopes_n11 * distance_B1ST.abs()
    if extras.bias is not None:
        scores_BnST = scores_BnST + extras.bias
    visible_B1ST = visible_keys(distance_B1ST, rule, extras, B)
    probs_BnST = softmax(scores_BnST, visible_B1ST, extras.sink_n)
    if extras.dropout_p > 0:
        with extras.dropout_scope or nullcontext():
            probs_BnST = F.dropout(probs_BnST, extras.dropout_p)
    return (probs_BnST @ v_BnTE).permute(2, 0, 1, 3).to(q_SBnD.dtype)


def key_distance(S: int, T: int, query_positions_BS: Tensor | None, device: torch.device) -> Tensor:
    """Return position of key - position of query as distance_B1ST; B is 1 where samples agree."""
    keys_T = torch.arange(T, device=device)
    if query_positions_BS is None:
        return (keys_T - torch.arange(S, device=device)[:, None])[None, None]
    return (keys_T - query_positions_BS[..., None])[:, None]


def visible_keys(distance_B1ST: Tensor, rule: Rule, extras: Extras, batch: int) -> Tensor | None:
    """Return which keys count, as visible_B1ST with B = 1 where samples agree; None when all do."""
    parts = []
    if rule.causal:
        parts.append(distance_B1ST <= 0)
    left, right = rule.window or (-1, -1)
    if left >= 0:
        parts.append(distance_B1ST >= -left)
    if right >= 0 and not (rule.causal and right == 0):
        parts.append(distance_B1ST <= right)
    if extras.packing is not None:
        ids_BS = extras.packing.document_ids(batch, distance_B1ST.shape[-1])
        parts.append((ids_BS[:, :, None] == ids_BS[:, None, :])[:, None])
    if extras.valid_BT is not None:
        valid_B11T = extras.valid_BT[:, None, None]
        parts.append(valid_B11T.expand(-1, 1, distance_B1ST.shape[-2], -1))
    visible_B1ST = None
    for part in parts:
        visible_B1ST = part if visible_B1ST is None else visible_B1ST & part
    return visible_B1ST


def softmax(scores_BnST: Tensor, visible_B1ST: Tensor | None, sink_n: Tensor | None) -> Tensor:
    """Return probabilities over the visible keys; rows without any are zero."""
    if visible_B1ST is not None:
        scores_BnST = scores_BnST.masked_fill(~visible_B1ST, -torch.inf)
    # A row of -inf alone would give NaN here and in backward: it is computed as a row of zeros,
    # and dropped.
    dead_BnS1 = scores_BnST.amax(-1, keepdim=True) == -torch.inf
    scores_BnST = scores_BnST.masked_fill(dead_BnS1, 0)
    if sink_n is None:
        return torch.softmax(scores_BnST, -1).masked_fill(dead_BnS1, 0)
    sink_BnS1 = sink_n.to(scores_BnST.dtype)[:, None, None].expand(*scores_BnST.shape[:-1], 1)
    probs_BnST = torch.softmax(torch.cat((scores_BnST, sink_BnS1), -1), -1)[..., :-1]
    return probs_BnST.masked_fill(dead_BnS1, 0)
