"""Gradient norm, clipping and what happens to gradients that are not finite."""

import math

import pytest
import torch
from torch import Tensor, nn

from megatron.core import sharding
from megatron.core.mesh import Axis, Mesh
from megatron.core.optimizer import clip
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.optimizer import Optimizer, build_optimizer
from megatron.core.precision.config import PrecisionConfig
from megatron.core.sharding import Init, Region, Sharding

CPU = torch.device("cpu")


class Weights(nn.Module):
    """A padded vocabulary, a matrix and a bias; gradients are set by hand."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Parameter(torch.randn(8, 3).to(dtype))
        region = Region(((0, 5), (0, 3)), ((0, 5), (0, 3)))
        sharding.attach(self.table, Sharding((5, 3), (region,), Init()))
        self.matrix = nn.Parameter(torch.randn(90, 100).to(dtype))
        sharding.attach(self.matrix, sharding.whole((90, 100), Init()))
        self.bias = nn.Parameter(torch.randn(7).to(dtype))
        sharding.attach(self.bias, sharding.whole((7,), Init(), replicated=("tp",), decay=False))
        with torch.no_grad():
            self.table[5:] = 0
        sharding.name_parameters(self)


def make(
    dtype: torch.dtype = torch.float32, mesh: Mesh | None = None, **fields: object
) -> tuple[Weights, Optimizer]:
    model = Weights(dtype)
    flags = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
    precision = PrecisionConfig.resolve(**{flags[dtype]: True} if dtype in flags else {})
    config = OptimizerConfig(**fields)
    return model, build_optimizer(config, [model], mesh or Mesh.serial(), precision)


def set_gradients(model: Weights, scale: float = 1.0) -> list[Tensor]:
    """Fill the gradients of real elements and return them, as one gathers them."""
    generator = torch.Generator().manual_seed(5)
    gathered = []
    for parameter in (model.table[:5], model.matrix, model.bias):
        gathered.append(torch.randn(parameter.shape, generator=generator) * scale)
    assert model.table.grad is not None
    for grad, value in zip(
        (model.table.grad[:5], model.matrix.grad, model.bias.grad), gathered, strict=True
    ):
        assert grad is not None
        grad.copy_(value)
    return gathered


def norm_of(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float((t.double() ** 2).sum()) for t in tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_norm_equals_the_norm_of_the_gathered_gradients(dtype: torch.dtype) -> None:
    model, optimizer = make(dtype)
    gathered = set_gradients(model)
    result = optimizer.step(0.25, lr=0.0, weight_decay=0.0)
    assert result.grad_norm.item() == pytest.approx(0.25 * norm_of(gathered), rel=1e-7)


@pytest.mark.parametrize("on_host", [0.0, 0.4])
def test_norms_of_groups_are_those_of_their_gathered_gradients(on_host: float) -> None:
    """Rows that pad the table lie between two groups' parameters, and count in neither."""
    offload = {"optimizer_cpu_offload": on_host > 0, "optimizer_offload_fraction": on_host}
    model, optimizer = make(torch.float64, clip_grad=0.0, **offload)
    table, matrix, bias = set_gradients(model)
    assert model.table.grad is not None and model.bias.grad is not None
    model.table.grad[6] = 100.0
    norms = optimizer.norms.by_group(0.25)
    assert norms["decay"].item() == pytest.approx(0.25 * norm_of([table, matrix]), rel=1e-12)
    assert norms["no_decay"].item() == pytest.approx(0.25 * norm_of([bias]), rel=1e-12)
    assert list(norms) == ["decay", "no_decay"]
    model.bias.grad[0] = math.nan
    norms = optimizer.norms.by_group(1.0)
    assert norms["decay"].isfinite() and norms["no_decay"].isnan()


def test_norm_keeps_its_digits_over_millions_of_elements() -> None:
    """A plain fp32 reduction of these is off by 1e-4 or more."""
    x = torch.randn(3_000_001, generator=torch.Generator().manual_seed(2)) + 1
    exact = float((x.double() ** 2).sum())
    assert clip.sum_of_squares([x], CPU).item() == pytest.approx(exact, rel=1e-7)


def test_rows_of_padding_count_neither_as_norm_nor_as_zeros() -> None:
    model, optimizer = make(clip_grad=0.0)
    gathered = set_gradients(model)
    assert model.table.grad is not None and model.matrix.grad is not None
    model.matrix.grad[0, :4] = 0
    model.table.grad[6] = 100.0  # a bug elsewhere may not move the norm
    gathered[1][0, :4] = 0
    result = optimizer.step(1.0, lr=0.0, weight_decay=0.0, count_zeros=True)
    assert result.grad_norm.item() == pytest.approx(norm_of(gathered), rel=1e-7)
    assert result.num_zeros is not None and result.num_zeros.item() == 4


@pytest.mark.parametrize(("axis", "counted"), [("tp", [0, 1]), ("dp_cp", [])])
def test_a_replica_counts_nothing_that_another_owns(axis: str, counted: list[int]) -> None:
    """What coordinate 1 contributes to the sum over the world (here it is alone in it)."""
    axes = {**Mesh.serial().axes, axis: Axis(axis, (0, 1), 1, None)}
    model, optimizer = make(mesh=Mesh(axes, 1, CPU), clip_grad=0.0)
    gathered = set_gradients(model)
    result = optimizer.step(1.0, lr=0.0, weight_decay=0.0)
    assert result.grad_norm.item() == pytest.approx(norm_of([gathered[i] for i in counted]))


