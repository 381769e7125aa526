"""How flash-attn is called: a stand-in with the package's signatures computes the definition."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron.core.kernels.attention import Extras, Packing, Rule, attention_reference
from megatron.core.kernels.flash import attention_flash

S, B, N, G, D = 7, 2, 4, 2, 8
BOUNDS = torch.tensor([0, 4, 4, 7, 8, 14], dtype=torch.int32)
Window = tuple[int, int]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    """As in flash-attn 2: batch first, no cap is 0, no window is (-1, -1)."""
    calls.append(SimpleNamespace(deterministic=deterministic, dropout_p=dropout_p))
    assert q.shape == (B, q.shape[1], N, D) and k.shape == v.shape == (B, k.shape[1], G, D)
    assert alibi_slopes is None or alibi_slopes.dtype == torch.float32
    assert softmax_scale is not None
    window = None if window_size == (-1, -1) else window_size
    rule = Rule(scale=softmax_scale, causal=causal, window=window, softcap=softcap or None)
    extras = Extras(alibi_slopes_n=alibi_slopes)
    inputs = (x.transpose(0, 1) for x in (q, k, v))
    return attention_reference(*inputs, rule, extras).transpose(0, 1)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """As in flash-attn 2: documents one after the other, in one dim."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert q.shape == (B * S, N, D) and k.shape == v.shape == (B * S, G, D)
    lengths = cu_seqlens_k.diff()
    assert type(max_seqlen_k) is int and max_seqlen_q == max_seqlen_k == int(lengths.max())
    out = torch.empty_like(q)
    for start, stop in zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist()[1:], strict=False):
        if start == stop:  # an empty document
            continue
        rule = Rule(scale=softmax_scale or 0.0, causal=causal)
        part = (x[start:stop, None] for x in (q, k, v))
        out[start:stop] = attention_reference(*part, rule)[:, 0]
    return out


calls: list[SimpleNamespace] = []


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    calls.clear()
    functions = {f.__name__: f for f in (flash_attn_func, flash_attn_varlen_func)}
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(**functions))  # type: ignore[arg-type]


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    q, k, v = (torch.randn(S, B, heads, D) for heads in (N, G, G))
    return q, k, v


@pytest.mark.parametrize(
    ("rule", "extras"),
    [
        (Rule(scale=0.3), Extras()),
        (Rule(scale=0.3, causal=False), Extras()),
        (Rule(scale=0.3, window=(2, 0)), Extras()),
        (Rule(scale=0.3, softcap=1.5), Extras()),
        (Rule(scale=0.3), Extras(alibi_slopes_n=torch.rand(N, dtype=torch.float64))),
        (Rule(scale=0.3), Extras(packing=Packing(BOUNDS))),
        (Rule(scale=0.3), Extras(packing=Packing(BOUNDS.to(torch.int64)))),
        (Rule(scale=0.3), Extras(query_positions_BS=torch.arange(S).expand(B, S))),
    ],
    ids=["causal", "full", "window", "cap", "alibi", "packed", "packed int64", "positions"],
)
def test_equals_the_reference(rule: Rule, extras: Extras) -> None:
    q, k, v = tensors()
    want = attention_reference(q, k, v, rule, extras)
    got = attention_flash(q, k, v, rule, extras)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_deterministic_mode_reaches_the_package() -> None:
    attention_flash(*tensors(), Rule(scale=0.3))
    torch.use_deterministic_algorithms(True)
    try:
        attention_flash(*tensors(), Rule(scale=0.3))
    finally:
        torch.use_deterministic_algorithms(False)
    assert [call.deterministic for call in calls] == [False, True]
