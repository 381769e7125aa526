"""Every update rule on CUDA against the same steps in float64 on the CPU, where tests know it."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megatron.core import sharding
from megatron.core.mesh import Mesh
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.offload import HostShard
from megatron.core.optimizer.optimizer import Optimizer, build_optimizer
from megatron.core.precision.config import PrecisionConfig
from megatron.core.sharding import Init
from tests.gpu import needs
from tests.gpu.needs import DEVICE, far

pytestmark = needs.CUDA

RULES = {
    "adam": {"adam_beta2": 0.95, "adam_eps": 1e-5},
    "adam, L2": {"decoupled_weight_decay": False, "adam_eps": 1e-5},
    "sgd": {"optimizer": "sgd"},
    "lion": {"optimizer": "lion"},
    "muon": {"optimizer": "muon", "muon_nesterov": True, "muon_fp32_matmul_prec": "high"},
    "muon in bfloat16": {"optimizer": "muon"},
}
F64 = PrecisionConfig.resolve(fp64=True)
PRECISIONS = {
    "fp64": (F64, 1e-11),
    "fp32": (PrecisionConfig.resolve(), 1e-4),
}


class Weights(nn.Module):
    """A fused matrix, a plain one, and a vector."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, shape in (("fused", (48, 40)), ("plain", (33, 65)), ("vector", (129,))):
            values = torch.randn(shape, generator=generator).to(device, dtype)
            is_matrix = len(shape) > 1
            record = sharding.whole(shape, Init(), decay=is_matrix, matrix=is_matrix)
            if name == "fused":
                record = replace(record, fused=(("query", 8), ("key", 4), ("value", 4)))
            self.register_parameter(name, sharding.attach(nn.Parameter(values), record))
        sharding.name_parameters(self)


def made(
    device: torch.device, precision: PrecisionConfig, fields: dict[str, object]
) -> tuple[Weights, Optimizer]:
    model = Weights(device, getattr(torch, precision.params_dtype))
    config = OptimizerConfig.resolve(**fields)
    return model, build_optimizer(config, [model], Mesh.serial(device), precision)


def train(model: Weights, optimizer: Optimizer, spoiled: int | None = None) -> Tensor:
    """Take four steps with gradients of their own; return all weights."""
    generator = torch.Generator().manual_seed(5)
    for step in range(4):
        optimizer.zero_grad()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.copy_(torch.randn(parameter.shape, generator=generator))
        if step == spoiled:
            model.vector.grad[7] = math.nan
        optimizer.step(0.5, lr=0.02, weight_decay=0.1)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("rule", RULES)
def test_steps_are_those_of_the_cpu_in_float64(rule: str, precision: str) -> None:
    fields, (config, bound) = RULES[rule], PRECISIONS[precision]
    want = train(*made(torch.device("cpu"), F64, fields))
    start = Weights(torch.device("cpu"), torch.float64)
    before = torch.cat([parameter.detach().flatten() for parameter in start.parameters()])
    got = train(*made(DEVICE, config, fields)).cpu().double()
    if rule == "muon in bfloat16" and precision == "fp32":
        bound = 0.03
    assert far(got - before, want - before) <= bound


def test_moments_with_scales_are_those_of_the_cpu() -> None:
    """On both they are fp16's 11 bits of the same numbers, but for a last bit of fp32's."""
    scaled = PrecisionConfig.resolve(
        use_precision_aware_optimizer=True, exp_avg_dtype="fp16", exp_avg_sq_dtype="fp16"
    )
    found = []
    for device in (torch.device("cpu"), DEVICE):
        model, optimizer = made(device, scaled, RULES["adam"])
        train(model, optimizer)
        found.append({state.key: state.values().cpu() for state in optimizer.tensors()})
    for key, want in found[0].items():
        torch.testing.assert_close(found[1][key], want, rtol=4 * 2**-11, atol=1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_a_gradient_that_is_not_finite_leaves_all_alone(rule: str) -> None:
    """Three steps of four: the one that is left out has left no trace in weights or states."""
    model, optimizer = made(DEVICE, PRECISIONS["fp32"][0], RULES[rule])
    train(model, optimizer, spoiled=3)
    kept = [state.tensor.clone() for state in optimizer.tensors()]
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    assert optimizer.scalars()["step"] == 3
    optimizer.zero_grad()
    model.plain.grad[0, 0] = math.inf
    assert not optimizer.step(1.0, lr=1.0, weight_decay=1.0).updated
    assert all(map(torch.equal, kept, (state.tensor for state in optimizer.tensors())))
    assert all(map(torch.equal, weights, model.parameters()))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_travels_from_and_to_the_host_is_pinned(precision: str) -> None:
    """In one piece each way; the weights are those of the same steps on the CPU alone."""
    config = PrecisionConfig.resolve(bf16=precision == "bf16")
    fields: dict[str, object] = {
        "optimizer_cpu_offload": True,
        "overlap_cpu_optimizer_d2h_h2d": True,
        "clip_grad": 0.0,
    }
    model, optimizer = made(DEVICE, config, fields)
    (shard,) = optimizer.shards
    assert isinstance(shard, HostShard)
    found = train(model, optimizer).cpu()
    for pieces in (shard._host_grads, shard._rounded):
        assert all(piece.is_pinned() for piece in pieces)
    assert torch.equal(found, train(*made(torch.device("cpu"), config, fields)))
