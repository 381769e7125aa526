"""Kernels in C++ against the references: values, gradients, odd sizes, what is not finite."""

import math
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.core import rng
from megatron.core.kernels import norm, probe, table
from megatron.core.kernels.cross_entropy import REFERENCE, Kernels
from megatron.core.kernels.permute import Moves, sort_choices
from megatron.core.kernels.rope import inverse_frequencies, rope_tables
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.cross_entropy import cross_entropy
from megatron.core.tensor_parallel.embedding import VocabularyRows
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
@dtypes
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("turning", [8, 6])
@pytest.mark.parametrize("per_sample", [False, True])
def test_rope(interleaved: bool, turning: int, per_sample: bool, dtype: torch.dtype) -> None:
    positions = torch.arange(7)
    if per_sample:
        positions = torch.stack((positions, positions + 3), 1)
    elif turning == 6:
        positions = positions[:, None]  # tables to be broadcast
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


def of_threads(op: str) -> Callable[[], list[Tensor]]:
    """Return a call of an op, forward and backward, on enough numbers for several threads."""
    x, row = random(600, 256, dtype=F32), random(256, dtype=F32)
    labels = torch.arange(600) % 256
    by = sort_choices(torch.stack((labels % 5, labels % 5 + 1), 1), None, 1200)
    weights = random(600, 2, dtype=F32)
    tables = rope_tables(inverse_frequencies(32, 1e4), torch.arange(75), F32)
    f = implementation(op)

    def entropy() -> list[Tensor]:
        own = f.statistics(x.clone(), labels, 250, True)
        found = [own.largest_N, own.total_N, own.target_N, own.summed_N, own.kept_Nv.clone()]
        column = x[:, 0].abs() + 0.5
        return [*found, f.gradient(own.kept_Nv, labels, 250, None, *3 * [column], 0.1)]

    calls: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
        "swiglu": (f, (x,)),
        "rms_norm": (lambda x, w: f(x, w, 1e-5), (x, row)),
        "rope": (lambda x: f(x.view(75, 8, 8, 32)[..., :], *tables), (x,)),
        "permute": (lambda x, w: f.unpermute(f.permute(x, by), w, by), (x, weights)),
    }

    def differentiated() -> list[Tensor]:
        call, inputs = calls[op]
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        y = call(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, random(*y.shape, dtype=F32, seed=5))]

    return entropy if op == "cross_entropy" else differentiated


OPS = ("cross_entropy", "permute", "rms_norm", "rope", "swiglu")


@needs_kernels
@pytest.mark.parametrize("op", OPS)
def test_no_bit_depends_on_the_number_of_threads(op: str) -> None:
    call, before = of_threads(op), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(call())
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


@needs_kernels
def test_autograd_sees_that_logits_are_overwritten() -> None:
    kernels: Kernels = implementation("cross_entropy")
    rows, axis = VocabularyRows(9, 9, Mesh.serial()), Mesh.serial().tp
    labels = torch.tensor([[1], [8]])
    x = random(2, 1, 9).requires_grad_()
    losses = cross_entropy(x.tanh(), labels, rows, axis, 0.0, kernels)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()  # tanh's own backward wants its result
    losses = cross_entropy(x.clone(), labels, rows, axis, 0.0, kernels)
    losses.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


@needs_kernels
def test_what_a_kernel_would_misread_is_refused() -> None:
    norm_of, swiglu = implementation("rms_norm"), implementation("swiglu")
    kernels: Kernels = implementation("cross_entropy")
    x, labels = random(3, 8), torch.tensor([0, 1, 2])
    tables = rope_tables(inverse_frequencies(8, 1e4), torch.arange(3), F64)
    calls: list[Callable[[], object]] = [
        lambda: norm_of(x, random(1), 1e-5),
        lambda: norm_of(x, random(8, dtype=F32), 1e-5),
        lambda: norm_of(x.bfloat16(), None, 1e-5),
        lambda: swiglu(x[:, :7].contiguous()),
        lambda: swiglu(torch.ones(2, 4, dtype=torch.int32)),
        lambda: kernels.statistics(x, labels[:2], 8, False),
        lambda: kernels.statistics(x, labels, 9, False),
        lambda: kernels.gradient(x, labels, 8, None, x[:2, 0], x[:, 0], x[:, 0], 0.0),
        lambda: implementation("rope")(random(4, 1, 1, 8), *tables),
        lambda: implementation("rope")(random(3, 1, 1, 6), *tables),
        lambda: swiglu(torch._neg_view(x)),
        lambda: swiglu(torch._efficientzerotensor((3, 8), dtype=F64)),
        lambda: implementation("permute").permute(x, sort_choices(labels[:2, None], None, 2)),
    ]
    for call in calls:
        with pytest.raises((AssertionError, RuntimeError)):
            call()


