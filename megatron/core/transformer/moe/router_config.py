"""How tokens are routed to experts, and how the experts' load is kept even."""

import math
from typing import Literal

from megatron.core.config import (
    Config,
    as_words,
    check_above,
    check_at_least,
    check_not_zero,
    option,
    specs,
)
from megatron.core.utils import UserError, divisors

LOSS_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Kinds of balancing that are losses, and their names in logs."""
Z_LOSS = "z_loss"
DTYPES = {"fp32": "float32", "fp64": "float64"}
"""Values of --moe-router-dtype, and torch's names of them."""


class RouterConfig(Config):
    """The router of an expert layer."""

    moe_router_topk: int = option(2)
    """Experts of each token."""

    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = option("softmax")
    """How a router's logits become scores."""

    moe_router_pre_softmax: bool = option(False)
    """Take the softmax over all experts and then the best, instead of that of the best."""

    moe_router_num_groups: int | None = option(None)
    """Groups of experts, of which a token may use some."""

    moe_router_group_topk: int | None = option(None)
    """Groups that a token may use."""

    moe_router_topk_scaling_factor: float | None = option(None)
    """Factor on the weights of a token's experts."""

    moe_router_dtype: Literal["fp32", "fp64"] | None = option(None)
    """Precision of the router's product and scores; when absent the product has the model's, and
    scores have fp32 at least."""

    moe_router_load_balancing_type: tuple[
        Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"], ...
    ] = option(("aux_loss",))
    """How the experts' load is evened out: losses over the microbatch, over each of its samples or
    over the global batch so far, or an assignment by Sinkhorn's algorithm."""

    moe_aux_loss_coeff: tuple[float, ...] = option((0.0,))
    """Weights of these losses, one for each."""

    moe_z_loss_coeff: float | None = option(None)
    """Weight of the z-loss, which keeps a router's logits small (Zoph et al., 2022)."""

    moe_input_jitter_eps: float | None = option(None)
    """Multiply a router's input by random factors within this of 1 (Fedus et al., 2021)."""

    moe_router_enable_expert_bias: bool = option(False)
    """Balance without a loss: choose experts by score plus a bias, which falls for those that many
    tokens chose (Wang et al., 2024)."""

    moe_router_bias_update_rate: float = option(1e-3)
    """What that bias rises or falls by in an iteration."""

    moe_router_force_load_balancing: bool = option(False)
    """Route by random logits, for measurements of speed."""

    moe_expert_capacity_factor: float | None = option(None)
    """Tokens that an expert takes at most, over an even share of them; what is more is dropped. As
    in Megatron-LM a negative factor is none."""

    moe_pad_expert_input_to_capacity: bool = option(False)
    """Let every expert work on as many rows as it may take, zeros among them; the results are the
    same, and shapes do not depend on the routes."""

    moe_token_drop_policy: Literal["probs", "position"] = option("probs")
    """Which choices a full expert drops: those of the smallest weights, or the last ones."""

    moe_n_hash_layers: int = option(0)
    """Layers, of the first ones, whose experts follow from the token's id by a table; dense ones
    among them count."""

    moe_router_fusion: bool = option(False)
    """Choose and weigh a token's experts in one kernel; its backward keeps less."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk")
        check_at_least(self, 0, "moe_z_loss_coeff", "moe_router_bias_update_rate")
        check_at_least(self, 0, "moe_n_hash_layers")
        check_above(self, 0, "moe_router_topk_scaling_factor")
        check_not_zero(self, "moe_expert_capacity_factor")
        jitter = self.moe_input_jitter_eps
        if jitter is not None and not 0 <= jitter < 1:
            raise UserError(f"--moe-input-jitter-eps ({jitter}) must lie in [0, 1)")
        self._check_scores()
        self._check_groups()
        self._check_balancing()
        if self.moe_pad_expert_input_to_capacity and self.capacity_factor is None:
            raise UserError(
                "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor, such as 1.0"
            )

    def _check_scores(self) -> None:
        softmax = self.moe_router_score_function == "softmax"
        if self.moe_router_enable_expert_bias and softmax:
            raise UserError(
                "--moe-router-enable-expert-bias is for --moe-router-score-function sigmoid or "
                "sqrtsoftplus, not softmax"
            )
        after = softmax and not self.moe_router_pre_softmax
        if self.moe_router_topk == 1 and after and not self.is_sinkhorn:
            raise UserError(
                "--moe-router-topk 1 needs --moe-router-pre-softmax: the softmax of one logit is 1 "
                "whatever it is, and the router would not learn"
            )

    def _check_groups(self) -> None:
        groups, taken = self.moe_router_num_groups, self.moe_router_group_topk
        if groups is None and taken is None:
            return
        if groups is None or taken is None:
            given, missing = "--moe-router-num-groups", "--moe-router-group-topk"
            if groups is None:
                given, missing = missing, given
            raise UserError(f"{given} needs {missing}; give both or none")
        if taken > groups:
            raise UserError(
                f"--moe-router-group-topk ({taken}) must not exceed --moe-router-num-groups "
                f"({groups})"
            )
        if self.moe_router_topk % taken:
            raise UserError(
                f"--moe-router-topk ({self.moe_router_topk}) must be a multiple of "
                f"--moe-router-group-topk ({taken}): a group is judged by the best of its experts, "
                "as many as it would give"
            )

    def _check_balancing(self) -> None:
        kinds, weights = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        listed, numbers = as_words(kinds), as_words(weights)
        if not kinds or len(set(kinds)) < len(kinds):
            raise UserError(f"--moe-router-load-balancing-type ({listed}): name each kind once")
        for kind in ("sinkhorn", "none"):
            if kind in kinds and len(kinds) > 1:
                raise UserError(
                    f"--moe-router-load-balancing-type ({listed}): {kind} stands alone; drop it or "
                    "the others"
                )
        if kinds[0] not in LOSS_NAMES and any(weights):
            raise UserError(
                f"--moe-aux-loss-coeff ({numbers}) does not go with "
                f"--moe-router-load-balancing-type {kinds[0]}, which has no loss; drop it"
            )
        if len(weights) != len(kinds):
            example = as_words([weights[0] if weights else 0.01] * len(kinds))
            raise UserError(
                f"--moe-aux-loss-coeff ({numbers}) must give one number for each of "
                f"--moe-router-load-balancing-type ({listed}), such as --moe-aux-loss-coeff "
                f"{example}, or name as many kinds ({as_words(tuple(LOSS_NAMES))})"
            )
        if any(not weight >= 0 for weight in weights):
            raise UserError(f"--moe-aux-loss-coeff ({numbers}) must not be negative")
        if self.is_sinkhorn:
            self._check_sinkhorn()

    def _check_sinkhorn(self) -> None:
        excluded = {
            "--moe-expert-capacity-factor": self.capacity_factor is not None,
            "--moe-router-num-groups": self.moe_router_num_groups is not None,
            "--moe-router-enable-expert-bias": self.moe_router_enable_expert_bias,
            "--moe-router-pre-softmax": self.moe_router_pre_softmax,
            "--moe-router-topk-scaling-factor": self.moe_router_topk_scaling_factor is not None,
            "--moe-router-fusion": self.moe_router_fusion,
            f"--moe-router-score-function {self.moe_router_score_function}": (
                self.moe_router_score_function != "softmax"
            ),
        }
        for flag, given in excluded.items():
            if given:
                raise UserError(
                    f"--moe-router-load-balancing-type sinkhorn and {flag} exclude each other; "
                    "drop one"
                )
        if self.moe_router_topk == 1 and self.moe_n_hash_layers:
            raise UserError(
                f"--moe-n-hash-layers ({self.moe_n_hash_layers}) does not go with "
                "--moe-router-load-balancing-type sinkhorn and --moe-router-topk 1: a layer whose "
                "experts follow from the token's id weighs them by the softmax of the chosen, "
                "which is 1 of one, and its router would not learn; drop --moe-n-hash-layers, or "
                "give --moe-router-topk 2 or another kind of balancing"
            )

    @property
    def is_sinkhorn(self) -> bool:
        """Experts are assigned by Sinkhorn's algorithm."""
        return self.moe_router_load_balancing_type == ("sinkhorn",)

    @property
    def capacity_factor(self) -> float | None:
        """Return the factor of an expert's capacity; None without a limit."""
        factor = self.moe_expert_capacity_factor
        return None if factor is None or factor < 0 else factor

    def capacity(self, tokens: int, num_experts: int) -> int | None:
        """Return how many of a microbatch's ``tokens`` an expert takes; None without a limit.

        ceil(min(factor * tokens * K / E, tokens)), Fedus et al., 2021, eq. 3, for K choices.
        """
        factor = self.capacity_factor
        if factor is None:
            return None
        return math.ceil(min(tokens, tokens * self.moe_router_topk / num_experts * factor))

    @property
    def loss_weights(self) -> dict[str, float]:
        """Return the weight of each auxiliary loss, by the name that logs have for it."""
        pairs = zip(self.moe_router_load_balancing_type, self.moe_aux_loss_coeff, strict=True)
        weights = {LOSS_NAMES[kind]: weight for kind, weight in pairs if weight}
        if self.moe_z_loss_coeff:
            weights[Z_LOSS] = self.moe_z_loss_coeff
        return weights

    def check_experts(self, num_experts: int) -> None:
        """Refuse a number of experts that cannot be routed to.

        Raises:
            UserError: there are fewer than a token takes, or they cannot be grouped.
        """
        topk, groups = self.moe_router_topk, self.moe_router_num_groups
        if topk > num_experts:
            default = ", the default" * (topk == specs(RouterConfig)["moe_router_topk"].default)
            way_out = f"give --moe-router-topk {num_experts}"
            if num_experts == 1 and self.moe_router_score_function == "softmax":
                way_out += " with --moe-router-pre-softmax"
            raise UserError(
                f"--moe-router-topk ({topk}{default}) must not exceed --num-experts "
                f"({num_experts}); {way_out}, or more experts"
            )
        if groups is None or self.moe_router_group_topk is None:
            return
        if num_experts % groups:
            choices = as_words(divisors(num_experts))
            raise UserError(
                f"--num-experts ({num_experts}) must be a multiple of --moe-router-num-groups "
                f"({groups}); groups may be {choices}"
            )
        if topk // self.moe_router_group_topk > num_experts // groups:
            raise UserError(
                f"--moe-router-topk ({topk}) takes {topk // self.moe_router_group_topk} experts of "
                f"each of --moe-router-group-topk ({self.moe_router_group_topk}) groups, which "
                f"have {num_experts // groups}; raise --moe-router-group-topk"
            )
