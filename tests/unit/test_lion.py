"""Lion against its formula, written out."""

import math

import pytest
import torch
from torch import nn

from megatron.core import sharding
from megatron.core.mesh import Mesh
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.optimizer import Optimizer, build_optimizer
from megatron.core.precision.config import PrecisionConfig
from megatron.core.sharding import Init

F64 = PrecisionConfig.resolve(fp64=True)


class Line(nn.Module):
    """A matrix that is decayed and a bias that is not."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.linear = nn.Linear(7, 9, dtype=dtype)
        for parameter in self.parameters():
            shape = tuple(parameter.shape)
            sharding.attach(parameter, sharding.whole(shape, Init(), decay=len(shape) > 1))
        sharding.name_parameters(self)


def lion(model: nn.Module, precision: PrecisionConfig = F64, **fields: object) -> Optimizer:
    config = OptimizerConfig.resolve(optimizer="lion", clip_grad=0.0, **fields)
    return build_optimizer(config, [model], Mesh.serial(), precision)


@pytest.mark.parametrize("decoupled", [True, False])
def test_ten_steps_are_the_formula(decoupled: bool) -> None:
    model = Line()
    optimizer = lion(model, lion_beta1=0.8, lion_beta2=0.6, decoupled_weight_decay=decoupled)
    expected = [p.detach().clone() for p in model.parameters()]
    momenta = [torch.zeros_like(p) for p in expected]
    generator = torch.Generator().manual_seed(1)
    for step in range(10):
        lr, decay = 0.01 * (step + 1), 0.3
        optimizer.zero_grad()
        for i, parameter in enumerate(model.parameters()):
            assert parameter.grad is not None
            parameter.grad.copy_(torch.randn(parameter.shape, generator=generator).double())
            g, p, m = parameter.grad * 0.5, expected[i], momenta[i]
            wd = decay if p.dim() > 1 else 0.0
            if not decoupled:
                g = g + wd * p
            sign = (0.8 * m + 0.2 * g).sign()
            expected[i] = p * (1 - lr * wd * decoupled) - lr * sign
            momenta[i] = 0.6 * m + 0.4 * g
        optimizer.step(0.5, lr=lr, weight_decay=decay)
        for mine, its in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(mine.detach(), its, rtol=1e-13, atol=1e-14)
    states = {t.key: t.tensor for t in optimizer.tensors()}
    for (name, p), m in zip(model.named_parameters(), momenta, strict=True):
        held = states[f"optimizer.exp_avg.{name}"].view_as(p)
        torch.testing.assert_close(held, m, rtol=1e-13, atol=1e-14)
    assert len(states) == 2  # one number for each weight


def test_a_weight_without_gradient_does_not_move() -> None:
    model = Line()
    before = model.linear.bias.detach().clone()
    optimizer = lion(model)
    optimizer.zero_grad()
    optimizer.step(1.0, lr=0.1, weight_decay=0.5)
    assert torch.equal(model.linear.bias, before)


def test_states_may_be_coarse() -> None:
    """The moment rounds to bfloat16 after each step; the step itself is made in fp32."""
    model = Line(torch.float32)
    precision = PrecisionConfig.resolve(use_precision_aware_optimizer=True, exp_avg_dtype="bf16")
    optimizer = lion(model, precision)
    optimizer.zero_grad()
    grad = model.linear.weight.grad
    assert grad is not None
    grad.copy_(torch.linspace(-1, 1, 63).view(9, 7))
    before, moment = model.linear.weight.detach().clone(), (grad * (1 - 0.98)).bfloat16()
    optimizer.step(1.0, lr=0.1, weight_decay=0.0)
    held = next(t.tensor for t in optimizer.tensors() if t.key.endswith("linear.weight"))
    assert held.dtype == torch.bfloat16
    torch.testing.assert_close(held.view(9, 7), moment, rtol=2**-7, atol=0)
    torch.testing.assert_close(model.linear.weight.detach(), before - 0.1 * grad.sign())


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    model = Line()
    optimizer = lion(model)
    optimizer.zero_grad()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(1.0)
    optimizer.step(1.0, lr=0.1, weight_decay=0.1)
    kept = [t.tensor.clone() for t in optimizer.tensors()]
    kept += [p.detach().clone() for p in model.parameters()]
    assert model.linear.bias.grad is not None
    model.linear.bias.grad[0] = math.nan
    assert not optimizer.step(1.0, lr=0.1, weight_decay=0.1).updated
    now = [t.tensor for t in optimizer.tensors()] + [p.detach() for p in model.parameters()]
    assert all(map(torch.equal, kept, now))