@needs_kernels
def test_a_tensor_that_is_but_a_shape_goes_through_torch() -> None:
    """As a memory estimator has them."""
    with FakeTensorMode():
        x = torch.empty(3, 2, 2, 8, requires_grad=True)
        tables = torch.empty(3, 4), torch.empty(3, 4)
        implementation("rope")(x, *tables).sum().backward()
        implementation("swiglu")(x).sum().backward()
        implementation("rms_norm")(x, torch.empty(8), 1e-5).sum().backward()
        rows, axis = VocabularyRows(9, 9, Mesh.serial()), Mesh.serial().tp
        logits, labels = torch.empty(4, 2, 9).requires_grad_(), torch.zeros(4, 2, dtype=torch.int64)
        kernels: Kernels = implementation("cross_entropy")
        cross_entropy(logits.clone(), labels, rows, axis, 0.0, kernels).sum().backward()
        assert x.grad is not None and logits.grad is not None


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
        assert tuple(sorted(ops)) == (OPS if is_there else ())
        with torch.profiler.profile() as profile:
            losses = model(tokens, labels_BS=tokens + 1)
            losses.sum().backward()
        # None fell back for how its input lies.
        steps = {event.key for event in profile.key_averages()}
        fallbacks = {"aten::silu", "aten::linalg_vector_norm", "aten::embedding_bag"}
        assert (fallbacks & steps == set()) == is_there
        found.append([losses.detach(), *(weight.grad for weight in model.parameters())])
    for got, want in zip(*found, strict=True):
        close(got, want, dtype)


def test_a_log_says_what_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_no_compiled_module", lambda: "left out")
    model = GPTModel(run_of(MODEL).model, Mesh.serial(), vocab_size=32, dtype=F32)
    (line,) = startup.kernel_lines(model, CPU, F32)[1:]
    assert line == "  rms_norm, rope, swiglu, cross_entropy, permute without compiled: left out"
    assert len(startup.kernel_lines(model, CPU, torch.bfloat16)) == 1
    separate = "--no-rope-fusion --no-bias-swiglu-fusion --no-persist-layer-norm"
    model = GPTModel(run_of(f"--swiglu {separate}").model, Mesh.serial(), vocab_size=32, dtype=F32)
    (line,) = startup.kernel_lines(model, CPU, F32)[1:]
    assert line == "  cross_entropy without compiled: left out"
    monkeypatch.setattr(probe, "_no_compiled_module", lambda: None)
    assert len(startup.kernel_lines(model, CPU, F32)) == 1


@pytest.fixture
def anew() -> Iterator[None]:
    probe._no_compiled_module.cache_clear()
    yield
    probe._no_compiled_module.cache_clear()


BROKEN = {
    "none": (None, "cannot be loaded"),
    "of other sources": (
        SimpleNamespace(INTERFACE=probe.INTERFACE + 1, THREADED=True), "other sources"
    ),
    "of who knows what": (SimpleNamespace(), "other sources"),
    "of the first sources": (SimpleNamespace(INTERFACE=1), "other sources"),
    "for one thread": (
        SimpleNamespace(INTERFACE=probe.INTERFACE, THREADED=False), "built without OpenMP"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_used_is_not_called(
    case: str, monkeypatch: pytest.MonkeyPatch, anew: None
) -> None:
    module, reason = BROKEN[case]
    monkeypatch.setitem(sys.modules, probe.COMPILED, module)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    found = probe.compiled_missing(CPU, F32)
    assert found is not None and reason in found
    assert ("make extension" in found) == (case != "for one thread")
    assert table.choose("swiglu", "auto", CPU, F32) == "function"
    assert table.choose("cross_entropy", "unfused", CPU, F32) == "in_place"


def test_a_module_that_raises_is_not_called(monkeypatch: pytest.MonkeyPatch, anew: None) -> None:
    def broken(name: str) -> Any:
        raise OSError("GLIBC_2.99 not found")

    monkeypatch.setattr(probe.importlib, "import_module", broken)
    assert "GLIBC_2.99 not found" in str(probe.compiled_missing(CPU, F32))


def test_other_devices_and_halves_have_other_kernels() -> None:
    assert "for the CPU, this is cuda" in str(probe.compiled_missing(torch.device("cuda"), F32))
    assert "fp32 and fp64, this is bfloat16" in str(probe.compiled_missing(CPU, torch.bfloat16))
