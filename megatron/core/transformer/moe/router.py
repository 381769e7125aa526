"""The router of an expert layer: one matrix that gives each token a logit per expert.

    x' = x times random factors near 1, if any                       (`noise`)
    logits = x' W^T
    experts = the best by score, by Sinkhorn's assignment, or by the token's id
    weights = what `kernels.routing` makes of the chosen scores
    kept = choices that are not too many for an expert               (`capacity`)
    losses = what uneven loads cost                                  (`balance`)

Every rank holds the matrix whole and applies it to its own tokens. With sequence parallelism and
context parallelism ranks see different tokens and its gradient is partial; without sequence
parallelism the ranks of a tensor-parallel group route the same tokens alike.

Shapes: T tokens of this rank (S positions, this rank's share of them under sequence parallelism, of
B samples), H hidden, E experts, K chosen of each token.
"""

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.core import sharding
from megatron.core.kernels.dtypes import accumulate_dtype
from megatron.core.kernels.routing import REFERENCE, Routes, choose
from megatron.core.mesh import Mesh
from megatron.core.rng import DropoutKey
from megatron.core.sharding import Init
from megatron.core.tensor_parallel.layers import linear, make_parameter
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.context import Context
from megatron.core.transformer.init import inner_init
from megatron.core.transformer.moe import (
    auxiliary_losses,
    capacity,
    expert_bias,
    hashed,
    noise,
    routing,
    sinkhorn,
)
from megatron.core.transformer.moe.expert_bias import Tally
from megatron.core.transformer.moe.router_config import DTYPES, Z_LOSS
from megatron.core.transformer.moe.routing import Routing
from megatron.core.transformer.moe.sharers import Sharers
from megatron.core.transformer.moe.wide_product import wide_product


