"""Which settings of a router go together."""

import pytest

from megatron.core.transformer.moe.router_config import RouterConfig
from megatron.core.utils import UserError

SIGMOID = {"moe_router_score_function": "sigmoid"}
BIAS = {"moe_router_enable_expert_bias": True}
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4}


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"moe_router_topk": 0}, "--moe-router-topk (0) must be at least 1"),
        ({"moe_router_topk": 1}, "--moe-router-pre-softmax"),
        (BIAS, "sigmoid or sqrtsoftplus, not softmax"),
        ({"moe_router_num_groups": 2}, "needs --moe-router-group-topk"),
        ({"moe_router_group_topk": 2}, "needs --moe-router-num-groups"),
        ({"moe_router_num_groups": 2, "moe_router_group_topk": 4}, "must not exceed"),
        (
            {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 3},
            "multiple of --moe-router-group-topk (2)",
        ),
        ({"moe_router_load_balancing_type": ("aux_loss", "aux_loss")}, "name each kind once"),
        ({"moe_router_load_balancing_type": ("none", "aux_loss")}, "none stands alone"),
        ({"moe_aux_loss_coeff": (0.1, 0.2)}, "(0.1 0.2) must give one number for each"),
        ({"moe_aux_loss_coeff": (0.1, 0.2)}, "such as --moe-aux-loss-coeff 0.1, or name"),
        (
            {
                "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"),
                "moe_aux_loss_coeff": (0.1,),
            },
            "such as --moe-aux-loss-coeff 0.1 0.1, or name",
        ),
        ({"moe_aux_loss_coeff": (-0.1,)}, "must not be negative"),
        (
            {"moe_router_load_balancing_type": ("none",), "moe_aux_loss_coeff": (0.1,)},
            "has no loss",
        ),
        (
            {"moe_router_load_balancing_type": ("sinkhorn",), "moe_expert_capacity_factor": 1.0},
            "sinkhorn and --moe-expert-capacity-factor",
        ),
        (
            {"moe_router_load_balancing_type": ("sinkhorn",), "moe_router_fusion": True},
            "sinkhorn and --moe-router-fusion",
        ),
        (
            {
                "moe_router_load_balancing_type": ("sinkhorn",),
                "moe_router_topk": 1,
                "moe_n_hash_layers": 1,
            },
            "--moe-n-hash-layers (1) does not go with --moe-router-load-balancing-type sinkhorn",
        ),
        ({"moe_pad_expert_input_to_capacity": True}, "needs --moe-expert-capacity-factor"),
        ({"moe_input_jitter_eps": 1.0}, "must lie in [0, 1)"),
        ({"moe_expert_capacity_factor": 0.0}, "must not be zero"),
    ],
)
def test_refused(choices: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as caught:
        RouterConfig.resolve(**choices)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("choices", "experts", "words"),
    [
        ({"moe_router_topk": 3}, 2, "--moe-router-topk (3) must not exceed --num-experts (2)"),
        (
            {},
            1,
            "(2, the default) must not exceed --num-experts (1); give --moe-router-topk 1 with",
        ),
        (
            {"moe_router_topk": 6},
            4,
            "--moe-router-topk (6) must not exceed --num-experts (4); give --moe-router-topk 4, or",
        ),
        (GROUPS, 6, "--num-experts (6) must be a multiple of --moe-router-num-groups (4)"),
        (
            {"moe_router_num_groups": 4, "moe_router_group_topk": 1, "moe_router_topk": 4},
            8,
            "raise --moe-router-group-topk",
        ),
    ],
)
def test_experts_fit_the_router(choices: dict[str, object], experts: int, words: str) -> None:
    with pytest.raises(UserError) as caught:
        RouterConfig.resolve(**choices).check_experts(experts)
    assert words in str(caught.value)
    RouterConfig.resolve(**GROUPS).check_experts(8)


def test_names_of_losses() -> None:
    config = RouterConfig.resolve(
        moe_router_load_balancing_type=("aux_loss", "seq_aux_loss", "global_aux_loss"),
        moe_aux_loss_coeff=(0.3, 0.0, 0.7),
        moe_z_loss_coeff=0.1,
    )
    assert config.loss_weights == {
        "load_balancing_loss": 0.3,
        "global_load_balancing_loss": 0.7,
        "z_loss": 0.1,
    }
    assert RouterConfig.resolve().loss_weights == {}


def test_a_negative_capacity_is_none() -> None:
    assert RouterConfig.resolve(moe_expert_capacity_factor=-1.0).capacity_factor is None
    assert RouterConfig.resolve(moe_expert_capacity_factor=1.5).capacity_factor == 1.5
