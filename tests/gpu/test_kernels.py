"""Every backend on CUDA against the reference in float64 on the CPU.

Inputs are rounded to the backend's dtype first, so that a difference is the backend's own. Half
precision keeps 8 bits (a rounding is 2e-3 at most, 1e-3 on average), and an attention rounds three
or four times on the way. The fused kernels of fp32 may multiply in tf32, which keeps 11 bits.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core import rng
from megatron.core.kernels import activation, matmul, norm, probe, rope, table
from megatron.core.kernels.attention import Extras, Packing, Rule, attention_reference
from megatron.core.kernels.blocked import attention_blocked
from megatron.core.kernels.dropout import dropout
from megatron.core.kernels.flash import attention_flash
from megatron.core.kernels.sdpa import attention_sdpa
from megatron.core.optimizer import clip
from tests.gpu import needs
from tests.gpu.needs import DEVICE, far

pytestmark = needs.CUDA

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
BOUNDS = {F64: 1e-12, F32: 1e-5, BF16: 1e-2}
ATTENTION_BOUNDS = {F64: 1e-12, F32: 1e-3, BF16: 1e-2}
GRADIENTS = 2
"""Times the bound: a gradient is rounded on the way forward and on the way back."""

S, B, N, G, D = 96, 2, 4, 2, 64


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(11)


def drawn(*shape: int, dtype: torch.dtype = F64) -> Tensor:
    """Return random numbers on the CPU that ``dtype`` can hold."""
    return torch.randn(*shape, dtype=F64).to(dtype).to(F64)


def both(
    ours: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: list[Tensor],
    dtype: torch.dtype,
    bound: float,
) -> None:
    """Compare output and gradients: ours on the device in ``dtype``, the reference in float64."""
    results: list[list[Tensor]] = []
    for function, device, kind in ((ours, DEVICE, dtype), (reference, "cpu", F64)):
        here = [x.detach().to(device, kind).requires_grad_() for x in inputs]
        out = function(*here)
        assert out.dtype == kind and out.device.type == torch.device(device).type
        if not results:
            grad = drawn(*out.shape, dtype=dtype)
        results.append([out, *torch.autograd.grad(out, here, grad.to(device, kind))])
    apart = [far(got, want) for got, want in zip(*results, strict=True)]
    assert apart[0] <= bound and max(apart) <= GRADIENTS * bound, apart


def here(op: str, dtype: torch.dtype) -> dict[str, Callable[..., Tensor]]:
    """Return the backends of an op that run here, but for packages' and what lacks fp64."""
    found = {}
    for name, backend in table.TABLE[op].items():
        if name in table.PACKAGES:
            continue
        reason = backend.missing(DEVICE, dtype)
        if reason is None:
            found[name] = backend.implementation
        else:
            assert name in ("triton", "function"), reason
    return found


ATTENTION: dict[str, Callable[..., Tensor]] = {
    "reference": attention_reference,
    "blocked": attention_blocked,  # what sdpa leaves to it
    "sdpa": attention_sdpa,
    "flash_attn": attention_flash,
}
RULE = Rule(scale=D**-0.5)
KINDS: dict[str, tuple[Rule, str]] = {
    "causal": (RULE, ""),
    "full": (replace(RULE, causal=False), ""),
    "window": (replace(RULE, window=(20, 0)), ""),
    "cap": (replace(RULE, softcap=2.0), ""),
    "packed": (RULE, "packed"),
    "alibi": (RULE, "alibi"),
    "sink": (RULE, "sink"),
    "bias": (RULE, "bias"),
}
# Samples of 96 positions in documents; one document is empty.
BOUNDS_OF_DOCUMENTS = torch.tensor([0, 30, 30, 96, 97, 150, 192], dtype=torch.int32)


def attention(backend: str, kind: str) -> Callable[..., Tensor]:
    """Return the backend as a function of q, k, v and, where the kind has one, a sink or a bias."""
    rule, extra = KINDS[kind]

    def call(q: Tensor, k: Tensor, v: Tensor, further: Tensor | None = None) -> Tensor:
        extras = Extras()
        if extra == "packed":
            extras = Extras(packing=Packing(BOUNDS_OF_DOCUMENTS.to(q.device)))
        elif extra == "alibi":
            slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=F64, device=q.device)
            extras = Extras(alibi_slopes_n=slopes)
        elif extra == "sink":
            extras = Extras(sink_n=further)
        elif extra == "bias":
            extras = Extras(bias=further)
        return ATTENTION[backend](q, k, v, rule, extras)

    return call


