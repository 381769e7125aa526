"""A layer of experts waits for the device once: it reads how many rows go where.

A copy to ``meta`` stands for one to a GPU: it computes nothing, and is asked for in the same way.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.core.kernels import grouped
from megatron.core.mesh import Mesh
from megatron.core.transformer.context import Context
from megatron.core.transformer.moe.hashed import hashed_experts
from megatron.core.transformer.moe.padding import padded
from megatron.core.transformer.moe.sharers import Sharers
from tests.host_reads import Copies, reading
from tests.unit.test_moe import config_of, inputs, layer_of

META = torch.device("meta")


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"moe_permute_fusion": True, "moe_router_fusion": True},
        {"moe_shared_expert_intermediate_size": 4, "moe_latent_size": 4},
        {
            "moe_router_load_balancing_type": ("none",),
            "moe_expert_capacity_factor": 1.0,
            "moe_pad_expert_input_to_capacity": True,
        },
    ],
)
def test_a_layer_reads_one_tensor_forward_and_backward(choices: dict[str, object]) -> None:
    layer, x_SBH = layer_of(config_of(**choices)), inputs()
    with reading() as reads:
        layer(x_SBH, Context()).sum().backward()
    assert reads == ["tolist"]
    assert x_SBH.grad is not None


def ends() -> Tensor:
    return grouped._ends([2, 0, 3], META)


def filled() -> Tensor:
    return padded(lambda x_NH, sizes: x_NH, 4)(torch.empty(5, 2, device=META), [2, 0, 3])


def numbers() -> Tensor:
    return Sharers(Mesh.serial(), sequence_parallel=False).tokens((4, 2), 0, META)


def hashed() -> Tensor:
    return hashed_experts(torch.empty(5, dtype=torch.int64, device=META), 0, 8, 2)


@pytest.mark.parametrize("make", [ends, filled, numbers, hashed])
def test_what_the_host_knows_travels_without_a_wait(make: Callable[[], Tensor]) -> None:
    with Copies() as copies:
        assert make().device == META
    assert copies.awaited == 0 and copies.all == 1
