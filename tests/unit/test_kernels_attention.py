"""Attention: every backend against scores written out pair by pair, in float64."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.core.kernels import blocked
from megatron.core.kernels.attention import Extras, Packing, Rule, attention_reference
from megatron.core.kernels.blocked import attention_blocked
from megatron.core.kernels.sdpa import attention_sdpa
from megatron.core.kernels.unfused import attention_unfused

BACKENDS = [attention_reference, attention_blocked, attention_sdpa]
WITHOUT_SINK = [*BACKENDS, attention_unfused]
F64 = torch.float64


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles at tiny sizes, and a tile that is cut at the end."""
    torch.manual_seed(1)
    monkeypatch.setattr(blocked, "TILE", 3)


def visible(rule: Rule, at: int, key: int) -> bool:
    left, right = rule.window or (-1, -1)
    far = (left >= 0 and key < at - left) or (right >= 0 and key > at + right)
    return not far and not (rule.causal and key > at)


def changed(score, rule: Rule, extras: Extras, place, distance: int) -> Tensor:
    if rule.softcap is not None:
        score = torch.tanh(score / rule.softcap) * rule.softcap
    if extras.alibi_slopes_n is not None:
        score = score - extras.alibi_slopes_n[place[1]] * distance
    if extras.bias is not None:
        bias = extras.bias[(None,) * (4 - extras.bias.dim())]
        # A dim of size one stands for all of its places.
        score = score + bias[tuple(i % size for i, size in zip(place, bias.shape, strict=True))]
    return score


