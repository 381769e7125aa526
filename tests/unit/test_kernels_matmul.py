"""Products against einsum in float64, and how half precision is rounded."""

import pytest
import torch

from megatron.core.kernels import matmul

F64 = torch.float64


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(5)


@pytest.fixture
def slow_half(monkeypatch):
    """Be a CPU without half-precision units."""
    monkeypatch.setattr(matmul, "cpu_features", lambda: frozenset({"avx2"}))


@pytest.mark.parametrize("bias", [False, True])
def test_linear(bias):
    x = torch.randn(3, 2, 5, dtype=F64)
    w = torch.randn(4, 5, dtype=F64)
    b = torch.randn(4, dtype=F64) if bias else None
    want = torch.einsum("sbi,oi->sbo", x, w)
    want = want if b is None else want + b
    torch.testing.assert_close(matmul.linear(x, w, b), want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_upcast_rounds_once(slow_half, dtype):
    """Exactly the fp32 result, rounded: no partial sum is kept in half precision."""
    x, w, b = (torch.randn(s).to(dtype) for s in ((9, 300), (7, 300), (7,)))
    y = matmul.linear(x, w, b)
    assert torch.equal(y, (x.float() @ w.float().t() + b.float()).to(dtype))
    assert torch.equal(matmul.matmul(x, w.t()), (x.float() @ w.float().t()).to(dtype))


def test_matmul_rounds_once_whatever_the_machine(monkeypatch):
    a, b = torch.randn(9, 300).to(torch.bfloat16), torch.randn(300, 5).to(torch.bfloat16)
    want = (a.to(F64) @ b.to(F64)).to(torch.bfloat16)
    for features in (frozenset(), frozenset({"amx_bf16"})):
        monkeypatch.setattr(matmul, "cpu_features", lambda features=features: features)
        # One step of bfloat16 (8 bits): sums that differ in fp32 may round to neighbours. Near
        # zero, where terms cancel, fp32's own error of 300 terms of size 1 is far below 1e-4.
        torch.testing.assert_close(matmul.matmul(a, b), want, rtol=2**-7, atol=1e-4)


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
    g, x = torch.randn(6, 4).to(dtype), torch.randn(6, 5).to(dtype)
    for _ in range(3):
        matmul.accumulate_wgrad(buffer, g, x)
    want = 1000 + 3 * g.to(F64).t() @ x.to(F64)
    torch.testing.assert_close(buffer.to(F64), want, rtol=1e-6, atol=0.0)
