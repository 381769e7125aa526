"""Sinkhorn's algorithm: a soft assignment of tokens to experts with even rows and even columns.

    p[t, e] = r[t] exp(logit[t, e]) c[e],    sum over e = 1 / T,    sum over t = 1 / E

Rows and columns are scaled in turn until the columns' factors stand still (Sinkhorn and Knopp,
1967; as routing Clark et al., 2022, 2202.01169, section 3.1, and Megatron-LM). Experts are chosen
by p. It belongs to training alone: what tokens choose depends on one another.

Shapes: T tokens of this rank, E experts.
"""

import torch
from torch import Tensor

from megatron.core.transformer.moe.sharers import Sharers

TOLERANCE = 1e-4
"""Mean change of the columns' factors, at which they stand still."""
SMALL = 1e-8
"""Added to sums that are divided by."""
LONGEST = 1000
"""Most rounds."""


@torch.no_grad()
def assignment(logits_TE: Tensor, valid_T: Tensor | None, sharers: Sharers) -> Tensor:
    """Return the soft assignment p_TE, up to a factor for each token.

    Tokens that do not count have no part in the columns' sums. Each round is a collective of the
    sharers, and waits for the device.

    Args:
        logits_TE: fp32 or finer.
        valid_T: tokens that count; None for all.
        sharers: of the microbatch.
    """
    experts = logits_TE.shape[1]
    # A factor of a row changes nothing, and keeps the exponentials in range.
    p_TE = (logits_TE - logits_TE.amax(-1, keepdim=True)).exp()
    counts_T = p_TE.new_ones(len(p_TE)) if valid_T is None else valid_T.to(p_TE.dtype)
    tokens = sharers.total(counts_T.sum()).clamp(min=1.0)
    columns_E = p_TE.new_ones(experts)
    for _ in range(LONGEST):
        rows_T = 1.0 / (tokens * ((p_TE @ columns_E) + SMALL))
        before_E = columns_E
        sums_E = sharers.total((rows_T * counts_T) @ p_TE)
        columns_E = 1.0 / (experts * (sums_E + SMALL))
        if not (columns_E - before_E).abs().mean() > TOLERANCE:
            break
    return p_TE * columns_E
