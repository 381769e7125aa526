"""Kernels in C++ against the references: values, gradients, odd sizes, what is not finite."""

import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core import rng
from megatron.core.kernels import norm, probe, table
from megatron.core.kernels.cross_entropy import REFERENCE, Kernels
from megatron.core.kernels.permute import Moves, sort_choices
from megatron.core.kernels.rope import inverse_frequencies, rope_tables
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import GPTModel
from megatron.training import startup
from tests.unit.test_backends import run_of

CPU, F32, F64 = torch.device("cpu"), torch.float32, torch.float64
REASON = probe.compiled_missing(CPU, F64)
needs_kernels = pytest.mark.skipif(REASON is not None, reason=f"{REASON} (needs a C++ compiler)")
TOLERANCE = {F64: 1e-12, F32: 5e-6}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp64", "fp32"])


def implementation(op: str, backend: str = "compiled") -> Any:
    return table.TABLE[op][backend].implementation


def random(*shape: int, dtype: torch.dtype = F64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=F64, generator=generator).to(dtype)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Compare by the largest number: sums of many terms of both signs lose that much."""
    assert got.dtype == dtype
    scale = max(1.0, want.abs().max().item()) if want.numel() and want.isfinite().all() else 1.0
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got, want.to(dtype), rtol=tolerance, atol=tolerance * scale)


def agree(op: str, call: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """Compare values and gradients of the compiled op with the reference's."""
    found = []
    for backend in ("compiled", "reference"):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        y = call(implementation(op, backend), *leaves)
        upstream = random(*y.shape, dtype=y.dtype, seed=7)
        found.append((y.detach(), *torch.autograd.grad(y, leaves, upstream)))
    for got, want in zip(*found, strict=True):
        close(got, want, inputs[0].dtype)


@needs_kernels
@dtypes
@pytest.mark.parametrize("shape", [(1, 2), (3, 5, 14), (40, 1028), (0, 6), (2, 0)])
@pytest.mark.parametrize("biased", [False, True])
def test_swiglu(shape: tuple[int, ...], biased: bool, dtype: torch.dtype) -> None:
    inputs = [3 * random(*shape, dtype=dtype)] + biased * [random(shape[-1], dtype=dtype)]
    agree("swiglu", lambda f, *leaves: f(*leaves), inputs)


@needs_kernels
def test_swiglu_with_bounds_and_of_rows_apart() -> None:
    x = random(6, 20)
    agree("swiglu", lambda f, x: f(x, None, 0.5, 1.0), [x])
    agree("swiglu", lambda f, x: f(x[:, :8]), [x])


@needs_kernels
@dtypes
def test_swiglu_far_from_zero(dtype: torch.dtype) -> None:
    gate = torch.tensor([-1e30, -1e4, -104.0, -88.6, -30.0, 0.0, 30.0, 88.6, 104.0, 1e4, 1e30])
    x = torch.cat((gate, torch.full_like(gate, 1.5))).to(dtype)[None]
    agree("swiglu", lambda f, x: f(x), [x])


@needs_kernels
@dtypes
@pytest.mark.parametrize("shape", [(1, 1), (7, 3, 8), (200, 515), (0, 4), (2, 1100)])
@pytest.mark.parametrize("gains", ["none", "plain", "zero_centered"])
def test_rms_norm(shape: tuple[int, ...], gains: str, dtype: torch.dtype) -> None:
    inputs = [random(*shape, dtype=dtype)]
    inputs += [] if gains == "none" else [random(shape[-1], dtype=dtype)]

    def call(f: Callable[..., Tensor], x: Tensor, w: Tensor | None = None) -> Tensor:
        return f(x, w, 1e-3, gains == "zero_centered")

    agree("rms_norm", call, inputs)


