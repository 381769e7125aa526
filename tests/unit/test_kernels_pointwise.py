"""Norms, activations and rotary positions against formulas written out here, in float64."""

import json
import math
from pathlib import Path

import pytest
import torch

from megatron.core.kernels import activation, norm, rope

F64 = torch.float64
ROPE = json.loads((Path(__file__).parent.parent / "data" / "rope_frequencies.json").read_text())


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(3)


def equal(got, want, inputs, tolerance=1e-12):
    """Values and gradients with an uneven upstream gradient."""
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    weight = torch.linspace(-2, 1, got.numel(), dtype=got.dtype).view(got.shape).cos()
    pair = [torch.autograd.grad((y * weight).sum(), inputs) for y in (got, want)]
    torch.testing.assert_close(*pair, rtol=tolerance, atol=tolerance)


SHAPES = [(1, 1, 5), (7, 3, 8), (2, 1)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("function", [norm.layer_norm, norm.layer_norm_reference])
def test_layer_norm(function, shape, zero_centered, bias):
    x = torch.randn(shape, dtype=F64, requires_grad=True)
    w = torch.randn(shape[-1], dtype=F64, requires_grad=True)
    b = torch.randn(shape[-1], dtype=F64, requires_grad=True) if bias else None
    mean = x.sum(-1, keepdim=True) / shape[-1]
    std = (((x - mean) ** 2).sum(-1, keepdim=True) / shape[-1] + 1e-3).sqrt()
    want = (x - mean) / std * (1 + w if zero_centered else w)
    want = want if b is None else want + b
    inputs = [t for t in (x, w, b) if t is not None]
    equal(function(x, w, b, 1e-3, zero_centered), want, inputs, 1e-11)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("function", [norm.rms_norm, norm.rms_norm_torch, norm.rms_norm_reference])
def test_rms_norm(function, shape, zero_centered, weighted):
    x = torch.randn(shape, dtype=F64, requires_grad=True)
    w = torch.randn(shape[-1], dtype=F64, requires_grad=True) if weighted else None
    want = x / ((x**2).sum(-1, keepdim=True) / shape[-1] + 1e-3).sqrt()
    if w is not None:
        want = want * (1 + w if zero_centered else w)
    inputs = [x] if w is None else [x, w]
    equal(function(x, w, 1e-3, zero_centered), want, inputs)


def test_rms_norm_gradcheck_of_strided_input():
    x = torch.randn(3, 4, 2, dtype=F64).transpose(1, 2).requires_grad_()
    w = torch.randn(4, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: norm.rms_norm(x, w, 1e-5), (x, w))


def test_rms_norm_without_gains_has_unit_mean_square():
    y = norm.rms_norm(torch.randn(5, 16, dtype=F64), None, 0.0)
    torch.testing.assert_close(y.square().mean(-1), torch.ones(5, dtype=F64))


@pytest.mark.parametrize("function", [norm.rms_norm, norm.rms_norm_reference])
def test_rms_norm_of_bf16_takes_statistics_in_fp32(function):
    """A sum of 4096 squares in bf16 would stop growing at 256."""
    x = torch.ones(1, 4096, dtype=torch.bfloat16)
    assert (function(x, torch.ones(4096, dtype=torch.bfloat16), 0.0) == 1).all()


def gauss(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gauss_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


FORMULAS = {
    "gelu": gauss,
    "gelu_tanh": gauss_tanh,
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "relu": lambda x: torch.where(x > 0, x, 0 * x),
    "squared_relu": lambda x: torch.where(x > 0, x * x, 0 * x),
}
GATES = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "quick_geglu": "quick_gelu",
    "reglu": "relu",
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", activation.PLAIN)
def test_plain_activation(name, bias):
    x = (3 * torch.randn(5, 2, 6, dtype=F64)).requires_grad_()
    b = torch.randn(6, dtype=F64, requires_grad=True) if bias else None
    inputs = [x] if b is None else [x, b]
    want = FORMULAS[name](x if b is None else x + b)
    equal(activation.REFERENCES[name](x, b), want, inputs)


@pytest.mark.parametrize(("clamp", "offset"), [(None, 0.0), (1.0, 0.0), (None, 1.0), (0.7, 1.0)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", activation.GATED)
def test_gated_activation_reads_gate_then_up(name, bias, clamp, offset):
    x = (2 * torch.randn(5, 2, 6, dtype=F64)).requires_grad_()
    b = torch.randn(6, dtype=F64, requires_grad=True) if bias else None
    inputs = [x] if b is None else [x, b]
    z = x if b is None else x + b
    gate, up = z[..., :3], z[..., 3:]
    if clamp is not None:
        # The gate from above only, the up half on both sides.
        gate = torch.where(gate > clamp, clamp + 0 * gate, gate)
        up = torch.where(up.abs() > clamp, clamp * up.sign() + 0 * up, up)
    want = FORMULAS[GATES[name]](gate) * (up + offset)
    equal(activation.REFERENCES[name](x, b, clamp, offset), want, inputs)


def test_every_config_name_is_there():
    names = {"gelu", "gelu_tanh", "squared_relu", "swiglu", "geglu", "quick_geglu"}
    names |= {"relu", "geglu_tanh"}
    assert names <= set(activation.REFERENCES)


def rotate_by_hand(x, angles, interleaved):
    """Rotate one pair of channels after the other, as points of the plane."""
    f = angles.shape[-1]
    channels = list(x.unbind(-1))
    for i in range(f):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + f)
        angle = angles[..., i]
        angle = angle[:, None, None] if angle.dim() == 1 else angle[:, :, None]
        one = x[..., a] * torch.cos(angle) - x[..., b] * torch.sin(angle)
        two = x[..., a] * torch.sin(angle) + x[..., b] * torch.cos(angle)
        channels[a], channels[b] = one, two
    return torch.stack(channels, -1)


@pytest.mark.parametrize("function", [rope.apply_rope, rope.apply_rope_reference])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("r", [2, 6, 8])
@pytest.mark.parametrize("per_sample", [False, True])
def test_rotation(function, interleaved, r, per_sample):
    x = torch.randn(7, 3, 2, 8, dtype=F64, requires_grad=True)
    positions = torch.randint(0, 50, (7, 3)) if per_sample else torch.arange(7)
    inv_freq = rope.inverse_frequencies(r, 100.0)
    cos, sin = rope.rope_tables(inv_freq, positions, F64)
    want = rotate_by_hand(x, positions[..., None] * inv_freq, interleaved)
    equal(function(x, cos, sin, interleaved), want, [x])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_of_a_view_of_half_precision(interleaved):
    """The sum is taken in fp32 and rounded once."""
    x = torch.randn(5, 2, 3, 24).to(torch.bfloat16)[..., 8:16].requires_grad_()
    cos, sin = rope.rope_tables(rope.inverse_frequencies(8, 1e4), torch.arange(5), x.dtype)
    assert cos.dtype == torch.float32
    got = rope.apply_rope(x, cos, sin, interleaved)
    want = rotate_by_hand(
        x.to(F64), torch.arange(5)[:, None] * rope.inverse_frequencies(8, 1e4), interleaved
    )
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.to(F64), want, rtol=2**-8, atol=1e-6)
    got.sum().backward()


def test_scores_depend_on_distance_only():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=F64)
    inv_freq = rope.inverse_frequencies(8, 10000.0)

    def score(at, to):
        tables = [rope.rope_tables(inv_freq, torch.tensor([p]), F64) for p in (at, to)]
        return (rope.apply_rope(q, *tables[0]) * rope.apply_rope(k, *tables[1])).sum()

    torch.testing.assert_close(score(9, 4), score(1009, 1004), rtol=1e-11, atol=1e-11)
    assert abs(score(9, 4) - score(9, 5)) > 1e-6


def test_plain_and_interpolated_frequencies():
    want = [1.0, 0.1, 0.01, 0.001]
    assert rope.inverse_frequencies(8, 10000).tolist() == pytest.approx(want, rel=1e-14)
    got = rope.inverse_frequencies(8, 10000, 4).tolist()
    assert got == pytest.approx([x / 4 for x in want], rel=1e-14)


@pytest.mark.parametrize("name", ROPE["cases"])
def test_scaled_frequencies_equal_those_of_another_library(name):
    """The file says where its numbers come from; they are fp32."""
    case = ROPE["cases"][name]
    plain = rope.inverse_frequencies(case["dim"], case["base"])
    if case["rope_type"] == "llama3":
        got = rope.llama3_frequencies(plain, case["factor"])
    elif case["rope_type"] == "linear":
        got = rope.inverse_frequencies(case["dim"], case["base"], case["factor"])
    else:
        got = rope.yarn_frequencies(
            case["dim"],
            case["base"],
            case["factor"],
            case["original_max_position_embeddings"],
            case["beta_fast"],
            case["beta_slow"],
            case.get("truncate", True),
        )
        scale = rope.yarn_mscale(case["factor"], case.get("mscale", 1.0))
        if "mscale_all_dim" in case:
            scale /= rope.yarn_mscale(case["factor"], case["mscale_all_dim"])
        assert scale == pytest.approx(case["attention_factor"], rel=1e-12)
    want = torch.tensor(case["inv_freq"], dtype=F64)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0.0)


def test_concentration_multiplies_both_tables():
    inv_freq, at = rope.inverse_frequencies(4, 10.0), torch.arange(3)
    plain, hot = rope.rope_tables(inv_freq, at, F64), rope.rope_tables(inv_freq, at, F64, 1.5)
    for a, b in zip(plain, hot, strict=True):
        torch.testing.assert_close(a * 1.5, b)


def test_angles_far_out_are_exact():
    """At position 1,000,000 an fp32 angle of the fastest but one channel is off by hundredths."""
    inv_freq = rope.inverse_frequencies(128, 500000.0)
    cos, _ = rope.rope_tables(inv_freq, torch.tensor([1_000_000]), torch.float32)
    want = math.cos(1_000_000 * 500000.0 ** (-2 / 128))
    assert abs(cos[0, 1].item() - want) < 1e-6
