"""Updates against torch's optimizers on the same model, and masters against a loop written here."""

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from megatron.core import sharding
from megatron.core.kernels import table
from megatron.core.kernels.adam import adam_reference
from megatron.core.mesh import Mesh
from megatron.core.optimizer import memory, rules
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.optimizer import RULES, Optimizer, build_optimizer
from megatron.core.precision.config import PrecisionConfig
from megatron.core.sharding import Init

PRECISION = {
    torch.float32: PrecisionConfig.resolve(),
    torch.float64: PrecisionConfig.resolve(fp64=True),
    torch.bfloat16: PrecisionConfig.resolve(bf16=True),
    torch.float16: PrecisionConfig.resolve(fp16=True),
}
SCALED = PrecisionConfig.resolve(
    bf16=True,
    use_precision_aware_optimizer=True,
    exp_avg_dtype="fp16",
    exp_avg_sq_dtype="fp16",
)


class Tiny(nn.Module):
    """Two linears with odd sizes, and a norm between them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(5, 11, dtype=dtype)
        self.norm = nn.LayerNorm(11, dtype=dtype)
        self.second = nn.Linear(11, 3, dtype=dtype)
        for parameter in self.parameters():
            matrix = parameter.dim() > 1
            record = sharding.whole(tuple(parameter.shape), Init(), decay=matrix, matrix=matrix)
            sharding.attach(parameter, record)
        sharding.name_parameters(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))))


def batches(count: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(6, 5, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)
    ]


def optimizer_of(model: nn.Module, dtype: torch.dtype, **fields: object) -> Optimizer:
    return build_optimizer(OptimizerConfig(**fields), [model], Mesh.serial(), PRECISION[dtype])


def decayed(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return torch's parameter groups for the no-decay rule."""
    vectors = [p for p in model.parameters() if p.dim() == 1]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


Oracle = Callable[[list[dict[str, object]]], torch.optim.Optimizer]
ORACLES: dict[str, tuple[dict[str, object], Oracle]] = {
    "adamw": (
        {"adam_beta2": 0.95, "adam_eps": 1e-7},
        lambda g: torch.optim.AdamW(g, lr=1.0, betas=(0.9, 0.95), eps=1e-7, foreach=False),
    ),
    "adam-l2": (
        {"decoupled_weight_decay": False},
        lambda g: torch.optim.Adam(g, lr=1.0, betas=(0.9, 0.999), eps=1e-8, foreach=False),
    ),
    "sgd-momentum": (
        {"optimizer": "sgd"},
        lambda g: torch.optim.SGD(g, lr=1.0, momentum=0.9, foreach=False),
    ),
    "sgd": (
        {"optimizer": "sgd", "sgd_momentum": 0.0},
        lambda g: torch.optim.SGD(g, lr=1.0, foreach=False),
    ),
}


@pytest.mark.parametrize("clip_grad", [0.0, 0.3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("name", ORACLES)
def test_ten_steps_equal_torch(
    name: str, dtype: torch.dtype, tolerance: float, clip_grad: float
) -> None:
    """Two microbatches per step, a scale of 1/12, changing rate and decay."""
    fields, oracle = ORACLES[name]
    ours, theirs = Tiny(dtype), Tiny(dtype)
    optimizer = optimizer_of(ours, dtype, clip_grad=clip_grad, **fields)
    reference = oracle(decayed(theirs, 0.0))
    data = batches(20, dtype)
    for step in range(10):
        lr, weight_decay = 0.01 * (step + 1), 0.1 + 0.02 * step
        optimizer.zero_grad()
        reference.zero_grad()
        for x in data[2 * step : 2 * step + 2]:
            (ours(x) ** 2).sum().backward()
            ((theirs(x) ** 2).sum() / 12).backward()
        limit = clip_grad or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit)
        for group, decay in zip(reference.param_groups, (weight_decay, 0.0), strict=True):
            group["lr"], group["weight_decay"] = lr, decay
        reference.step()
        optimizer.data_parallel.reduce_gradients()
        result = optimizer.step(1 / 12, lr=lr, weight_decay=weight_decay)
        assert result.updated
        torch.testing.assert_close(
            result.grad_norm, norm.double(), rtol=10 * tolerance, atol=0, check_dtype=False
        )
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=tolerance, atol=tolerance)


