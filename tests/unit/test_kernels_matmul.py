"""Products and fused cross entropy against plain torch in float64."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.kernels import matmul
from megatron.core.kernels.cross_entropy import (
    Head,
    cross_entropy_reference,
    linear_cross_entropy,
    linear_cross_entropy_reference,
)

F64 = torch.float64


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(5)


@pytest.mark.parametrize("function", [matmul.linear, matmul.linear_torch, matmul.linear_upcast])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(function, bias):
    x = torch.randn(3, 2, 5, dtype=F64, requires_grad=True)
    w = torch.randn(4, 5, dtype=F64, requires_grad=True)
    b = torch.randn(4, dtype=F64, requires_grad=True) if bias else None
    inputs = [x, w] if b is None else [x, w, b]
    want = torch.einsum("sbi,oi->sbo", x, w)
    want = want if b is None else want + b
    got = function(x, w, b)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    grads = [torch.autograd.grad(y.sin().sum(), inputs) for y in (got, want)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_upcast_rounds_once(dtype):
    """Exactly the fp32 result, rounded: no partial sum is kept in half precision."""
    x, w, g = (torch.randn(s).to(dtype) for s in ((9, 300), (7, 300), (9, 7)))
    x.requires_grad_(), w.requires_grad_()
    y = matmul.linear_upcast(x, w)
    assert torch.equal(y, (x.float() @ w.float().t()).to(dtype))
    dx, dw = torch.autograd.grad(y, (x, w), g)
    assert torch.equal(dx, (g.float() @ w.float()).to(dtype))
    assert torch.equal(dw, (g.float().t() @ x.float()).to(dtype))


def test_matmul_rounds_once_whatever_the_machine(monkeypatch):
    a, b = torch.randn(9, 300).to(torch.bfloat16), torch.randn(300, 5).to(torch.bfloat16)
    want = (a.to(F64) @ b.to(F64)).to(torch.bfloat16)
    for features in (frozenset(), frozenset({"amx_bf16"})):
        monkeypatch.setattr(matmul, "cpu_features", lambda features=features: features)
        torch.testing.assert_close(matmul.matmul(a, b), want, rtol=2**-7, atol=1e-2)


def test_upcast_is_chosen_only_where_half_is_slow(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(matmul, "cpu_features", lambda: frozenset({"avx2"}))
    assert matmul.upcast_pays(cpu, torch.bfloat16) and matmul.upcast_pays(cpu, torch.float16)
    assert not matmul.upcast_pays(cpu, torch.float32)
    assert not matmul.upcast_pays(torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr(matmul, "cpu_features", lambda: frozenset({"amx_bf16"}))
    assert not matmul.upcast_pays(cpu, torch.bfloat16)
    assert matmul.upcast_pays(cpu, torch.float16)


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_weight_gradients_add_up_in_the_buffer(dtype):
    """Small steps onto a large sum, which bf16 would lose."""
    buffer_dtype = torch.promote_types(dtype, torch.float32)
    buffer = torch.full((4, 5), 1000.0, dtype=buffer_dtype)
    g, x = torch.randn(3, 2, 4).to(dtype), torch.randn(3, 2, 5).to(dtype)
    for _ in range(3):
        matmul.accumulate_wgrad(buffer, g, x)
    want = 1000 + 3 * torch.einsum("sbo,sbi->oi", g.to(F64), x.to(F64))
    torch.testing.assert_close(buffer.to(F64), want, rtol=1e-6, atol=0.0)


N, H, V = 11, 4, 9
HEADS = {
    "plain": Head(vocab_size=V, chunk=4),
    "one_chunk": Head(vocab_size=V, chunk=100),
    "tokenwise": Head(vocab_size=V, chunk=1),
    "multiplier": Head(vocab_size=V, chunk=4, multiplier=0.3),
    "softcap": Head(vocab_size=V, chunk=4, multiplier=2.0, softcap=1.5),
    "smoothing": Head(vocab_size=V, chunk=4, label_smoothing=0.2),
    "all": Head(vocab_size=V, chunk=3, multiplier=1.5, softcap=2.0, label_smoothing=0.1),
}


def by_torch(h, w, labels, head):
    z = head.multiplier * F.linear(h, w[: head.vocab_size])
    z = z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)
    return F.cross_entropy(z, labels, reduction="none", label_smoothing=head.label_smoothing)


@pytest.mark.parametrize("function", [linear_cross_entropy, linear_cross_entropy_reference])
@pytest.mark.parametrize("upstream", ["even", "mask", "uneven", "zero", "against_weights"])
@pytest.mark.parametrize("name", HEADS)
def test_linear_cross_entropy(function, name, upstream):
    """Losses and gradients, whether or not the token weights foretold the upstream gradient."""
    head = HEADS[name]
    h = torch.randn(N, H, dtype=F64, requires_grad=True)
    w = torch.randn(V + 3, H, dtype=F64, requires_grad=True)
    labels = torch.randint(0, V, (N,))
    mask = (torch.arange(N) % 3 != 0).to(F64)
    uneven = torch.rand(N, dtype=F64) - 0.5
    weights, gradient = {
        "even": (None, torch.full((N,), 0.7, dtype=F64)),
        "mask": (mask, mask * 0.3),
        "uneven": (uneven, uneven / 7),
        "zero": (mask * 0, mask * 0),
        "against_weights": (mask, uneven),
    }[upstream]
    got = function(h, w, labels, head, weights)
    want = by_torch(h, w, labels, head)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(losses, (h, w), gradient) for losses in (got, want)]
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-12)
    assert (grads[0][1][V:] == 0).all()


def test_gradients_made_on_the_way_forward_survive_an_unforeseen_upstream():
    """Weights absent means equal; a mask applied afterwards must still be right."""
    h = torch.randn(N, H, dtype=F64, requires_grad=True)
    w = torch.randn(V, H, dtype=F64, requires_grad=True)
    labels, mask = torch.randint(0, V, (N,)), (torch.arange(N) % 2).to(F64)
    grads = [
        torch.autograd.grad((losses * mask).sum() / mask.sum(), (h, w))
        for losses in (
            linear_cross_entropy(h, w, labels, HEADS["plain"]),
            by_torch(h, w, labels, HEADS["plain"]),
        )
    ]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-13)


def test_no_tokens():
    h = torch.randn(0, H, dtype=F64, requires_grad=True)
    w = torch.randn(V, H, dtype=F64, requires_grad=True)
    loss = linear_cross_entropy(h, w, torch.zeros(0, dtype=torch.int64), HEADS["plain"])
    dh, dw = torch.autograd.grad(loss.sum(), (h, w))
    assert loss.shape == (0,) and dh.shape == (0, H) and (dw == 0).all()


def test_a_hopeless_token_has_a_finite_loss():
    """The target's probability underflows in fp32; its logarithm does not."""
    h = torch.tensor([[300.0]], requires_grad=True)
    w = torch.tensor([[1.0], [0.0]])
    loss = linear_cross_entropy(h, w, torch.tensor([1]), Head(vocab_size=2))
    assert loss.item() == pytest.approx(300.0)
    loss.backward(torch.ones(1))
    assert h.grad.item() == pytest.approx(1.0)