def test_params_norm_covers_every_weight() -> None:
    model, optimizer = make()
    expected = norm_of([model.table[:5].detach(), model.matrix.detach(), model.bias.detach()])
    assert optimizer.norms.weights().item() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_opt_02_a_non_finite_gradient_changes_nothing(
    bad: float, dtype: torch.dtype, name: str
) -> None:
    model, optimizer = make(dtype, optimizer=name)
    set_gradients(model)
    optimizer.step(1.0, lr=0.1, weight_decay=0.1)
    weights = [p.detach().clone() for p in model.parameters()]
    states = [t.tensor.clone() for t in optimizer.tensors()]
    set_gradients(model)
    assert model.matrix.grad is not None
    model.matrix.grad[3, 4] = bad
    result = optimizer.step(1.0, lr=0.1, weight_decay=0.1)
    assert not result.updated and result.found_nonfinite.item() == 1
    assert not math.isfinite(result.grad_norm.item())
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    held = [t.tensor for t in optimizer.tensors()]
    assert all(torch.equal(h, s) for h, s in zip(held, states, strict=True))
    assert optimizer.scalars()["step"] == 1
    assert (~model.matrix.grad.isfinite()).sum() == 1, "the element to blame can still be found"
    optimizer.zero_grad()
    set_gradients(model)
    assert optimizer.step(1.0, lr=0.1, weight_decay=0.1).updated
    assert optimizer.scalars()["step"] == 2
    assert all(p.isfinite().all() for p in model.parameters())


def test_opt_03_a_gradient_of_zeros_is_legal() -> None:
    """No sentinel, no assertion: momentum goes on, and its direction does not flip."""
    model, optimizer = make(dtype=torch.float64)
    gathered = set_gradients(model)
    optimizer.step(1.0, lr=0.01, weight_decay=0.0)
    before = model.matrix.detach().clone()
    optimizer.zero_grad()
    result = optimizer.step(1.0, lr=0.01, weight_decay=0.0)
    assert result.updated and result.grad_norm.item() == 0
    moved = model.matrix.detach() - before
    assert (moved.sign() == -gathered[1].sign()).all()


def test_opt_03_clip_factor_is_never_negative_nor_above_one() -> None:
    for norm in (0.0, 1e-30, 0.5, 1.0, 1e30):
        factor = clip.clip_factor(torch.tensor(norm, dtype=torch.float64), 1.0).item()
        assert 0 < factor <= 1
        assert norm * factor <= 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_opt_04_huge_gradients_are_clipped_in_every_dtype(dtype: torch.dtype) -> None:
    """SGD with rate 1 shows what was applied: an update of norm 1."""
    model, optimizer = make(dtype, optimizer="sgd", sgd_momentum=0.0, clip_grad=1.0)
    gathered = set_gradients(model, scale=1e4)
    before = {t.key: t.tensor.clone() for t in optimizer.tensors()} or {
        name: p.detach().clone() for name, p in model.named_parameters()
    }
    result = optimizer.step(1.0, lr=1.0, weight_decay=0.0)
    after = {t.key: t.tensor for t in optimizer.tensors()} or dict(model.named_parameters())
    applied = norm_of([after[key].detach() - before[key] for key in before])
    assert applied == pytest.approx(1.0, rel=1e-2)
    assert result.grad_norm.item() == pytest.approx(norm_of(gathered), rel=1e-6)
    assert result.clipped_norm.item() == pytest.approx(1.0, rel=1e-2)


def test_opt_04_what_is_below_the_limit_has_one_norm() -> None:
    for limit in (0.0, 1e9):
        model, optimizer = make(clip_grad=limit)
        set_gradients(model)
        result = optimizer.step(1.0, lr=1.0, weight_decay=0.0)
        assert result.clipped_norm.item() == result.grad_norm.item() > 0


def test_opt_05_any_iterable_is_clipped() -> None:
    """Modules from a generator, tensors from a generator: the same as from lists."""
    tensors = [torch.full((5,), 2.0), torch.full((5000,), 3.0)]
    from_list = clip.sum_of_squares(tensors, CPU).item()
    assert from_list == pytest.approx(5 * 4 + 5000 * 9, rel=1e-7)
    assert from_list == clip.sum_of_squares((t for t in tensors), CPU).item()
    changes = []
    for modules in (lambda m: [m], lambda m: (m for m in (m,))):
        model = Weights()
        config = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, clip_grad=0.5)
        optimizer = build_optimizer(
            config, modules(model), Mesh.serial(), PrecisionConfig.resolve()
        )
        before = model.matrix.detach().clone()
        set_gradients(model)
        optimizer.step(1.0, lr=1.0, weight_decay=0.0)
        changes.append(model.matrix.detach() - before)
    assert torch.equal(changes[0], changes[1])
    assert 0.4 < float(changes[0].norm()) <= 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_scale_may_be_a_tensor(dtype: torch.dtype) -> None:
    """A token count that is still on the device gives the same step as a number."""
    models = []
    for scale in (0.125, torch.tensor(0.125, dtype=torch.float64)):
        model, optimizer = make(dtype)
        set_gradients(model)
        optimizer.step(scale, lr=0.1, weight_decay=0.1)
        models.append(model)
    assert torch.equal(models[0].matrix, models[1].matrix)