def pair_by_pair(q, k, v, rule: Rule, extras: Extras) -> Tensor:
    """Attention as the definition says it, one query of one head at a time."""
    S, B, n, _ = q.shape
    T, g = k.shape[0], k.shape[2]
    bounds = [] if extras.packing is None else extras.packing.cu_seqlens.tolist()
    rows = []
    for s in range(S):
        for b in range(B):
            for h in range(n):
                at = (
                    s if extras.query_positions_BS is None else int(extras.query_positions_BS[b, s])
                )
                weights, values = [], []
                for t in range(T):
                    here, there = b * S + s, b * S + t
                    inside = all((here < edge) == (there < edge) for edge in bounds)
                    counts = extras.valid_BT is None or bool(extras.valid_BT[b, t])
                    if not (inside and counts and visible(rule, at, t)):
                        continue
                    score = (q[s, b, h] * k[t, b, h // (n // g)]).sum() * rule.scale
                    score = changed(score, rule, extras, (b, h, s, t), abs(t - at))
                    weights.append(score.exp())
                    values.append(v[t, b, h // (n // g)])
                total = sum(weights) if weights else 0
                if extras.sink_n is not None:
                    total = total + extras.sink_n[h].exp()
                if weights:
                    rows.append(sum(w * x for w, x in zip(weights, values, strict=True)) / total)
                else:
                    rows.append(v.new_zeros(v.shape[-1]) * v.sum() * 0)
    return torch.stack(rows).view(S, B, n, -1)


def tensors(S=7, B=2, n=4, g=2, D=4, E=3, T=None):
    q = torch.randn(S, B, n, D, dtype=F64, requires_grad=True)
    k = torch.randn(T or S, B, g, D, dtype=F64, requires_grad=True)
    v = torch.randn(T or S, B, g, E, dtype=F64, requires_grad=True)
    return q, k, v


def check(backend, q, k, v, rule, extras=None):
    """Output and every gradient equal to the definition."""
    extras = extras or Extras()
    inputs = [q, k, v]
    inputs += [x for x in (extras.sink_n, extras.bias) if x is not None and x.requires_grad]
    results = []
    for function in (pair_by_pair, backend):
        out = function(q, k, v, rule, extras)
        weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape).sin()
        results.append([out, *torch.autograd.grad((out * weight).sum(), inputs)])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


RULES = {
    "causal": Rule(scale=0.4),
    "full": Rule(scale=0.4, causal=False),
    "window": Rule(scale=0.4, window=(2, 0)),
    "window_0": Rule(scale=0.4, window=(0, 0)),
    "window_wide": Rule(scale=0.4, window=(50, 50)),
    "window_both": Rule(scale=0.4, causal=False, window=(2, 1)),
    "window_right": Rule(scale=0.4, causal=False, window=(-1, 2)),
    "softcap": Rule(scale=0.9, softcap=1.5),
}
EXTRAS = {
    "plain": lambda n: Extras(),
    "packed": lambda n: Extras(
        packing=Packing(torch.tensor([0, 4, 4, 7, 8, 14], dtype=torch.int32))
    ),
    "sink": lambda n: Extras(sink_n=torch.randn(n, dtype=F64).requires_grad_()),
    "off_by_one": lambda n: Extras(sink_n=torch.zeros(n, dtype=F64)),
    "alibi": lambda n: Extras(alibi_slopes_n=torch.rand(n, dtype=F64)),
    "bias": lambda n: Extras(bias=torch.randn(n, 7, 7, dtype=F64).requires_grad_()),
    "padded": lambda n: Extras(valid_BT=torch.arange(7) < torch.tensor([[5], [7]])),
    "padded_bias": lambda n: Extras(
        valid_BT=torch.arange(7) != torch.tensor([[0], [3]]),
        bias=torch.randn(1, n, 7, 7, dtype=F64).requires_grad_(),
    ),
}


@pytest.mark.parametrize(
    ("backend", "extras"),
    [
        *((backend, extras) for backend in BACKENDS for extras in EXTRAS),
        *((attention_unfused, extras) for extras in EXTRAS if extras not in ("sink", "off_by_one")),
    ],
)
@pytest.mark.parametrize("rule", RULES)
def test_equals_the_definition(backend, rule, extras):
    check(backend, *tensors(), RULES[rule], EXTRAS[extras](4))


@pytest.mark.parametrize("backend", WITHOUT_SINK)
@pytest.mark.parametrize(("n", "g"), [(1, 1), (4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("S", [1, 3, 7])
def test_head_groups_and_odd_lengths(backend, n, g, S):
    check(backend, *tensors(S=S, n=n, g=g), RULES["causal"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_everything_at_once(backend):
    extras = Extras(
        packing=Packing(torch.tensor([0, 1, 7, 14], dtype=torch.int32)),
        sink_n=torch.randn(4, dtype=F64).requires_grad_(),
        alibi_slopes_n=torch.rand(4, dtype=F64),
        bias=torch.randn(2, 1, 7, 7, dtype=F64).requires_grad_(),
    )
    check(backend, *tensors(), Rule(scale=0.8, window=(3, 0), softcap=2.0), extras)


@pytest.mark.parametrize("backend", WITHOUT_SINK)
def test_keys_of_another_sequence(backend):
    check(backend, *tensors(S=4, T=9), Rule(scale=0.5, causal=False))
    valid_BT = torch.arange(9) < torch.tensor([[9], [2]])
    check(backend, *tensors(S=4, T=9), Rule(scale=0.5, causal=False), Extras(valid_BT=valid_BT))


@pytest.mark.parametrize("backend", WITHOUT_SINK)
def test_broadcast_bias_gets_the_summed_gradient(backend):
    extras = Extras(bias=torch.randn(1, 4, 1, 7, dtype=F64).requires_grad_())
    check(backend, *tensors(), RULES["causal"], extras)


@pytest.mark.parametrize("backend", WITHOUT_SINK)
def test_a_query_that_sees_nothing_gets_zeros_and_no_nan(backend):
    bias = torch.zeros(1, 1, 7, 7, dtype=F64)
    bias[..., 3, :] = -torch.inf
    q, k, v = tensors()
    out = backend(q, k, v, RULES["causal"], Extras(bias=bias))
    assert (out[3] == 0).all() and (out[4] != 0).all()
    for grad in torch.autograd.grad(out.square().sum(), (q, k, v)):
        assert grad.isfinite().all()
    early = Extras(query_positions_BS=torch.tensor([[-1, 0, 1, 2, 3, 4, 5]] * 2))
    out = backend(q, k, v, RULES["causal"], early)
    assert (out[0] == 0).all() and (out[1] != 0).all()


@pytest.mark.parametrize("backend", WITHOUT_SINK)
@pytest.mark.parametrize("rule", ["causal", "window", "softcap"])
def test_decoding_in_pieces_equals_one_forward(backend, rule):
    """Each sample decodes at positions of its own, over a cache with room left."""
    q, k, v = (x.detach() for x in tensors(S=8))
    whole = pair_by_pair(q, k, v, RULES[rule], Extras())
    room = torch.full((3, *k.shape[1:]), 1e3, dtype=F64)
    cache_k, cache_v = torch.cat((k, room)), torch.cat((v, room[..., :3]))
    for positions in ([[0, 1, 2, 3], [2, 3, 4, 5]], [[4], [7]], [[7, 0, 3, 2], [1, 1, 6, 5]]):
        at = torch.tensor(positions)
        queries = torch.stack([q[at[b], b] for b in range(2)], 1)
        out = backend(queries, cache_k, cache_v, RULES[rule], Extras(query_positions_BS=at))
        want = torch.stack([whole[at[b], b] for b in range(2)], 1)
        torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 9])
def test_cached_keys_with_bias_and_sink_have_gradients_too(backend, width):
    q, k, v = tensors(S=2, T=9)
    extras = Extras(
        query_positions_BS=torch.tensor([[3, 4], [0, 6]]),
        bias=torch.randn(1, 4, 1, width, dtype=F64).requires_grad_(),
        sink_n=torch.randn(4, dtype=F64).requires_grad_(),
    )
    check(backend, q, k, v, RULES["causal"], extras)


@pytest.mark.parametrize("rule", RULES)
def test_recomputed_probabilities_give_the_same_gradients(monkeypatch, rule):
    monkeypatch.setattr(blocked, "KEPT", 0)
    check(attention_blocked, *tensors(), RULES[rule], EXTRAS["sink"](4))


def test_samples_that_do_not_share_a_tile(monkeypatch):
    monkeypatch.setattr(blocked, "SCORES", 1)
    check(attention_blocked, *tensors(B=3), RULES["window"])


def test_blocked_passes_gradcheck():
    q, k, v = tensors(S=4, B=1, n=2, g=1, D=2, E=2)
    sink = torch.randn(2, dtype=F64).requires_grad_()
    rule = Rule(scale=0.7, window=(2, 0), softcap=1.0)

    def function(q, k, v, sink):
        return attention_blocked(q, k, v, rule, Extras(sink_n=sink))

    assert torch.autograd.gradcheck(function, (q, k, v, sink))


def test_real_tile_size_agrees_with_torch(monkeypatch):
    monkeypatch.undo()
    assert blocked.TILE > 3
    q, k, v = tensors(S=2 * blocked.TILE + 5, B=2, n=4, g=2, D=8, E=8)
    check_pair = [attention_blocked, attention_sdpa]
    outs = [f(q, k, v, RULES["causal"]) for f in check_pair]
    torch.testing.assert_close(*outs, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in outs]
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("dtype", "half_unit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_sums_in_fp32(backend, dtype, half_unit):
    """What --attention-softmax-in-fp32 asks for: one rounding, at the end, of the fp64 result."""
    q, k, v = (x.detach().to(dtype) for x in tensors(S=40, D=16))
    out = backend(q, k, v, Rule(scale=0.25, window=(20, 0)))
    want = pair_by_pair(q.to(F64), k.to(F64), v.to(F64), Rule(scale=0.25, window=(20, 0)), Extras())
    assert out.dtype == dtype
    # attention_sdpa tiles a plain window, so all three round the same sum.
    torch.testing.assert_close(out.to(F64), want, rtol=half_unit, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_beyond_fp16_stay_finite(backend):
    """What --apply-query-key-layer-scaling is for: 160,000 is no number of fp16."""
    S, D = 24, 8
    x = (400 * torch.eye(D, dtype=torch.float16)).repeat(S // D, 1)[:, None, None]
    x = x.contiguous().requires_grad_()
    v = torch.randn(S, 1, 1, D, dtype=torch.float16)
    out = backend(x, x, v, Rule(scale=1.0))
    out.float().sum().backward()
    # A query sees the keys that are like it and not after it, all alike, and no other.
    alike = torch.eye(D, dtype=F64).repeat(S // D, S // D).tril()
    want = alike / alike.sum(1, keepdim=True) @ v[:, 0, 0].to(F64)
    torch.testing.assert_close(out[:, 0, 0].to(F64), want, rtol=2**-11, atol=1e-6)
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("layer", [1, 7])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scaling_by_the_layers_number_changes_nothing(backend, layer):
    """As Megatron-LM computes it: scores divided by the number, multiplied again in the softmax."""
    q, k, v = (x.detach().to(torch.float16) for x in tensors(S=12, B=1, n=2, g=2, D=16))
    heads_q, heads_k, heads_v = (x[:, 0].transpose(0, 1).float() for x in (q, k, v))
    scores = (heads_q @ heads_k.transpose(1, 2) / (4 * layer)).half()
    hidden = torch.ones(12, 12, dtype=torch.bool).triu(1)
    probs = torch.softmax((scores.float() * layer).masked_fill(hidden, -torch.inf), -1)
    want = (probs @ heads_v).transpose(0, 1)
    out = backend(q, k, v, Rule(scale=0.25))[:, 0].float()
    torch.testing.assert_close(out, want, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_is_keyed_by_its_scope_and_scales_what_stays(backend):
    n, S = 4, 33
    q, k = torch.zeros(S, 2, n, 4, dtype=F64), torch.zeros(S, 2, n, 4, dtype=F64)
    # Equal scores and one-hot values: the output shows the probabilities themselves.
    v = torch.eye(S, dtype=F64)[:, None, None].expand(S, 2, n, S).contiguous().requires_grad_()

    class Scope:
        def __enter__(self):
            self.fork = torch.random.fork_rng([])
            self.fork.__enter__()
            torch.manual_seed(7)

        def __exit__(self, *args):
            self.fork.__exit__(*args)

    extras = Extras(dropout_p=0.25, dropout_scope=Scope())
    rule = Rule(scale=1.0, causal=False)
    before = torch.random.get_rng_state()
    out = backend(q, k, v, rule, extras)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(out, backend(q, k, v, rule, replace(extras, dropout_scope=Scope())))
    kept = out * S * 0.75
    assert ((kept - 1).abs().lt(1e-9) | (kept == 0)).all()
    share = (kept != 0).double().mean().item()
    assert abs(share - 0.75) < 4 * math.sqrt(0.75 * 0.25 / out.numel())
    # d out / d v is the same mask.
    (grad,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(grad[..., 0], out.sum(0).permute(2, 0, 1), rtol=1e-9, atol=1e-12)


def test_packing_reads_bounds_sample_by_sample():
    packing = Packing(torch.tensor([0, 3, 3, 5, 10], dtype=torch.int32))
    assert packing.documents(5) == [(0, 0, 3), (0, 3, 5), (1, 0, 5)]
    assert packing.max_length == 5
    assert packing.document_ids(2, 5).tolist() == [[0, 0, 0, 1, 1], [2] * 5]


def test_a_document_may_not_cross_samples():
    with pytest.raises(AssertionError, match="crosses"):
        Packing(torch.tensor([0, 3, 10], dtype=torch.int32)).documents(5)


def test_ds_12_two_thousand_documents_cost_time_linear_in_tokens():
    """Work is counted in scores: far below one square of the sample."""
    S = 32768
    packing = Packing(torch.arange(0, S + 1, 16, dtype=torch.int32))
    q = torch.empty(S, 1, 1, 1)
    plan = list(blocked.tiles(q, q, Rule(scale=1.0), Extras(packing=packing)))
    assert sum(tile.pairs for tile in plan) <= S * 16
    plan = list(blocked.tiles(q[:512], q[:512], Rule(scale=1.0, window=(8, 0)), Extras()))
    assert sum(tile.pairs for tile in plan) <= 512 * (8 + blocked.TILE)


@pytest.mark.parametrize("name", ["softcap", "causal"])
@pytest.mark.parametrize("extras", ["plain", "alibi", "bias"])
def test_scores_of_fp16_do_not_overflow(name: str, extras: str) -> None:
    """Products of 128 channels of 30 are 115,200, more than fp16 holds; scores are a tenth."""
    q, k, v = (torch.randn(5, 1, 2, 128, dtype=F64) for _ in "qkv")
    q, k = (30 * torch.sign(q), 30 * torch.sign(k))
    rule = replace(RULES[name], scale=128**-0.5)
    more = {
        "plain": Extras(),
        "alibi": Extras(alibi_slopes_n=torch.tensor([0.5, 0.25])),
        "bias": Extras(bias=torch.randn(2, 5, 5)),
    }[extras]
    wanted = attention_reference(q, k, v, rule, more)
    found = attention_unfused(q.half(), k.half(), v.half(), rule, more)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=0.02)
