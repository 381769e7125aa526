"""Cross entropy, alone and fused with the output head so that the logits never exist at once.

`linear_cross_entropy` walks over chunks of tokens: logits of a chunk, their loss, and, while they
are in the cache, their share of both gradients. So the logits are computed once, and memory is one
chunk plus the gradient of the matrix.

That needs each token's weight in the objective before backward has come. `token_weights_N` gives
it (the loss mask); backward checks that the gradient it receives is these weights times one number
and only scales. Any other gradient is right too, but pays for a second walk.

Walking a second time in any case would compute the logits twice, a third more products. Measured
with one CPU thread and 2048 tokens against plain torch: 0.78 of its time on the way forward, 1.0
(H 256, V 8192) and 1.2 (H 512, V 16384) with the second walk. Where the allocator keeps freed
memory plain torch gains as much; what is left is that the logits need not fit.

Rows of the matrix from ``vocab_size`` on pad the vocabulary: no probability, no gradient.

Shapes: N tokens, C tokens of a chunk, H hidden, V true vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Head:
    """How logits follow from hidden states; ``z = cap(multiplier * h @ W.T)``."""

    vocab_size: int
    """Rows that are tokens."""
    multiplier: float = 1.0
    softcap: float | None = None
    """Logits are bent into (-softcap, softcap) by tanh, after the multiplier."""
    label_smoothing: float = 0.0
    """Share of the target that is spread evenly over the vocabulary."""
    chunk: int = 256
    """Tokens at a time."""
    deliver: Callable[[Tensor, Tensor], Tensor | None] | None = None
    """Takes (weight, its gradient) in backward and returns what autograd shall add, if anything."""


def cross_entropy_reference(
    logits_NV: Tensor, labels_N: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """Return each token's loss, in at least fp32."""
    dtype = torch.promote_types(logits_NV.dtype, torch.float32)
    logp_NV = torch.log_softmax(logits_NV.to(dtype), -1)
    target_N = logp_NV.gather(-1, labels_N[:, None]).squeeze(-1)
    if not label_smoothing:
        return -target_N
    return -(1 - label_smoothing) * target_N - label_smoothing * logp_NV.mean(-1)


def linear_cross_entropy_reference(
    h_NH: Tensor,
    weight_VH: Tensor,
    labels_N: Tensor,
    head: Head,
    token_weights_N: Tensor | None = None,
) -> Tensor:
    """Return each token's loss, in at least fp32, with all logits at once."""
    dtype = torch.promote_types(h_NH.dtype, torch.float32)
    z_NV = head.multiplier * h_NH.to(dtype) @ weight_VH[: head.vocab_size].to(dtype).t()
    if head.softcap is not None:
        z_NV = head.softcap * torch.tanh(z_NV / head.softcap)
    return cross_entropy_reference(z_NV, labels_N, head.label_smoothing)


def linear_cross_entropy(
    h_NH: Tensor,
    weight_VH: Tensor,
    labels_N: Tensor,
    head: Head,
    token_weights_N: Tensor | None = None,
) -> Tensor:
    """Return each token's loss, in at least fp32, with gradients made on the way forward.

    Args:
        h_NH: hidden states.
        weight_VH: the head's matrix, padding rows included.
        labels_N: tokens below ``head.vocab_size``.
        head: how logits are made.
        token_weights_N: what each token's loss will be multiplied by, up to one common factor;
            absent means equally.
    """
    out: Tensor = _LinearCrossEntropy.apply(h_NH, weight_VH, labels_N, head, token_weights_N)
    return out


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, labels: Tensor, head: Head, weights: Tensor | None
    ) -> Tensor:
        needs = any(ctx.needs_input_grad[:2])
        losses, dh, dw = _walk(h, weight, labels, head, weights, needs)
        ctx.head = head
        ctx.save_for_backward(h, weight, labels, weights, dh, dw)
        return losses

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        h, weight, labels, weights, dh, dw = ctx.saved_tensors
        factor = _common_factor(grad_N, weights)
        if factor is None:
            _, dh, dw = _walk(h, weight, labels, ctx.head, grad_N, True)
            assert dh is not None and dw is not None
        else:
            dh, dw = dh * factor, dw * factor
        dh, dw = dh.to(h.dtype), dw.to(weight.dtype)
        deliver = ctx.head.deliver
        return dh, dw if deliver is None else deliver(weight, dw), None, None, None