@needs_kernels
def test_rms_norm_of_rows_apart_keeps_no_copy() -> None:
    kept: list[Tensor] = []
    x = random(5, 3, 24).requires_grad_()
    w = random(8).requires_grad_()
    rows = x[..., 4:12]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = implementation("rms_norm")(rows, w, 1e-5)
    close(y, norm.rms_norm_reference(rows, w, 1e-5), F64)
    assert any(t.data_ptr() == rows.data_ptr() for t in kept)


@needs_kernels
def test_gains_gradient_does_not_hang_on_threads() -> None:
    x, w, grad = random(1000, 96, dtype=F32), random(96, dtype=F32), random(1000, 96, dtype=F32)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            leaves = (x.clone().requires_grad_(), w.clone().requires_grad_())
            y = implementation("rms_norm")(*leaves, 1e-5)
            found.append((y.detach(), *torch.autograd.grad(y, leaves, grad)))
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


@needs_kernels
@dtypes
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("turning", [8, 6])
@pytest.mark.parametrize("per_sample", [False, True])
def test_rope(interleaved: bool, turning: int, per_sample: bool, dtype: torch.dtype) -> None:
    positions = torch.arange(7)
    if per_sample:
        positions = torch.stack((positions, positions + 3), 1)
    tables = rope_tables(inverse_frequencies(turning, 1e4), positions, dtype)
    mixed = random(7, 2, 3, 24, dtype=dtype)
    agree("rope", lambda f, x: f(x[..., 8:16], *tables, interleaved), [mixed])
    agree("rope", lambda f, x: f(x[..., ::3], *tables, interleaved), [mixed])