class Router(nn.Module):
    """Choose experts for each token.

    Args:
        config: the architecture; `RouterConfig` is what routers are made of.
        layer: number in the whole model, from 0.
        mesh: axes and device.
        dtype: of the model's weights.
        num_experts: E.
        sequence_parallel: each tensor-parallel rank routes a share of the positions.
        routes: the op that chooses and weighs.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer: int,
        mesh: Mesh,
        dtype: torch.dtype,
        *,
        num_experts: int,
        sequence_parallel: bool = False,
        routes: Routes = REFERENCE,
    ) -> None:
        super().__init__()
        self.config, self.layer, self.num_experts = config.router, layer, num_experts
        self.routes, self.rule = routes, routing.rule_of(config.router)
        self.mesh, self.dtype, self.weights_dtype = mesh, dtype, accumulate_dtype(dtype)
        self.sharers = Sharers(mesh, sequence_parallel=sequence_parallel)
        wanted = config.router.moe_router_dtype
        finer = getattr(torch, DTYPES[wanted]) if wanted else dtype
        self.product_dtype = torch.promote_types(dtype, finer)
        shape = (num_experts, config.hidden_size)
        record = sharding.whole(
            shape,
            inner_init(config, shape),
            replicated=("tp",),
            summed=("tp",) if sequence_parallel else (),
            matrix=True,
        )
        self.weight = make_parameter(record, shape, mesh, dtype)
        self.by_token_id = layer < config.router.moe_n_hash_layers
        self.expert_bias: nn.Parameter | None = None
        if config.router.moe_router_enable_expert_bias and not self.by_token_id:
            record = sharding.whole((num_experts,), Init(), replicated=("tp",), decay=False)
            self.expert_bias = make_parameter(record, (num_experts,), mesh, self.weights_dtype)
            self.expert_bias.requires_grad_(False)
        self.tally = Tally(num_experts, mesh.device)
        self.global_counts = auxiliary_losses.GlobalCounts(mesh.dp)

    def forward(
        self, x_TH: Tensor, context: Context, shape: tuple[int, int], *, filled: int = 0
    ) -> Routing:
        """Return where the tokens of this rank go.

        Losses are computed where gradients are taken, and loads counted in training; both of valid
        tokens alone. A collective of the ranks that share the microbatch where there are losses,
        a capacity or Sinkhorn's assignment.

        Args:
            x_TH: positions of samples, position-major.
            context: of the microbatch.
            shape: (S, B).
            filled: positions, the last ones of each context-parallel rank, that are no part of the
                microbatch; they are not valid.
        """
        valid_T = None
        if context.valid_SB is not None:
            valid_T = self.sharers.share(context.valid_SB).flatten()
        assert not filled or valid_T is not None, "positions that were added are not valid"
        places = _Places(self.sharers, shape, filled, x_TH.device)
        logits_TE = self._logits(x_TH, context.dropout, places)
        experts_TK, weights_TK = self._choice(logits_TE, valid_T, context)
        limit, kept_TK = self._kept(experts_TK, weights_TK, valid_T, places)
        counts_E = kept_E = routing.count(experts_TK, self.num_experts, valid_T)
        if kept_TK is not None:
            kept_E = routing.count(experts_TK, self.num_experts, valid_T, kept_TK)
        if self.training and context.dropout is not None and self.expert_bias is not None:
            self.tally.add(context.dropout, counts_E)
        return Routing(
            experts_TK=experts_TK,
            weights_TK=weights_TK.to(self.weights_dtype),
            kept_TK=kept_TK,
            losses=self._losses(logits_TE, valid_T, shape[1], context.dropout),
            counts_E=counts_E,
            kept_counts_E=kept_E,
            capacity=limit,
        )

    def _logits(self, x_TH: Tensor, key: DropoutKey | None, places: "_Places") -> Tensor:
        """Return the logits, fp32 or finer."""
        epsilon, place = self.config.moe_input_jitter_eps, f"layers.{self.layer}"
        if epsilon and self.training and key is not None:
            seed = noise.seed_of(key, f"{place}.jitter")
            x_TH = noise.jittered(x_TH, places.numbers_T, epsilon, seed)
        if self.product_dtype == self.dtype:
            logits_TE = linear(x_TH, self.weight, None, self.mesh.alone, False)
            logits_TE = logits_TE.to(self.weights_dtype)
        else:
            logits_TE = wide_product(x_TH, self.weight, self.product_dtype)
        if self.config.moe_router_force_load_balancing:
            seed = noise.seed_of(key, f"{place}.random")
            logits_TE = noise.random_logits(logits_TE, places.numbers_T, seed)
        return logits_TE

    def _choice(
        self, logits_TE: Tensor, valid_T: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor]:
        """Return the chosen experts and their weights."""
        if self.config.is_sinkhorn and not self.by_token_id:
            return self._assigned(logits_TE, valid_T)
        if not self.by_token_id:
            return self.routes.route(logits_TE, self.expert_bias, self.rule)
        assert context.tokens_SB is not None, "routing by token ids needs them on every stage"
        ids_T = self.sharers.share(context.tokens_SB).flatten()
        wanted = (self.layer, self.num_experts, self.config.moe_router_topk)
        experts_TK = hashed.hashed_experts(ids_T, *wanted)
        return experts_TK, self.routes.weigh(logits_TE, experts_TK, self.rule)

    def _assigned(self, logits_TE: Tensor, valid_T: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return experts by Sinkhorn's assignment, in evaluation by score, and their weights."""
        alone = self.config.moe_router_topk == 1
        scores_TE = logits_TE.sigmoid() if alone else logits_TE.softmax(-1)
        by_TE = scores_TE
        if self.training:
            by_TE = sinkhorn.assignment(logits_TE, valid_T, self.sharers)
        experts_TK = choose(by_TE, self.rule)
        return experts_TK, scores_TE.gather(1, experts_TK)

    def _kept(
        self, experts_TK: Tensor, weights_TK: Tensor, valid_T: Tensor | None, places: "_Places"
    ) -> tuple[int | None, Tensor | None]:
        """Return the capacity of an expert and the choices that are kept; None without one."""
        limit = self.config.capacity(places.size, self.num_experts)
        if limit is None:
            return None, None
        numbers_T = places.numbers_T
        late_T = (numbers_T >= places.size).long()
        if valid_T is not None:
            late_T = late_T + ~valid_T
        weights = weights_TK if self.config.moe_token_drop_policy == "probs" else None
        return limit, capacity.kept(experts_TK, weights, late_T, numbers_T, limit, self.sharers)

    def _losses(
        self, logits_TE: Tensor, valid_T: Tensor | None, samples: int, key: DropoutKey | None
    ) -> dict[str, Tensor]:
        """Return the auxiliary losses, in training; of balance none where token ids decide."""
        if not (self.training and torch.is_grad_enabled()):
            return {}
        found = auxiliary_losses.losses(
            logits_TE, self.config, valid_T, samples, self.sharers.total, partial(self._so_far, key)
        )
        if self.by_token_id:
            zero = logits_TE.new_zeros(())
            found = {name: x if name == Z_LOSS else zero for name, x in found.items()}
        return found

    def _so_far(self, key: DropoutKey | None, counts_X: Tensor) -> Tensor:
        assert key is not None, "global_aux_loss goes by the number of the microbatch"
        return self.global_counts.add(key, counts_X)


class _Places(NamedTuple):
    """Where the tokens of this rank stand in their microbatch."""

    sharers: Sharers
    shape: tuple[int, int]
    filled: int
    device: torch.device

    @property
    def numbers_T(self) -> Tensor:
        """Return the number of each token, int64."""
        return self.sharers.tokens(self.shape, self.filled, self.device)

    @property
    def size(self) -> int:
        """Return how many tokens the microbatch has."""
        return self.sharers.size(self.shape, self.filled)


def biased_routers(chunks: Iterable[nn.Module]) -> list[Router]:
    """Return the routers of a rank's chunks that have a bias, in the model's order."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    return [m for m in modules if isinstance(m, Router) and m.expert_bias is not None]


def update_expert_biases(chunks: Iterable[nn.Module]) -> None:
    """Move the biases of all routers of this rank's chunks towards even loads.

    To be called once per iteration, after the last backward, if the optimizer updates the weights:
    those and biases of one iteration belong together. A collective of the ranks with the same
    chunks; nothing where no router has a bias.
    """
    routers = biased_routers(chunks)
    if routers:
        first = routers[0]
        axes = (first.mesh.dp, *first.sharers.axes)
        biases = [router.expert_bias for router in routers if router.expert_bias is not None]
        tallies = [router.tally for router in routers]
        expert_bias.update(tallies, biases, axes, first.config.moe_router_bias_update_rate)
