"""Rotary positions in Triton; `kernels.rope` says what they compute.

A program rotates some heads of one token: it reads the token's cosines and sines once. The backward
is the rotation by the negative angle.

Shapes: S sequence, B batch, n heads, D head size, f pairs; H and P heads and pairs of a tile.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels.triton_ops.shapes import side_by_side

HEADS = 8
"""Of a tile."""


@triton.jit
def _rotate(
    x_ptr, cos_ptr, sin_ptr, y_ptr, samples, heads, pairs, rest,
    x_token, x_sample, x_head, table_token, table_sample,
    SIGN: tl.constexpr, INTERLEAVED: tl.constexpr,
    H: tl.constexpr, P: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    token, sample = at // samples, at % samples
    head_H1 = (tl.program_id(1) * H + tl.arange(0, H))[:, None]
    pair_P = tl.arange(0, P)
    table_P = token * table_token + sample * table_sample + pair_P
    cos_1P = tl.load(cos_ptr + table_P, mask=pair_P < pairs, other=0.0)[None, :]
    sin_1P = tl.load(sin_ptr + table_P, mask=pair_P < pairs, other=0.0)[None, :] * SIGN
    if INTERLEAVED:
        one_1P = (2 * pair_P)[None, :]
        two_1P = one_1P + 1
    else:
        one_1P = pair_P[None, :]
        two_1P = one_1P + pairs
    inside_HP = (head_H1 < heads) & (pair_P < pairs)[None, :]
    x_H1 = x_ptr + token * x_token + sample * x_sample + head_H1 * x_head
    y_H1 = y_ptr + (at * heads + head_H1) * (2 * pairs + rest)
    a_HP = tl.load(x_H1 + one_1P, mask=inside_HP, other=0.0).to(tl.float32)
    b_HP = tl.load(x_H1 + two_1P, mask=inside_HP, other=0.0).to(tl.float32)
    kind = y_ptr.dtype.element_ty
    tl.store(y_H1 + one_1P, (a_HP * cos_1P - b_HP * sin_1P).to(kind), mask=inside_HP)
    tl.store(y_H1 + two_1P, (b_HP * cos_1P + a_HP * sin_1P).to(kind), mask=inside_HP)
    if REST:
        rest_1R = tl.arange(0, REST)[None, :]
        inside_HR = (head_H1 < heads) & (rest_1R < rest)
        rest_1R += 2 * pairs
        tl.store(y_H1 + rest_1R, tl.load(x_H1 + rest_1R, mask=inside_HR), mask=inside_HR)


def _launch(x_SBnD: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int) -> Tensor:
    assert x_SBnD.dim() == 4 and x_SBnD.stride(-1) == 1, (x_SBnD.shape, x_SBnD.stride())
    assert cos.is_contiguous() and sin.is_contiguous() and cos.shape == sin.shape, cos.stride()
    S, B, heads, D = x_SBnD.shape
    pairs = cos.shape[-1]
    assert cos.shape in ((S, pairs), (S, B, pairs)) and 2 * pairs <= D, (x_SBnD.shape, cos.shape)
    rest = D - 2 * pairs
    y_SBnD = torch.empty(x_SBnD.shape, dtype=x_SBnD.dtype, device=x_SBnD.device)
    if y_SBnD.numel():
        tile = min(HEADS, triton.next_power_of_2(heads))
        _rotate[(S * B, triton.cdiv(heads, tile))](
            x_SBnD, cos, sin, y_SBnD, B, heads, pairs, rest, *x_SBnD.stride()[:3],
            cos.stride(0), cos.stride(1) if cos.dim() == 3 else 0,
            SIGN=sign, INTERLEAVED=interleaved, H=tile, P=triton.next_power_of_2(pairs),
            REST=triton.next_power_of_2(rest) if rest else 0, num_warps=4,
        )  # fmt: skip
    return y_SBnD


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SBnD: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _launch(x_SBnD, cos, sin, interleaved, 1)

    @staticmethod
    def backward(ctx: Any, grad_SBnD: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        dx_SBnD = _launch(side_by_side(grad_SBnD), cos, sin, ctx.interleaved, -1)
        return dx_SBnD, None, None, None


def apply_rope(x_SBnD: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Return what `kernels.rope.apply_rope_reference` returns.

    The head's channels must stand side by side, as in a piece of a projection; fp32 tables must be
    contiguous.
    """
    return _Rotate.apply(x_SBnD, cos, sin, interleaved)  # type: ignore[no-any-return]
