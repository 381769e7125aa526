"""Rules of --moe-use-upcycling: with which routers experts give what their dense MLP gave.

Outputs are equal if the weights of a token's experts have the same sum for every token, and if a
token visits all slices of a copy with equal weights (`checkpoints.upcycling`):

    router                          sum of weights              slices of a copy
    softmax of the chosen           1                           G | K
    sigmoid, sqrt-softplus, K > 1   1                           G | K
    the same, K = 1                 the score: refused
    softmax before the choice       depends on the token: refused, unless all are chosen
    Sinkhorn                        depends on the token: refused
    groups of experts               as above                    and G | experts of a group
    choice by token id, or forced   as above                    by no score: G = 1
    experts with a capacity         less where one is dropped: a warning, unless none can be

Slices stay together since of equal scores those of the first experts are taken
(`kernels.routing.best`).
A factor on weights is made up for. What comes beside the experts' sum, shared experts and latents,
has no part of a dense MLP that it could start from.
"""

from megatron.core.utils import UserError
from megatron.training.config import RunConfig
from megatron.training.layout_rules import Origins, Rule


def upcycling_gives_equal_outputs(config: RunConfig, origins: Origins) -> None:
    """Experts made of dense MLPs give the same outputs at the start."""
    checkpoint, moe = config.checkpoint, config.model.moe
    if not checkpoint.moe_use_upcycling:
        return
    if moe.num_experts is None:
        raise UserError("--moe-use-upcycling makes experts; give --num-experts, or drop it")
    if checkpoint.load is None and checkpoint.pretrained_checkpoint is None:
        raise UserError(
            "--moe-use-upcycling needs a dense checkpoint; name its folder by --load, or by "
            "--pretrained-checkpoint"
        )
    for flag, value in (
        ("--moe-shared-expert-intermediate-size", moe.moe_shared_expert_intermediate_size),
        ("--moe-latent-size", moe.moe_latent_size),
    ):
        if value is not None:
            raise UserError(
                f"--moe-use-upcycling and {flag} ({value}) exclude each other: outputs would not "
                f"be those of the dense checkpoint; leave {flag} out"
            )
    _weights_have_one_sum(config)
    if checkpoint.moe_upcycling_granularity > 1:
        _slices_have_a_width(config, origins)
        _slices_stay_together(config)


def warn_of_dropped_choices(config: RunConfig) -> list[str]:
    """Say that full experts take their share of outputs away from the tokens that they drop."""
    router, experts = config.model.router, config.model.moe.num_experts
    factor, topk = router.capacity_factor, router.moe_router_topk
    if not config.checkpoint.moe_use_upcycling or factor is None or experts is None:
        return []
    if factor * topk >= experts:  # room for every token of a microbatch
        return []
    return [
        f"warning: --moe-use-upcycling with --moe-expert-capacity-factor {factor:g}: where an "
        "expert is full, outputs at the start are not those of the dense checkpoint, since a "
        f"choice that is dropped adds nothing; {experts / topk:g} or more (--num-experts / "
        "--moe-router-topk) drops none"
    ]


def _weights_have_one_sum(config: RunConfig) -> None:
    router, experts = config.model.router, config.model.moe.num_experts
    topk, depends = router.moe_router_topk, "--moe-use-upcycling: the weights of a token's experts"
    if router.is_sinkhorn:
        raise UserError(
            f"{depends} have no fixed sum with --moe-router-load-balancing-type sinkhorn; choose "
            "aux_loss, seq_aux_loss, global_aux_loss or none"
        )
    if router.moe_router_pre_softmax and topk != experts:
        raise UserError(
            f"{depends} have no fixed sum with --moe-router-pre-softmax, so that no factor makes "
            "outputs those of the dense checkpoint; leave it out, with --moe-router-topk of at "
            "least 2"
        )
    if router.moe_router_score_function != "softmax" and topk == 1:
        raise UserError(
            f"{depends} have no fixed sum with --moe-router-topk 1 and --moe-router-score-function "
            f"{router.moe_router_score_function}; give a --moe-router-topk of at least 2"
        )


def _slices_have_a_width(config: RunConfig, origins: Origins) -> None:
    slices, width = config.checkpoint.moe_upcycling_granularity, config.model.mlp.ffn_hidden_size
    origin = origins["ffn_hidden_size"]
    if origins["moe_ffn_hidden_size"] == "derived":
        raise UserError(
            f"--moe-upcycling-granularity ({slices}): an expert is one of {slices} slices of a "
            "dense MLP; give --moe-ffn-hidden-size, the dense width by that number: "
            f"{width // slices} if --ffn-hidden-size ({width}, {origin}) is the dense one"
        )


def _slices_stay_together(config: RunConfig) -> None:
    router, experts = config.model.router, config.model.moe.num_experts
    slices, groups = config.checkpoint.moe_upcycling_granularity, router.moe_router_num_groups
    assert experts is not None, "a model without experts"
    numbers = [("--num-experts", experts), ("--moe-router-topk", router.moe_router_topk)]
    if groups is not None:
        numbers.append(("--num-experts / --moe-router-num-groups", experts // groups))
    for name, number in numbers:
        if number % slices:
            raise UserError(
                f"--moe-upcycling-granularity ({slices}): a token visits all {slices} slices of a "
                f"dense MLP, or none, so {name} ({number}) must be a multiple of it"
            )
    for flag, given in (
        ("--moe-n-hash-layers", router.moe_n_hash_layers),
        ("--moe-router-force-load-balancing", router.moe_router_force_load_balancing),
    ):
        if given:
            raise UserError(
                f"--moe-upcycling-granularity ({slices}) and {flag} exclude each other: slices of "
                "a dense MLP stay together by equal scores; drop one of them"
            )


UPCYCLING_RULES: tuple[Rule, ...] = (upcycling_gives_equal_outputs,)