@needs_kernels
@dtypes
@pytest.mark.parametrize("columns", [1, 9, 1300])
@pytest.mark.parametrize("padding", [0, 1, 3])
@pytest.mark.parametrize("summed", [False, True])
def test_halves_of_a_cross_entropy(
    columns: int, padding: int, summed: bool, dtype: torch.dtype
) -> None:
    kernels: Kernels = implementation("cross_entropy")
    valid = max(columns - padding, 0)
    logits = 4 * random(6, columns, dtype=dtype)
    labels = torch.tensor([-1, 0, valid - 1, -1, valid // 2, 0]).clamp(max=valid - 1)
    own, want = (k.statistics(logits.clone(), labels, valid, summed) for k in (kernels, REFERENCE))
    assert (own.summed_N is None) == (not summed)
    for name in ("largest_N", "total_N", "target_N") + summed * ("summed_N",):
        close(getattr(own, name), getattr(want, name), dtype)
    divisor, grad, minus = random(3, 6, dtype=dtype).abs() + 0.5
    largest = want.largest_N if valid else torch.zeros(6, dtype=dtype)
    rest = (divisor, grad, minus, 0.01)
    assert kernels.keeps_exponentials
    got = kernels.gradient(own.kept_Nv, labels, valid, None, *rest)
    assert got.data_ptr() == own.kept_Nv.data_ptr()
    close(got, REFERENCE.gradient(logits, labels, valid, largest, *rest), dtype)
    assert (got[:, valid:] == 0).all()


@needs_kernels
@dtypes
def test_logits_far_from_zero_and_hidden_ones(dtype: torch.dtype) -> None:
    kernels: Kernels = implementation("cross_entropy")
    logits = torch.tensor([[1e30, -1e30, 0.0], [-math.inf, -5.0, -90.0]], dtype=dtype)
    found = kernels.statistics(logits, torch.tensor([1, 0]), 3, False)
    assert found.largest_N.tolist() == [torch.tensor(1e30, dtype=dtype).item(), -5.0]
    close(found.total_N, torch.ones(2, dtype=dtype), dtype)
    assert found.target_N[1] == -math.inf


@needs_kernels
@dtypes
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_logit_that_is_no_number_is_seen(bad: float, dtype: torch.dtype) -> None:
    kernels: Kernels = implementation("cross_entropy")
    for place in (0, 4, 8):
        logits = random(2, 9, dtype=dtype)
        logits[1, place] = bad
        total_N = kernels.statistics(logits, torch.tensor([1, 1]), 9, False).total_N
        assert total_N[0].isfinite() and total_N[1].isnan()


@needs_kernels
def test_a_label_past_the_columns_is_an_error() -> None:
    kernels: Kernels = implementation("cross_entropy")
    with pytest.raises(IndexError, match="label 9 of 9 columns"):
        kernels.statistics(random(2, 9), torch.tensor([1, 9]), 9, False)


@needs_kernels
@dtypes
@pytest.mark.parametrize("stay", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("choices", [1, 3])
def test_rows_that_change_places(stay: float, choices: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    experts_TK = torch.rand(30, 5, generator=generator).topk(choices).indices
    kept_TK = torch.rand(30, choices, generator=generator) < stay
    by = sort_choices(experts_TK, None if stay == 1.0 else kept_TK, int(kept_TK.sum()))
    x, weights = random(30, 11, dtype=dtype), random(30, choices, dtype=dtype)

    def there_and_back(moves: Moves, x: Tensor, weights: Tensor) -> Tensor:
        return moves.unpermute(moves.permute(x, by).square(), weights, by)

    agree("permute", there_and_back, [x, weights])


@needs_kernels
def test_weights_finer_than_the_rows() -> None:
    by = sort_choices(torch.tensor([[0, 1], [1, 0]]), None, 4)
    agree("permute", lambda m, y, w: m.unpermute(y, w.double(), by), [random(4, 3), random(2, 2)])


MODEL = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--num-experts 4 --moe-router-topk 2 --moe-permute-fusion"
)


@needs_kernels
@dtypes
def test_a_model_of_compiled_kernels_is_the_model(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    tokens = torch.arange(12).view(2, 6) % 31
    for is_there in (True, False):
        if not is_there:
            monkeypatch.setattr(probe, "_no_compiled_module", lambda: "left out")
        model = GPTModel(run_of(MODEL).model, Mesh.serial(), vocab_size=32, dtype=dtype)
        rng.initialize(model, 3)
        ops = [op for op, name in model.backends.names.items() if name == "compiled"]
        expected = ["cross_entropy", "permute", "rms_norm", "rope", "swiglu"]
        assert sorted(ops) == (expected if is_there else [])
        losses = model(tokens, labels_BS=tokens + 1)
        losses.sum().backward()
        found.append([losses.detach(), *(weight.grad for weight in model.parameters())])
    for got, want in zip(*found, strict=True):
        close(got, want, dtype)


def test_a_log_says_what_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_no_compiled_module", lambda: "left out")
    model = GPTModel(run_of(MODEL).model, Mesh.serial(), vocab_size=32, dtype=F32)
    (line,) = startup.kernel_lines(model, CPU, F32)[1:]
    assert line == "  rms_norm, rope, swiglu, cross_entropy, permute without compiled: left out"
    assert len(startup.kernel_lines(model, CPU, torch.bfloat16)) == 1
    monkeypatch.setattr(probe, "_no_compiled_module", lambda: None)
    assert len(startup.kernel_lines(model, CPU, F32)) == 1


def test_one_of_other_sources_or_none_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    probe._no_compiled_module.cache_clear()
    try:
        stale = SimpleNamespace(INTERFACE=probe.INTERFACE + 1)
        monkeypatch.setitem(sys.modules, probe.COMPILED, stale)
        assert "from other sources: `make extension`" in str(probe.compiled_missing(CPU, F32))
        assert table.choose("swiglu", "auto", CPU, F32) == "function"
        probe._no_compiled_module.cache_clear()
        monkeypatch.setitem(sys.modules, probe.COMPILED, None)
        assert "`make extension`" in str(probe.compiled_missing(CPU, F32))
    finally:
        probe._no_compiled_module.cache_clear()
    assert "for the CPU, this is cuda" in str(probe.compiled_missing(torch.device("cuda"), F32))
    assert "fp32 and fp64, this is bfloat16" in str(probe.compiled_missing(CPU, torch.bfloat16))
