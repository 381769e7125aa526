"""Cross entropy over a cut vocabulary against torch's: padding, smoothing, any upstream weights."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.kernels.cross_entropy import IN_PLACE, IN_PLACE_HALF, REFERENCE, Kernels
from megatron.core.mesh import Mesh
from megatron.core.sharding import Init
from megatron.core.tensor_parallel.cross_entropy import cross_entropy
from megatron.core.tensor_parallel.embedding import VocabParallelEmbedding, VocabularyRows


@pytest.mark.parametrize("kernels", [IN_PLACE, REFERENCE], ids=["in place", "reference"])
@pytest.mark.parametrize("padded", [11, 16])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_equals_torch(padded: int, smoothing: float, kernels: Kernels) -> None:
    torch.manual_seed(0)
    mesh = Mesh.serial()
    logits = (torch.randn(5, 2, padded, dtype=torch.float64) * 4).requires_grad_()
    labels = torch.randint(0, 11, (5, 2))
    weights = torch.rand(5, 2, dtype=torch.float64)
    expected = F.cross_entropy(
        logits[..., :11].flatten(0, 1),
        labels.flatten(),
        reduction="none",
        label_smoothing=smoothing,
    ).view(5, 2)
    (want,) = torch.autograd.grad((expected * weights).sum(), logits)
    losses = cross_entropy(
        logits.clone(), labels, VocabularyRows(11, padded, mesh), mesh.tp, smoothing, kernels
    )
    (got,) = torch.autograd.grad((losses * weights).sum(), logits)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert (got[..., 11:] == 0).all()


def test_huge_logits_do_not_overflow() -> None:
    mesh = Mesh.serial()
    logits = torch.tensor([[[1e4, -1e4, 0.0]]], requires_grad=True)
    rows = VocabularyRows(3, 3, mesh)
    losses = cross_entropy(logits.clone(), torch.tensor([[1]]), rows, mesh.tp)
    losses.sum().backward()
    assert losses.item() == pytest.approx(2e4)
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_bf16_logits_give_fp32_losses() -> None:
    mesh = Mesh.serial()
    logits = torch.randn(4, 1, 8).bfloat16().requires_grad_()
    losses = cross_entropy(
        logits.clone(), torch.ones(4, 1).long(), VocabularyRows(8, 8, mesh), mesh.tp
    )
    losses.sum().backward()
    assert losses.dtype == torch.float32
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_fp16_exponentials_overwrite_the_logits(smoothing: float) -> None:
    """--fp16-lm-cross-entropy: each exponential is rounded to fp16, what is said of a token not."""
    torch.manual_seed(0)
    mesh, rows = Mesh.serial(), VocabularyRows(300, 384, Mesh.serial())
    logits = (torch.randn(5, 2, 384) * 4).half().requires_grad_()
    labels, weights = torch.randint(0, 300, (5, 2)), torch.rand(5, 2)
    own = logits.clone()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        losses = cross_entropy(own, labels, rows, mesh.tp, smoothing, IN_PLACE_HALF)
    (got,) = torch.autograd.grad((losses * weights).sum(), logits)
    assert losses.dtype == torch.float32 and got.dtype == torch.float16
    matrices = [x for x in saved if x.numel() == own.numel()]
    assert [x.data_ptr() for x in matrices] == [own.data_ptr()]
    # The same, written out: exponentials in fp16, all else in fp32.
    wide = logits.detach()[..., :300].float()
    largest = wide.amax(-1, keepdim=True)
    exponentials = (wide - largest).half().exp()
    log_total = largest + exponentials.sum(-1, keepdim=True, dtype=torch.float32).log()
    logs = wide - log_total
    expected = -(1 - smoothing) * logs.gather(-1, labels[..., None]) - smoothing * logs.mean(
        -1, keepdim=True
    )
    torch.testing.assert_close(losses, expected[..., 0], rtol=1e-5, atol=1e-5)
    target = F.one_hot(labels, 300) * (1 - smoothing) + smoothing / 300
    total = exponentials.sum(-1, keepdim=True, dtype=torch.float32)
    grad = (exponentials.float() / total - target) * weights[..., None]
    torch.testing.assert_close(got[..., :300].float(), grad, rtol=2**-9, atol=2**-9)
    assert (got[..., 300:] == 0).all()
    # And not far from fp32.
    exact = F.cross_entropy(
        wide.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=smoothing
    )
    torch.testing.assert_close(losses.flatten(), exact, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("has_buffer", [False, True])
def test_embedding_gradient_equals_torch(has_buffer: bool) -> None:
    """With and without a gradient buffer, repeated tokens included."""
    torch.manual_seed(1)
    mesh = Mesh.serial()
    layer = VocabParallelEmbedding(VocabularyRows(6, 8, mesh), 4, Init(), mesh, torch.float64)
    weight = torch.randn(8, 4, dtype=torch.float64)
    layer.weight.data.copy_(weight)
    before = torch.full_like(layer.weight, 0.5) if has_buffer else None
    layer.weight.grad = before.clone() if before is not None else None
    tokens, upstream = (
        torch.tensor([[1, 1, 5], [0, 1, 5]]),
        torch.randn(3, 2, 4, dtype=torch.float64),
    )
    reference = weight.clone().requires_grad_()
    F.embedding(tokens.t(), reference).backward(upstream)
    layer(tokens).backward(upstream)
    assert reference.grad is not None
    expected = reference.grad if before is None else reference.grad + before
    torch.testing.assert_close(layer.weight.grad, expected)