def _common_factor(grad_N: Tensor, weights_N: Tensor | None) -> float | None:
    """Return the number that ``weights_N`` were multiplied by to give ``grad_N``, if there is."""
    if grad_N.numel() == 0:
        return 0.0
    if weights_N is None:
        factor = grad_N[0]
        product = factor.expand_as(grad_N)
    else:
        weights_N = weights_N.to(grad_N.dtype)
        largest = weights_N.abs().argmax()
        if weights_N[largest] == 0:
            return None if grad_N.any() else 0.0
        factor = grad_N[largest] / weights_N[largest]
        product = factor * weights_N
    # Weights that are not 0 or 1 are rounded once more on their way here.
    close = torch.allclose(product, grad_N, rtol=4 * torch.finfo(grad_N.dtype).eps, atol=0.0)
    return float(factor) if close else None


@torch.no_grad()
def _walk(
    h: Tensor, weight: Tensor, labels: Tensor, head: Head, weights: Tensor | None, needs: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return losses and, when ``needs``, the gradients of their sum weighted by ``weights``."""
    dtype = torch.promote_types(h.dtype, torch.float32)
    h, w_VH = h.to(dtype), weight[: head.vocab_size].to(dtype)
    N, V = len(h), head.vocab_size
    losses = h.new_empty(N)
    dh = torch.empty_like(h) if needs else None
    # Padding rows stay zero; without tokens, so does the rest.
    dw = torch.empty_like(weight, dtype=dtype) if needs else None
    if dw is not None:
        dw[V if N else 0 :] = 0
    buffer = h.new_empty(min(head.chunk, N), V)
    for start in range(0, N, head.chunk):
        part = slice(start, min(start + head.chunk, N))
        z_CV = torch.mm(h[part], w_VH.t(), out=buffer[: part.stop - start])
        losses[part], slope_CV = _loss_and_slope(z_CV, labels[part], head, needs)
        if dh is None or dw is None:
            continue
        if weights is not None:
            slope_CV.mul_(weights[part, None])
        torch.mm(slope_CV, w_VH, out=dh[part])
        dw[:V].addmm_(slope_CV.t(), h[part], beta=float(start > 0))
    return losses, dh, dw


def _loss_and_slope(
    z_CV: Tensor, labels_C: Tensor, head: Head, needs: bool
) -> tuple[Tensor, Tensor]:
    """Turn products ``h @ W.T`` into losses and their slopes in the same storage."""
    if head.multiplier != 1.0:
        z_CV.mul_(head.multiplier)
    bend_CV = None
    if head.softcap is not None:
        z_CV.div_(head.softcap).tanh_()
        bend_CV = 1 - z_CV.square() if needs else None
        z_CV.mul_(head.softcap)
    gold_C1 = labels_C[:, None]
    smoothing = head.label_smoothing
    target_C = z_CV.gather(1, gold_C1).squeeze(1)
    if smoothing:
        target_C = (1 - smoothing) * target_C + smoothing * z_CV.mean(1)
    largest_C = z_CV.amax(1)
    torch.softmax(z_CV, 1, out=z_CV)
    # exp(largest - logsumexp) is at least 1 / V: its logarithm is safe, the target's may not be.
    losses_C = largest_C - z_CV.amax(1).log() - target_C
    if not needs:
        return losses_C, z_CV
    if smoothing:
        z_CV.sub_(smoothing / head.vocab_size)
    z_CV.scatter_add_(1, gold_C1, z_CV.new_full((len(z_CV), 1), smoothing - 1))
    if bend_CV is not None:
        z_CV.mul_(bend_CV)
    if head.multiplier != 1.0:
        z_CV.mul_(head.multiplier)
    return losses_C, z_CV
