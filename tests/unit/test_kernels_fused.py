"""References of the fused kernels against published numbers, torch, and formulas written out."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.core.kernels import activation, cross_entropy, philox, table
from megatron.core.kernels.adam import AdamStep, adam_reference
from megatron.core.kernels.cross_entropy import IN_PLACE, IN_PLACE_HALF, REFERENCE, Kernels
from megatron.core.kernels.dropout import bias_dropout_add, bias_dropout_add_reference, dropout
from megatron.core.kernels.masked_softmax import masked_softmax_reference

F64 = torch.float64
CPU = torch.device("cpu")
ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ONES,) * 4, (ONES, ONES), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: str
) -> None:
    """Those of the authors' library, Random123, for Philox-4x32-10."""
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    found = philox.philox((c0, c1, c2, c3), key[0] + (key[1] << 32))
    assert [f"{word.item():08x}" for word in found] == words.split()


def test_a_mask_is_a_function_of_place_and_seed() -> None:
    """Whatever the size of the matrix that it is drawn for; and it drops what it should."""
    small, large = (philox.keep_mask(n, 4 * n + 3, 0.3, 99, CPU) for n in (3, 200))
    assert torch.equal(small, large[:3, :15])
    dropped = 1 - large.double().mean().item()
    assert abs(dropped - 0.3) < 4 * (0.3 * 0.7 / large.numel()) ** 0.5
    # No two rows, and no two words of a block, are alike.
    assert len(large.unique(dim=0)) == 200
    assert len(large[:, :800].view(200, 200, 4).permute(2, 0, 1).flatten(1).unique(dim=0)) == 4
    others = [philox.keep_mask(200, 803, 0.3, seed, CPU) for seed in (98, 99 + 2**32, 99 + 2**63)]
    for other in others:
        assert abs((other == large).double().mean().item() - (0.3**2 + 0.7**2)) < 0.01
    assert philox.keep_mask(4, 4, 0.0, 5, CPU).all()