def inputs(kind: str, dtype: torch.dtype) -> list[Tensor]:
    shapes = [(S, B, N, D), (S, B, G, D), (S, B, G, D)]
    shapes += {"sink": [(N,)], "bias": [(N, S, S)]}.get(KINDS[kind][1], [])
    return [drawn(*shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
@pytest.mark.parametrize("backend", ["reference", "blocked", "sdpa"])
def test_attention(backend: str, dtype: torch.dtype, kind: str) -> None:
    bound = ATTENTION_BOUNDS[dtype]
    both(attention(backend, kind), attention("reference", kind), inputs(kind, dtype), dtype, bound)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("sink", "bias")])
def test_flash_attn(kind: str) -> None:
    needs.flash_attn()
    bound = ATTENTION_BOUNDS[BF16]
    ours = attention("flash_attn", kind)
    both(ours, attention("reference", kind), inputs(kind, BF16), BF16, bound)


@pytest.mark.parametrize("backend", ["reference", "blocked", "sdpa"])
def test_values_may_have_other_channels(backend: str) -> None:
    """As in multi-latent attention."""
    tensors = [drawn(S, B, N, D), drawn(S, B, N, D), drawn(S, B, N, 32)]
    ours, reference = attention(backend, "causal"), attention("reference", "causal")
    both(ours, reference, tensors, F64, ATTENTION_BOUNDS[F64])


@pytest.mark.parametrize("backend", ["reference", "blocked", "sdpa"])
def test_cached_decoding(backend: str) -> None:
    q, k, v = drawn(1, B, N, D), drawn(40, B, G, D), drawn(40, B, G, D)
    at = torch.tensor([[17], [39]])
    want = attention_reference(q, k, v, RULE, Extras(query_positions_BS=at))
    extras = Extras(query_positions_BS=at.to(DEVICE))
    got = ATTENTION[backend](*(x.to(DEVICE) for x in (q, k, v)), RULE, extras)
    assert far(got, want) <= ATTENTION_BOUNDS[F64]


@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_norms(op: str, centered: bool, dtype: torch.dtype) -> None:
    width = 320
    # Gains near what they are in a model: one, or zero where the deviation from one is stored.
    gain = (0.1 * drawn(width) + (not centered)).to(dtype).to(F64)
    tensors = [drawn(S, B, width, dtype=dtype), gain]
    if op == "layer_norm":
        tensors.append(drawn(width, dtype=dtype))
    reference = {"layer_norm": norm.layer_norm_reference, "rms_norm": norm.rms_norm_reference}[op]
    for function in here(op, dtype).values():
        both(
            lambda *x, f=function: f(*x, 1e-5, centered),
            lambda *x: reference(*x, 1e-5, centered),
            tensors,
            dtype,
            BOUNDS[dtype],
        )


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("package", table.PACKAGES)
def test_norms_of_packages(package: str, op: str, centered: bool) -> None:
    backend = table.TABLE[op][package]
    reason = backend.missing(DEVICE, BF16)
    if reason is not None:
        pytest.skip(reason)
    x = drawn(S, B, 320, dtype=BF16)
    vectors = [0.1 * drawn(320, dtype=BF16) for _ in range(2 if op == "layer_norm" else 1)]
    results = []
    for function, device, kind in (
        (backend.implementation, DEVICE, BF16),
        (table.TABLE[op]["reference"].implementation, torch.device("cpu"), F64),
    ):
        weights = [nn.Parameter(vector.to(device, kind)) for vector in vectors]
        inputs = [x.to(device, kind).requires_grad_(), *weights]
        out = function(*inputs, 1e-5, centered)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    assert max(far(a, b) for a, b in zip(*results, strict=True)) <= GRADIENTS * BOUNDS[BF16]


@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation(interleaved: bool, dtype: torch.dtype) -> None:
    frequencies = rope.inverse_frequencies(48, 10000.0)  # 48 of 64 channels rotate

    def rotated(f: Callable[..., Tensor], kind: torch.dtype) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            positions = torch.arange(5000, 5000 + S, device=x.device)
            return f(x, *rope.rope_tables(frequencies, positions, kind), interleaved)

        return call

    reference = rotated(rope.apply_rope_reference, F64)
    for function in here("rope", dtype).values():
        ours = rotated(function, dtype)
        both(ours, reference, [drawn(S, B, N, D, dtype=dtype)], dtype, BOUNDS[dtype])


@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
@pytest.mark.parametrize("name", activation.REFERENCES)
def test_activations(name: str, dtype: torch.dtype) -> None:
    """Also the references, against themselves on the CPU: formulas are tested elsewhere."""
    tensors = [drawn(S, B, 128, dtype=dtype), drawn(128, dtype=dtype)]
    for function in here(name, dtype).values():
        both(function, activation.REFERENCES[name], tensors, dtype, BOUNDS[dtype])


@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_products(dtype: torch.dtype) -> None:
    x, weight, bias = drawn(S, B, 136, dtype=dtype), drawn(72, 136, dtype=dtype), drawn(72)
    tensors = [x, weight, bias.to(dtype).to(F64)]
    both(matmul.linear, torch.nn.functional.linear, tensors, dtype, BOUNDS[dtype])
    both(matmul.matmul, torch.matmul, [x, drawn(136, 40, dtype=dtype)], dtype, BOUNDS[dtype])