def test_half_precision_losses_are_fp32():
    h, w = torch.randn(N, H).to(torch.bfloat16), torch.randn(V, H).to(torch.bfloat16)
    h.requires_grad_(), w.requires_grad_()
    labels = torch.randint(0, V, (N,))
    losses = linear_cross_entropy(h, w, labels, HEADS["plain"])
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, by_torch(h.float(), w.float(), labels, HEADS["plain"]))
    losses.sum().backward()
    assert h.grad.dtype == w.grad.dtype == torch.bfloat16


def test_the_matrix_gradient_can_be_delivered_elsewhere():
    h = torch.randn(N, H, dtype=F64, requires_grad=True)
    w = torch.randn(V, H, dtype=F64, requires_grad=True)
    buffer, labels = torch.ones(V, H, dtype=F64), torch.randint(0, V, (N,))

    def deliver(weight, gradient):
        assert weight is w
        buffer.add_(gradient)

    head = Head(vocab_size=V, chunk=4, deliver=deliver)
    linear_cross_entropy(h, w, labels, head).sum().backward()
    assert w.grad is None
    (want,) = torch.autograd.grad(by_torch(h, w, labels, head).sum(), w)
    torch.testing.assert_close(buffer, 1 + want)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_cross_entropy_reference(smoothing):
    logits, labels = torch.randn(6, V, dtype=F64), torch.randint(0, V, (6,))
    p = logits.exp() / logits.exp().sum(1, keepdim=True)
    target = torch.full_like(p, smoothing / V)
    target[torch.arange(6), labels] += 1 - smoothing
    want = -(target * p.log()).sum(1)
    torch.testing.assert_close(cross_entropy_reference(logits, labels, smoothing), want)


def test_linear_cross_entropy_gradcheck():
    h = torch.randn(3, 2, dtype=F64, requires_grad=True)
    w = torch.randn(4, 2, dtype=F64, requires_grad=True)
    head = Head(vocab_size=3, chunk=2, softcap=2.0, label_smoothing=0.1)
    labels = torch.tensor([0, 2, 1])
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, labels, head), (h, w))
