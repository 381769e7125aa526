"""Rotary position embedding (Su et al., 2021): rotate pairs of channels by position * frequency.

The frequencies of a head come from `inverse_frequencies`, optionally stretched to longer contexts
by `llama3_frequencies` or `yarn_frequencies`; `rope_tables` turns them and positions into cosines
and sines, and `apply_rope` rotates. Angles are computed in fp64 and rounded once: an fp32 angle
at position 100,000 is wrong by several thousandths.

Channels that rotate are the first ``r`` of D. A pair is (i, i + r/2), or with ``interleaved``
(2i, 2i + 1).

Shapes: S sequence, B batch, n heads, D head size, r channels that rotate, f = r / 2 frequencies.
"""

import math
from typing import Any

import torch
from torch import Tensor

from megatron.core.kernels.dtypes import accumulate_dtype


def inverse_frequencies(dim: int, base: float, interpolation: float | None = None) -> Tensor:
    """Return base ** (-2i / dim) in fp64; linear interpolation divides positions by its factor."""
    assert dim % 2 == 0, f"rotary dim {dim} is odd"
    frequencies = float(base) ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return frequencies if interpolation is None else frequencies / interpolation


def llama3_frequencies(
    inv_freq: Tensor,
    factor: float = 8.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_length: int = 8192,
) -> Tensor:
    """Return Llama 3.1's scaling: long waves are stretched by ``factor``, short ones kept.

    Waves that fit less than ``low_freq_factor`` times into the original context are long, those
    that fit more than ``high_freq_factor`` times are short; between, the two are blended.
    """
    turns = original_length * inv_freq / (2 * math.pi)
    keep = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    keep = keep.clamp(0, 1)
    return inv_freq * keep + inv_freq / factor * (1 - keep)


def yarn_frequencies(
    dim: int,
    base: float,
    factor: float,
    original_length: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    round_to_int: bool = True,
) -> Tensor:
    """Return YaRN's frequencies (Peng et al., 2023).

    Channels that turn more than ``beta_fast`` times over the original context are kept, those that
    turn less than ``beta_slow`` times are stretched by ``factor``, with a ramp over the channels
    between.
    """

    def channel(turns: float) -> float:
        return dim * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = channel(beta_fast), channel(beta_slow)
    if round_to_int:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # A ramp of no width would divide by zero.
    width = high - low or 0.001
    stretch = ((torch.arange(dim // 2, dtype=torch.float64) - low) / width).clamp(0, 1)
    frequencies = inverse_frequencies(dim, base)
    return frequencies * (1 - stretch) + frequencies / factor * stretch


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's attention temperature, 0.1 * mscale * ln(factor) + 1."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def rope_tables(
    inv_freq_f: Tensor, positions: Tensor, dtype: torch.dtype, concentration: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of shape [*positions.shape, f].

    ``positions`` is [S], or [S, B] where samples differ (packed documents, decoding).
    ``concentration`` multiplies both (YaRN's mscale). Tables of a half-precision model are fp32.
    """
    angles = positions.to(torch.float64)[..., None] * inv_freq_f.to(positions.device)
    dtype = accumulate_dtype(dtype)
    return (angles.cos() * concentration).to(dtype), (angles.sin() * concentration).to(dtype)


def apply_rope_reference(
    x_SBnD: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """Return ``x_SBnD`` with its first channels rotated; tables [S, f] or [S, B, f]."""
    r = 2 * cos.shape[-1]
    cos, sin = (t[:, None, None] if t.dim() == 2 else t[:, :, None] for t in (cos, sin))
    x, rest = x_SBnD[..., :r].to(cos.dtype), x_SBnD[..., r:]
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    y = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((y.to(x_SBnD.dtype), rest), -1)


def apply_rope(x_SBnD: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Return what `apply_rope_reference` returns, written in place of concatenated."""
    out: Tensor = _Rope.apply(x_SBnD, cos, sin, interleaved)
    return out


class _Rope(torch.autograd.Function):
    """The gradient of a rotation is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, 1, interleaved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, -1, ctx.interleaved), None, None, None


def _rotate(x_SBnD: Tensor, cos: Tensor, sin: Tensor, sign: int, interleaved: bool) -> Tensor:
    if x_SBnD.dtype != cos.dtype:
        # Half precision: products and sum in fp32, rounded once.
        return apply_rope_reference(x_SBnD, cos, sin * sign, interleaved)
    r = 2 * cos.shape[-1]
    cos, sin = (t[:, None, None] if t.dim() == 2 else t[:, :, None] for t in (cos, sin))
    y = torch.empty_like(x_SBnD, memory_format=torch.contiguous_format)
    if r < x_SBnD.shape[-1]:
        y[..., r:] = x_SBnD[..., r:]
    (a, b), (c, d) = (
        (t[..., :r:2], t[..., 1:r:2]) if interleaved else t[..., :r].chunk(2, -1)
        for t in (x_SBnD, y)
    )
    torch.mul(a, cos, out=c).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=d).addcmul_(a, sin, value=sign)
    return y