@pytest.mark.parametrize("half", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(512, 136, 72), (511, 33, 17)])
def test_weight_gradients_are_never_rounded_to_half(
    shape: tuple[int, int, int], half: torch.dtype
) -> None:
    rows, inner, outer = shape
    grads = [drawn(rows, outer, dtype=half) for _ in range(2)]
    xs = [drawn(rows, inner, dtype=half) for _ in range(2)]
    buffer = torch.ones(outer, inner, dtype=F32, device=DEVICE)
    for grad, x in zip(grads, xs, strict=True):
        matmul.accumulate_wgrad(buffer, grad.to(DEVICE, half), x.to(DEVICE, half))
    want = 1 + sum(grad.t() @ x for grad, x in zip(grads, xs, strict=True))
    # A rounding to bf16 would be 1e-3, to fp16 1e-4.
    assert far(buffer, want) <= 2e-5


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
def test_weight_gradients_of_whole_precision(dtype: torch.dtype) -> None:
    grad, x = drawn(96, 24, dtype=dtype), drawn(96, 40, dtype=dtype)
    buffer = torch.zeros(24, 40, dtype=dtype, device=DEVICE)
    matmul.accumulate_wgrad(buffer, grad.to(DEVICE, dtype), x.to(DEVICE, dtype))
    assert far(buffer, grad.t() @ x) <= BOUNDS[dtype]


def test_sums_of_squares() -> None:
    tensors = [drawn(size, dtype=F32) for size in (5, 4096, 100_001)]
    want = sum(x.square().sum() for x in tensors)
    got = clip.sum_of_squares([x.to(DEVICE, F32) for x in tensors], DEVICE)
    assert got.dtype == F64 and far(got, want) <= 1e-6
    zeros = [torch.tensor([0.0, 1.0, 0.0]), torch.ones(4)]
    assert clip.count_zeros([x.to(DEVICE) for x in zeros], 7, DEVICE).item() == 2


def test_a_key_is_a_mask() -> None:
    x = torch.ones(4096, 16, device=DEVICE, requires_grad=True)
    first, again, other = (dropout(x, 0.25, seed) for seed in (2**62 + 5, 2**62 + 5, 7))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert abs((first == 0).double().mean().item() - 0.25) < 0.01
    (grad,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(grad, first)


def test_a_seeded_scope_leaves_the_generator_as_it_was() -> None:
    torch.randn(3, device=DEVICE)
    here = torch.device("cuda", torch.cuda.current_device()) if DEVICE.type == "cuda" else DEVICE
    drawn_inside = []
    for _ in range(2):
        with rng.seeded(2**62 + 3, here):
            drawn_inside.append(torch.rand(5, device=DEVICE))
    after = torch.rand(5, device=DEVICE)
    assert torch.equal(*drawn_inside)
    torch.manual_seed(11)
    torch.randn(3, device=DEVICE)
    assert torch.equal(torch.rand(5, device=DEVICE), after)


@pytest.mark.parametrize("backend", ["reference", "sdpa", "flash_attn"])
def test_attention_drops_what_its_key_says(backend: str) -> None:
    if backend == "flash_attn":
        needs.flash_attn()
    dtype = F64 if backend == "reference" else BF16
    q, k, v = (drawn(S, B, N, D).to(DEVICE, dtype).requires_grad_() for _ in range(3))

    def run(seed: int) -> list[Tensor]:
        extras = Extras(dropout_p=0.2, dropout_scope=rng.seeded(seed, q.device))
        out = ATTENTION[backend](q, k, v, RULE, extras)
        # In backward the generator stands elsewhere: the mask has to be the forward's all the same.
        torch.rand(1, device=DEVICE)
        return [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

    once, again, other = run(5), run(5), run(6)
    assert far(again[0], once[0]) == 0 and far(other[0], once[0]) > 0.05
    # Sums over queries may come in another order.
    assert max(far(a, b) for a, b in zip(again, once, strict=True)) <= 1e-2
    plain = ATTENTION[backend](q, k, v, RULE, Extras())
    assert far(once[0], plain) > 0.05


def test_the_table_chooses_what_works_here() -> None:
    def chosen(op: str, dtype: torch.dtype) -> Any:
        return table.choose(op, "auto", DEVICE, dtype)

    if DEVICE.type == "cuda":
        assert chosen("attention", F64) == "sdpa" and chosen("rms_norm", F64) == "torch"
        triton = probe.triton_missing(DEVICE, BF16) is None
        assert chosen("rms_norm", BF16) == ("triton" if triton else "torch")
        assert chosen("attention", BF16) in ("sdpa", "flash_attn")