def terms(dtype: torch.dtype = F64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((5, 3, 6), (6,), (5, 3, 6))
    y, bias, residual = (
        torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for shape in shapes
    )
    return y, bias, residual


@pytest.mark.parametrize("form", [bias_dropout_add, bias_dropout_add_reference])
def test_a_mask_does_not_hang_on_the_order_in_memory(form: Callable[..., Tensor]) -> None:
    """An embedding's output is strided in one layout and contiguous in another."""
    y = torch.randn(3, 5, 6, dtype=F64).transpose(0, 1).requires_grad_()
    same = y.detach().contiguous().requires_grad_()
    outs = [form(one, None, torch.zeros(5, 3, 6, dtype=F64), 0.5, 7) for one in (y, same)]
    grads = torch.autograd.grad(outs[0].sum(), y) + torch.autograd.grad(outs[1].sum(), same)
    assert torch.equal(outs[0], outs[1]) and torch.equal(grads[0], grads[1])


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("biased", [False, True])
def test_bias_dropout_add_is_the_sum_written_out(biased: bool, p: float) -> None:
    y, bias, residual = terms()
    masks = {
        bias_dropout_add_reference: philox.keep_mask(15, 6, p, 77, CPU).view(5, 3, 6) / (1 - p),
        bias_dropout_add: dropout(torch.ones(5, 3, 6, dtype=F64), p, 77),
    }
    assert not p or not torch.equal(*masks.values())
    for function, factor in masks.items():
        inputs = (y, residual, bias) if biased else (y, residual)
        want = residual + (y + bias if biased else y) * factor
        got = function(y, bias if biased else None, residual, p, 77)
        weight = torch.linspace(-1, 2, got.numel(), dtype=F64).view(got.shape)
        torch.testing.assert_close(got, want)
        pair = [torch.autograd.grad((out * weight).sum(), inputs) for out in (got, want)]
        torch.testing.assert_close(*pair)


def test_a_half_joins_an_fp32_stream_in_fp32() -> None:
    y, _, _ = terms(torch.bfloat16)
    residual = torch.full(y.shape, 1024.0)
    for function in (bias_dropout_add_reference, bias_dropout_add):
        out = function(y, None, residual, 0.0, 0)
        assert out.dtype == torch.float32 and torch.equal(out, residual + y.float())


@pytest.mark.parametrize("bounds", [(None, 0.0), (0.7, 0.0), (0.7, 1.0)])
@pytest.mark.parametrize("bias", [False, True])
def test_swiglu_that_keeps_its_input_alone(bias: bool, bounds: tuple[float | None, float]) -> None:
    x = torch.randn(5, 2, 6, dtype=F64, requires_grad=True)
    b = torch.randn(6, dtype=F64, requires_grad=True) if bias else None
    inputs = [x] if b is None else [x, b]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        got = activation.swiglu_function(x, b, *bounds)
    assert [t.shape for t in saved] == [x.shape]
    want = activation.swiglu(x, b, *bounds)
    grad = torch.randn_like(got)
    torch.testing.assert_close(got, want)
    pair = [torch.autograd.grad(y, inputs, grad) for y in (got, want)]
    torch.testing.assert_close(*pair)


@pytest.mark.parametrize("kernels", [IN_PLACE, IN_PLACE_HALF], ids=["wide", "own dtype"])
@pytest.mark.parametrize("valid", [9, 6, 0])
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("slab", [cross_entropy.SLAB, 20], ids=["at once", "by slabs"])
def test_halves_of_a_cross_entropy_agree(
    kernels: Kernels, valid: int, summed: bool, slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "SLAB", slab)
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(5, 9, dtype=F64, generator=generator)
    labels = torch.tensor([-1, 0, 5, -1, 2]) if valid else torch.full((5,), -1)
    own, reference = (
        k.statistics(logits.clone(), labels, valid, summed) for k in (kernels, REFERENCE)
    )
    for name in ("largest_N", "total_N", "target_N", "summed_N"):
        torch.testing.assert_close(getattr(own, name), getattr(reference, name))
    divisor, grad, minus = torch.rand(3, 5, dtype=F64, generator=generator) + 0.5
    rest = (divisor, grad, minus, 0.01)
    assert kernels.keeps_exponentials and not REFERENCE.keeps_exponentials
    got = kernels.gradient(own.kept_Nv, labels, valid, None, *rest)
    largest = reference.largest_N if valid else torch.zeros(5, dtype=F64)
    want = REFERENCE.gradient(reference.kept_Nv, labels, valid, largest, *rest)
    torch.testing.assert_close(got, want)
    assert (got[:, valid:] == 0).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_masked_softmax_is_written_out(causal: bool, masked: bool) -> None:
    scores = torch.randn(2, 3, 5, 5, dtype=F64)
    visible = torch.rand(2, 1, 5, 5) < 0.5 if masked else None
    if visible is not None:
        visible[0, 0, 0] = False
    allowed = torch.ones(2, 3, 5, 5, dtype=torch.bool)
    if causal:
        allowed &= torch.arange(5)[None] <= torch.arange(5)[:, None]
    if visible is not None:
        allowed &= visible
    weights = torch.exp(-0.6 * scores) * allowed
    want = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    torch.testing.assert_close(masked_softmax_reference(scores, visible, causal, -0.6), want)


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_is_torchs(decoupled: bool) -> None:
    """Three steps, with a divisor of the gradient, which torch's kernel overwrites."""
    generator = torch.Generator().manual_seed(3)
    ours = [torch.randn(50, generator=generator) for _ in range(3)]
    ours.append(torch.rand(50, generator=generator))
    theirs = [tensor.clone() for tensor in ours]
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
    for number in range(1, 4):
        scale, found = torch.tensor(2.0), torch.tensor(float(number == 2))
        step = AdamStep(
            1e-2, 0.9, 0.999, 1e-8, 0.1, decoupled, torch.tensor(float(number)), scale, found
        )
        adam_reference(*ours, step)
        kernel(
            *([tensor] for tensor in theirs), [], [step.number], lr=1e-2, beta1=0.9, beta2=0.999,
            weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False, grad_scale=scale,
            found_inf=found,
        )  # fmt: skip
        theirs[1].copy_(ours[1])
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


def test_adam_rounds_each_array_once() -> None:
    values = [torch.randn(100, dtype=torch.bfloat16) for _ in range(3)]
    values.append(torch.rand(100, dtype=torch.bfloat16))
    wide = [tensor.double() for tensor in values]
    step = AdamStep(1e-2, 0.9, 0.999, 1e-8, 0.0, True, torch.tensor(5.0), None, torch.tensor(0.0))
    adam_reference(*values, step)
    adam_reference(*wide, step)
    for got, want in zip(values, wide, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-6)


def test_every_op_has_a_reference_that_is_everywhere() -> None:
    for op, backends in table.TABLE.items():
        for device in (CPU, torch.device("cuda")):
            for dtype in (torch.float32, F64, torch.bfloat16, torch.float16):
                assert backends["reference"].missing(device, dtype) is None, op
