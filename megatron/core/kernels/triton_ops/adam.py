"""One step of Adam in Triton; `kernels.adam` says what it computes.

Every array is read and written once, each in a dtype of its own: moments and masters of 16 bits
are widened in registers, where torch's fused kernel would need wide copies.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels.adam import AdamStep

ELEMENTS = 1024
WARPS = 4


@triton.jit
def _adam(
    parameter_ptr, grad_ptr, m_ptr, v_ptr, number_ptr, inverse_scale_ptr, found_ptr, count,
    lr, beta1, rest1, log_beta1, beta2, rest2, log_beta2, eps, weight_decay,
    DECOUPLED: tl.constexpr, SCALED: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    if tl.load(found_ptr) == 0.0:
        at_E = tl.program_id(0).to(tl.int64) * E + tl.arange(0, E)
        inside_E = at_E < count
        p_E = tl.load(parameter_ptr + at_E, mask=inside_E).to(tl.float32)
        g_E = tl.load(grad_ptr + at_E, mask=inside_E).to(tl.float32)
        m_E = tl.load(m_ptr + at_E, mask=inside_E).to(tl.float32)
        v_E = tl.load(v_ptr + at_E, mask=inside_E).to(tl.float32)
        if SCALED:
            g_E /= tl.load(inverse_scale_ptr)
        if DECOUPLED:
            p_E *= 1.0 - lr * weight_decay
        else:
            g_E += weight_decay * p_E
        # In fp64: 1 - beta^t of the first steps is a difference of numbers that are nearly equal.
        number = tl.load(number_ptr).to(tl.float64)
        first = (1.0 - tl.exp(number * log_beta1)).to(tl.float32)
        second = (1.0 - tl.exp(number * log_beta2)).to(tl.float32)
        m_E = beta1 * m_E + rest1 * g_E
        v_E = beta2 * v_E + rest2 * g_E * g_E
        p_E -= lr / first * m_E / (tl.sqrt(v_E / second) + eps)
        tl.store(parameter_ptr + at_E, p_E.to(parameter_ptr.dtype.element_ty), mask=inside_E)
        tl.store(m_ptr + at_E, m_E.to(m_ptr.dtype.element_ty), mask=inside_E)
        tl.store(v_ptr + at_E, v_E.to(v_ptr.dtype.element_ty), mask=inside_E)


def adam(
    parameter: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: AdamStep
) -> None:
    """Update parameter and moments in place as `kernels.adam.adam_reference` does, in fp32.

    All four are contiguous vectors of one length, none of them fp64.
    """
    for tensor in (parameter, grad, exp_avg, exp_avg_sq):
        assert tensor.is_contiguous() and tensor.shape == parameter.shape, tensor.stride()
        assert tensor.dtype != torch.float64, "the kernel counts in fp32"
    if not parameter.numel():
        return
    _adam[(triton.cdiv(parameter.numel(), ELEMENTS),)](
        parameter, grad, exp_avg, exp_avg_sq, step.number, step.inverse_scale,
        step.found_nonfinite, parameter.numel(), step.lr,
        step.beta1, 1 - step.beta1, math.log(step.beta1) if step.beta1 else -1e30,
        step.beta2, 1 - step.beta2, math.log(step.beta2) if step.beta2 else -1e30,
        step.eps, step.weight_decay, DECOUPLED=step.decoupled,
        SCALED=step.inverse_scale is not None, E=ELEMENTS, num_warps=WARPS,
    )  # fmt: skip