def test_adam_is_the_formula() -> None:
    """Three steps of the paper's formulas, written out."""
    model = Tiny(torch.float64)
    optimizer = optimizer_of(model, torch.float64, clip_grad=0.0, adam_beta2=0.99)
    weight = model.first.weight
    p, m, v = weight.detach().clone(), torch.zeros(11, 5).double(), torch.zeros(11, 5).double()
    for t, x in enumerate(batches(3, torch.float64), start=1):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        assert weight.grad is not None
        g = weight.grad.clone() * 0.5
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        p = p * (1 - 0.02 * 0.3) - 0.02 * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-8)
        optimizer.step(0.5, lr=0.02, weight_decay=0.3)
        torch.testing.assert_close(weight.detach(), p, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_equal_an_fp32_loop_that_casts(dtype: torch.dtype) -> None:
    """Steps below a unit of a half weight add up in the masters and reach it."""
    ours, theirs = Tiny(dtype), Tiny(dtype)
    optimizer = optimizer_of(ours, dtype, clip_grad=0.0)
    masters = [p.detach().float() for p in theirs.parameters()]
    plain = torch.optim.AdamW(
        [
            {"params": [m for m in masters if m.dim() > 1], "weight_decay": 0.1},
            {"params": [m for m in masters if m.dim() == 1], "weight_decay": 0.0},
        ],
        lr=1e-4,
        foreach=False,
    )
    start = [p.detach().clone() for p in ours.parameters()]
    for x in batches(30, dtype):
        optimizer.zero_grad()
        ours(x).float().pow(2).sum().backward()
        optimizer.step(1.0, lr=1e-4, weight_decay=0.1)
        gradients = torch.autograd.grad(theirs(x).float().pow(2).sum(), list(theirs.parameters()))
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient.float()
        plain.step()
        with torch.no_grad():
            for parameter, master in zip(theirs.parameters(), masters, strict=True):
                parameter.copy_(master)
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, its)
    stored = {t.key: t.tensor for t in optimizer.tensors()}
    for (name, _), master in zip(ours.named_parameters(), masters, strict=True):
        held = stored[f"optimizer.master.{name}"].view_as(master)
        torch.testing.assert_close(held, master, rtol=1e-6, atol=1e-7)
    assert all(not torch.equal(p, s) for p, s in zip(ours.parameters(), start, strict=True))


def test_no_decay_group_ignores_weight_decay() -> None:
    model = Tiny(torch.float64)
    optimizer = optimizer_of(model, torch.float64)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.zero_grad()
    optimizer.step(1.0, lr=0.1, weight_decay=0.5)
    for name, parameter in model.named_parameters():
        factor = 0.95 if parameter.dim() > 1 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor, rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        *((dtype, PRECISION[dtype]) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        (torch.bfloat16, SCALED),
    ],
)
def test_restored_state_continues_bit_for_bit(
    dtype: torch.dtype, precision: PrecisionConfig
) -> None:
    """Save after 3 of 6 steps through `tensors`, load into a fresh optimizer, compare."""

    def train(model: Tiny, optimizer: Optimizer, data: list[Tensor]) -> None:
        for x in data:
            optimizer.zero_grad()
            model(x).float().pow(2).sum().backward()
            optimizer.step(0.1, lr=0.01, weight_decay=0.1)

    def fresh(model: Tiny) -> Optimizer:
        return build_optimizer(OptimizerConfig(), [model], Mesh.serial(), precision)

    data = batches(6, dtype)
    whole, first, second = Tiny(dtype), Tiny(dtype), Tiny(dtype)
    unbroken = fresh(whole)
    train(whole, unbroken, data)
    saving = fresh(first)
    train(first, saving, data[:3])
    stored = {t.key: t.values().clone() for t in saving.tensors()}
    kinds = {"exp_avg", "exp_avg_sq"} | (set() if dtype == torch.float32 else {"master"})
    assert {key.split(".")[1] for key in stored} == kinds
    scalars = saving.scalars()
    loading = fresh(second)
    train(second, loading, data[3:4])  # whatever was there before is replaced
    with torch.no_grad():
        for into, source in zip(second.parameters(), first.parameters(), strict=True):
            into.copy_(source)
    for state in loading.tensors():
        state.fill(stored[state.key])
        assert (state.start, state.stop) == (0, state.tensor.numel())
    for _ in range(2):
        loading.load_scalars(scalars)
    assert loading.scalars()["step"] == 3
    train(second, loading, data[3:])
    for mine, its in zip(second.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, its)
    for one, other in zip(loading.tensors(), unbroken.tensors(), strict=True):
        assert one.key == other.key and torch.equal(one.values(), other.values())


def test_fp16_moments_are_adams_within_their_bits() -> None:
    """Weights that lie at odd places, some of which have gradients far below their neighbours'."""
    runs = {}
    for name, precision in (("fp32", PRECISION[torch.bfloat16]), ("fp16", SCALED)):
        model = Tiny(torch.bfloat16)
        optimizer = build_optimizer(OptimizerConfig(), [model], Mesh.serial(), precision)
        shares = torch.logspace(0, -4, 55).view(11, 5)
        for x in batches(12, torch.bfloat16):
            optimizer.zero_grad()
            model(x).float().square().sum().backward()
            assert model.first.weight.grad is not None
            model.first.weight.grad.mul_(shares)
            optimizer.step(0.1, lr=0.01, weight_decay=0.1)
        runs[name] = {t.key: t.values().clone() for t in optimizer.tensors()}
    for key, expected in runs["fp32"].items():
        # Weights in bf16 differ by a last bit now and then, and with them the gradients.
        tolerance = 0.02 * float(expected.abs().max()) if "master" not in key else 2e-3
        torch.testing.assert_close(runs["fp16"][key], expected, rtol=0.02, atol=tolerance)


