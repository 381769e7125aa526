"""Auxiliary losses of a router: even loads, and logits that stay small.

With N tokens, f_e the share of the choices that fell on expert e, P_e its mean probability:

    aux_loss          E sum_e f_e P_e                  over a microbatch (Fedus et al., 2021, Switch
                                                       Transformer, 2101.03961, eq. 4-6)
    seq_aux_loss      the same over each sample, mean of those  (DeepSeek-V3, 2412.19437, eq. 17-20)
    global_aux_loss   the same, f_e over the microbatches of the global batch so far, this one
                      included; P_e over this one               (Qiu et al., 2025, 2501.11873)
    z_loss            1/N sum_t (log sum_e exp(logit))^2        (Zoph et al., 2022, ST-MoE,
                                                                2202.08906, eq. 5)

    f_e = 1/(K N) #{t: e among the K best of probability}       P_e = 1/N sum_t probability[t, e]

Probabilities are the softmax of the logits or, of other score functions, scores over their sum.
Choices are counted as they would be without biases, groups and full experts, as in Megatron-LM:
what is judged is what can be learned. Even loads have a loss of 1.

Only valid tokens count. Counts, sums of probabilities and of squares are summed over all ranks that
share the microbatch, in one vector, and all of them have the same loss. Its gradient on a rank is
that of the rank's own tokens, so that the sum over ranks is the gradient of one loss on any layout.

"So far" goes by the numbers of the microbatches in the global batch, in which replicas take turns:
each counts what stands before its own, so that their number changes nothing. (Megatron-LM counts
those of all replicas.)

Shapes: T tokens of this rank (S positions of B samples), E experts, K choices, R samples that are
judged apart: B of them, or 1 for the whole microbatch.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.kernels.routing import TINY, best, scores_of
from megatron.core.mesh import Axis
from megatron.core.rng import DropoutKey
from megatron.core.transformer.moe.router_config import LOSS_NAMES, Z_LOSS, RouterConfig
from megatron.core.transformer.moe.routing import rule_of

CountsSoFar = Callable[[Tensor], Tensor]
"""From the counts of a microbatch to those of the global batch so far; both end in tokens."""


def probabilities(logits_TE: Tensor, config: RouterConfig) -> Tensor:
    """Return scores that sum to 1 over the experts."""
    if config.moe_router_score_function == "softmax":
        return logits_TE.softmax(-1)
    scores_TE = scores_of(logits_TE, rule_of(config))
    return scores_TE / (scores_TE.sum(-1, keepdim=True) + TINY)


def losses(
    logits_TE: Tensor,
    config: RouterConfig,
    valid_T: Tensor | None,
    samples: int,
    total: Callable[[Tensor], Tensor],
    so_far: CountsSoFar,
) -> dict[str, Tensor]:
    """Return the losses that the config gives weights, by `RouterConfig.loss_weights`' names.

    Args:
        logits_TE: fp32 or finer.
        config: kinds of losses.
        valid_T: tokens that count, bool; None for all.
        samples: B.
        total: sums over the ranks that share the microbatch; a collective.
        so_far: counts of the global batch; a collective, called where that loss is wanted.
    """
    wanted = config.loss_weights
    if not wanted:
        return {}
    experts, apart = logits_TE.shape[1], samples if LOSS_NAMES["seq_aux_loss"] in wanted else 1
    sums_RX = _sums(logits_TE, config, valid_T, apart)
    found = _of_sums(total(sums_RX), experts, config, so_far)
    return {name: found[name]() for name in wanted}


def _sums(logits_TE: Tensor, config: RouterConfig, valid_T: Tensor | None, apart: int) -> Tensor:
    """Return this rank's sums of each of ``apart`` samples, [R, 2E + 2].

    Of E probabilities, of E choices, of tokens, and of squares; what no loss asks for is zero.
    """
    tokens, experts = logits_TE.shape

    def summed(x_TX: Tensor) -> Tensor:
        if valid_T is not None:
            x_TX = torch.where(valid_T.unsqueeze(1), x_TX, 0.0)
        summed_RX: Tensor = x_TX.unflatten(0, (-1, apart)).sum(0)
        return summed_RX

    ones_T1 = logits_TE.new_ones(tokens, 1)
    shares_RE = counts_RE = logits_TE.new_zeros(apart, experts)
    squares_R1 = logits_TE.new_zeros(apart, 1)
    if config.loss_weights.keys() - {Z_LOSS}:
        shares_TE = probabilities(logits_TE, config)
        shares_RE = summed(shares_TE)
        best_TK = best(shares_TE.detach(), config.moe_router_topk)
        sample_T1 = torch.arange(tokens, device=best_TK.device).unsqueeze(1) % apart
        heap_N = (sample_T1 * experts + best_TK).flatten()
        counted_TK = ones_T1 if valid_T is None else valid_T.to(logits_TE.dtype).unsqueeze(1)
        counts_N = logits_TE.new_zeros(apart * experts)
        counts_N.scatter_add_(0, heap_N, counted_TK.expand_as(best_TK).flatten())
        counts_RE = counts_N.view(apart, experts)
    if Z_LOSS in config.loss_weights:
        squares_R1 = summed(logits_TE.logsumexp(-1, keepdim=True).square())
    return torch.cat((shares_RE, counts_RE, summed(ones_T1), squares_R1), 1)


def _of_sums(
    sums_RX: Tensor, experts: int, config: RouterConfig, so_far: CountsSoFar
) -> dict[str, Callable[[], Tensor]]:
    """Return each loss as a function of the sums over a microbatch, by sample or of all."""
    scale = experts / config.moe_router_topk
    whole_X = sums_RX.sum(0)

    def uneven(sums_X: Tensor, counts_X: Tensor) -> Tensor:
        """Return E sum_e f_e P_e; of several samples, that of each."""
        shares, counts = sums_X[..., :experts], counts_X[..., :-1]
        products = shares * counts.detach()
        tokens = sums_X[..., 2 * experts] * counts_X[..., -1]
        return scale * products.sum(-1) / tokens.detach().clamp(min=1.0)

    def counts_of(sums_X: Tensor) -> Tensor:
        return sums_X[..., experts : 2 * experts + 1]

    def mean_of_samples() -> Tensor:
        some_R = (sums_RX[:, 2 * experts] > 0).to(sums_RX.dtype)
        return uneven(sums_RX, counts_of(sums_RX)).sum() / some_R.sum().clamp(min=1.0)

    return {
        LOSS_NAMES["aux_loss"]: lambda: uneven(whole_X, counts_of(whole_X)),
        LOSS_NAMES["seq_aux_loss"]: mean_of_samples,
        LOSS_NAMES["global_aux_loss"]: lambda: uneven(whole_X, so_far(counts_of(whole_X).detach())),
        Z_LOSS: lambda: whole_X[-1] / whole_X[2 * experts].detach().clamp(min=1.0),
    }


class GlobalCounts:
    """Counts of the global batch so far, of one router.

    Replicas take turns with the microbatches: number ``i n + r`` is the i-th of replica r of n.
    """

    def __init__(self, replicas: Axis) -> None:
        self._replicas = replicas
        self._iteration: int | None = None
        self._before: Tensor | None = None
        self._known: dict[int, Tensor] = {}

    @torch.no_grad()
    def add(self, key: DropoutKey, counts_X: Tensor) -> Tensor:
        """Return the sum of the counts of all microbatches up to this one; a collective.

        A recomputed forward gets what the first one got.
        """
        if key.iteration != self._iteration:
            self._iteration, self._before = key.iteration, None
            self._known.clear()
        if key.microbatch not in self._known:
            axis = self._replicas
            round_RX = comm.all_gather(counts_X.unsqueeze(0).contiguous(), axis)
            mine_X = round_RX[: axis.coordinate + 1].sum(0)
            whole_X = round_RX.sum(0)
            if self._before is not None:
                mine_X, whole_X = mine_X + self._before, whole_X + self._before
            self._before, self._known[key.microbatch] = whole_X, mine_X
        return self._known[key.microbatch]