@pytest.mark.parametrize("decoupled", [True, False])
def test_fp16_moments_are_widened_where_there_is_a_kernel_for_several_dtypes(
    decoupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(*arguments: object) -> None:
        raise AssertionError("a kernel got what it cannot read")

    monkeypatch.setitem(table.TABLE["adam"], "triton", table.Backend(kernel))
    model = Tiny(torch.bfloat16)
    config = OptimizerConfig(decoupled_weight_decay=decoupled)
    optimizer = build_optimizer(config, [model], Mesh.serial(), SCALED)
    before = model.first.weight.detach().clone()
    model(batches(1, torch.bfloat16)[0]).square().sum().backward()
    assert optimizer.step(0.5, lr=0.01, weight_decay=0.1).updated
    assert not torch.equal(before, model.first.weight)


def test_fp16_moments_stay_where_gradients_are_not_finite() -> None:
    model = Tiny(torch.bfloat16)
    optimizer = build_optimizer(OptimizerConfig(), [model], Mesh.serial(), SCALED)
    model(batches(1, torch.bfloat16)[0]).square().sum().backward()
    optimizer.step(1.0, lr=0.01, weight_decay=0.1)
    before = [t.values().clone() for t in optimizer.tensors()]
    assert model.first.weight.grad is not None
    model.first.weight.grad[0, 0] = float("inf")
    assert not optimizer.step(1.0, lr=0.01, weight_decay=0.1).updated
    assert all(map(torch.equal, before, (t.values() for t in optimizer.tensors())))


@pytest.mark.parametrize("dtype", list(PRECISION))
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"optimizer": "sgd"},
        {"optimizer": "sgd", "sgd_momentum": 0.0},
        {"optimizer": "lion"},
        {"optimizer": "muon"},
        {"optimizer": "muon", "muon_scalar_optimizer": "lion"},
    ],
)
def test_predicted_bytes_are_the_bytes(dtype: torch.dtype, fields: dict[str, object]) -> None:
    optimizer = optimizer_of(Tiny(dtype), dtype, **fields)
    plans = [buffer.plan for buffer in optimizer.data_parallel.buffers]
    predicted = memory.predict(plans, OptimizerConfig(**fields), PRECISION[dtype])
    assert predicted == optimizer.memory()
    # 55 and 33 matrix elements, then 11, 11, 11 and 3: six aligned slots of 64.
    assert predicted["weights"] == 6 * 64 * dtype.itemsize


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_kernel_for_several_dtypes_takes_them_as_they_are_kept(
    decoupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moments of bf16 beside fp32: the same as with wide copies, and none is made."""
    precision = PrecisionConfig.resolve(
        bf16=True, use_precision_aware_optimizer=True, exp_avg_dtype="bf16"
    )
    calls: list[set[torch.dtype]] = []

    def kernel(*arguments: object) -> None:
        calls.append({array.dtype for array in arguments[:4] if isinstance(array, Tensor)})
        adam_reference(*arguments)  # type: ignore[arg-type]

    results = []
    for fused in (False, True):
        if fused:
            monkeypatch.setitem(table.TABLE["adam"], "triton", table.Backend(kernel))
        model = Tiny(torch.bfloat16)
        config = OptimizerConfig(decoupled_weight_decay=decoupled)
        optimizer = build_optimizer(config, [model], Mesh.serial(), precision)
        for x in batches(3, torch.bfloat16):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step(0.5, lr=0.01, weight_decay=0.1)
        results.append([state.tensor.clone() for state in optimizer.tensors()])
    assert calls and set.union(*calls) == {torch.float32, torch.bfloat16}
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-6)


def test_every_rule_is_known_to_plans_as_it_is() -> None:
    """A plan cannot ask a rule itself, which imports torch."""
    assert set(RULES) == set(get_args(OptimizerConfig.__annotations__["optimizer"]))
    for name, make_rule in RULES.items():
        config = OptimizerConfig.resolve(sgd_momentum=0.0)
        assert make_rule(config, Mesh.serial()).needs_whole == rules.needs_whole(name)
        assert bool(rules.states(name, config)) == (name != "sgd")
    assert rules.states("sgd", OptimizerConfig.resolve()) == ("momentum_buffer",)
