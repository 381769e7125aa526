"""Attention of a sequence cut over ranks is the serial attention: outputs, gradients, bytes."""

import time
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.context_parallel.attention import ContextAxes, context_attention
from megatron.core.context_parallel.ring import ring_attention
from megatron.core.context_parallel.share import Share
from megatron.core.grid import ParallelConfig
from megatron.core.kernels import blocked, ring_block
from megatron.core.kernels.attention import Extras, Packing, Rule, attention_reference
from megatron.core.kernels.blocked import attention_blocked
from megatron.core.kernels.sdpa import attention_sdpa
from megatron.core.mesh import Axis, Mesh
from tests.harness import Pool
from tests.live_bytes import Live

F64 = torch.float64
# 24 positions make 2 n chunks for n = 2, 3, 4; 12 heads are divisible by each.
S, B, N, D, E = 24, 2, 12, 4, 3
SLOPES = 0.7 ** torch.arange(1, N + 1, dtype=F64)
# The first sample's documents cross every chunk's bounds, the second one's lie in single chunks.
PACKED = Packing(torch.tensor([0, 7, 8, 20, 24, 26, 30, 39, 48], dtype=torch.int32))
CAUSAL = Rule(scale=0.5)
FULL = Rule(scale=0.5, causal=False)
# name -> key groups, rule, extras, whether there is a sink.
VARIANTS: dict[str, tuple[int, Rule, Extras, bool]] = {
    "causal": (12, CAUSAL, Extras(), False),
    "full": (12, FULL, Extras(), False),
    "window": (4, replace(CAUSAL, window=(5, 0)), Extras(), False),
    "two-sided window": (4, replace(FULL, window=(3, 8)), Extras(), False),
    "packed": (4, CAUSAL, Extras(packing=PACKED), False),
    "packed full window sinks": (4, replace(FULL, window=(9, 4)), Extras(packing=PACKED), True),
    "one group": (1, CAUSAL, Extras(), False),
    "three groups": (3, CAUSAL, Extras(), False),
    "sinks": (4, CAUSAL, Extras(), True),
    "softcap": (4, replace(CAUSAL, scale=2.0, softcap=1.5), Extras(), False),
    "alibi": (12, CAUSAL, Extras(alibi_slopes_n=SLOPES), False),
    "alibi full sinks packed": (2, FULL, Extras(packing=PACKED, alibi_slopes_n=SLOPES), True),
}
# kind, context-parallel size, ranks of an inner all-to-all.
LAYOUTS = [
    *((kind, size, size) for kind, size in product(("p2p", "all_gather", "a2a"), (2, 3, 4))),
    ("a2a+p2p", 2, 2),
    ("a2a+p2p", 4, 1),
    ("a2a+p2p", 4, 2),
    ("a2a+p2p", 4, 4),
]


def held(coordinate: int, size: int, sequence: int = S) -> list[int]:
    """Positions of a rank, by the definition of zig-zag."""
    chunk = sequence // (2 * size)
    owners = [*range(size), *reversed(range(size))]
    return [p for p in range(sequence) if owners[p // chunk] == coordinate]


def inputs(groups: int, dtype: torch.dtype = F64) -> tuple[list[Tensor], Tensor]:
    """Return q, k, v, sink, and the gradient of the output, of the whole sample."""
    generator = torch.Generator().manual_seed(groups)
    shapes = [(S, B, N, D), (S, B, groups, D), (S, B, groups, E), (N,), (S, B, N, E)]
    *tensors, grad = (torch.randn(x, dtype=F64, generator=generator).to(dtype) for x in shapes)
    return tensors, grad


def axes_of(rank: int, size: int, inner: int, world: int) -> tuple[Mesh, ContextAxes]:
    parallel = ParallelConfig.resolve(context_parallel_size=size)
    mesh = Mesh.create(parallel, torch.device("cpu"), cp_inner_size=inner)
    assert mesh.world.size == world
    return mesh, ContextAxes(mesh.cp, mesh.cp_inner, mesh.cp_outer)


def on_rank(
    axes: ContextAxes, kind: str, name: str, grad: Tensor | None = None, dtype: torch.dtype = F64
) -> dict[str, Any]:
    """Attend with this rank's share, and go back; return results and traffic."""
    groups, rule, extras, with_sink = VARIANTS[name]
    whole, default_grad = inputs(groups, dtype)
    mine = held(axes.whole.coordinate, axes.whole.size)
    q, k, v = (x[mine].requires_grad_() for x in whole[:3])
    sink = whole[3].requires_grad_() if with_sink else None
    attend = context_attention(kind, axes, attention_blocked)
    with comm.counting() as traffic:
        out = attend(q, k, v, rule, replace(extras, sink_n=sink))
        out.backward((default_grad if grad is None else grad)[mine])
    found = {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad}
    if sink is not None:
        found["sink"] = sink.grad
    return {"found": found, "calls": dict(traffic.calls), "bytes": dict(traffic.bytes)}


def every_variant(rank: int, kind: str, size: int, inner: int, world: int) -> dict[str, Any]:
    _, axes = axes_of(rank, size, inner, world)
    with pytest.MonkeyPatch.context() as patch:
        # Several tiles, and room to keep the probabilities of some.
        patch.setattr(ring_block, "TILE", 2)
        patch.setattr(blocked, "TILE", 2)
        patch.setattr(ring_block, "KEPT", 2000)
        return {name: on_rank(axes, kind, name) for name in VARIANTS}


def serial(name: str, grad: Tensor | None = None) -> dict[str, Tensor]:
    groups, rule, extras, with_sink = VARIANTS[name]
    tensors, default_grad = inputs(groups)
    q, k, v, sink = (x.requires_grad_() for x in tensors)
    out = attention_reference(q, k, v, rule, replace(extras, sink_n=sink if with_sink else None))
    out.backward(default_grad if grad is None else grad)
    found = {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad, "sink": sink.grad}
    return {key: x for key, x in found.items() if x is not None}


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Tensor]]:
    return {name: serial(name) for name in VARIANTS}


def check_equal(shares: list[dict[str, Tensor]], expected: dict[str, Tensor], what: str) -> None:
    """Check that ``shares``, put where their positions are, are the serial tensors."""
    for name, value in expected.items():
        joined = torch.zeros_like(value)
        for coordinate, share in enumerate(shares):
            if name == "sink":
                joined += share[name]
            else:
                joined[held(coordinate, len(shares))] = share[name]
        torch.testing.assert_close(
            joined, value, rtol=1e-12, atol=1e-13, msg=lambda m, n=name: f"{what}, {n}: {m}"
        )


def exchanged(kind: str, size: int, inner: int, groups: int) -> tuple[dict[str, int], int]:
    """Return calls and bytes of a forward and a backward in float64, in closed form."""
    s, kv = S // size, groups * (D + E)
    ring = {"shift": (3 * (size - 1), 3 * (size - 1) * s * B * kv)}
    if kind == "p2p":
        moved = {"cp": ring}
    elif kind == "all_gather":
        moved = {"cp": {"all_gather": (2, 2 * S * B * kv), "reduce_scatter": (1, S * B * kv)}}
    else:
        outer = size // inner
        copies = next(c for c in range(1, inner + 1) if groups * c % inner == 0)
        together = s * B * (N * D + copies * kv)
        moved = {}
        if inner > 1:
            name = "cp" if kind == "a2a" else "cp_inner"
            moved[name] = {"all_to_all": (4, 2 * (together + s * B * N * E))}
        if outer > 1:
            share = inner * s * B * copies * kv // inner
            moved["cp_outer" if inner > 1 else "cp"] = {
                "shift": (3 * (outer - 1), 3 * (outer - 1) * share)
            }
    flat = {(axis, op): x for axis, ops in moved.items() for op, x in ops.items()}
    return {key: calls for key, (calls, _) in flat.items()}, {
        key: count * 8 for key, (_, count) in flat.items()
    }


@pytest.mark.parametrize(("kind", "size", "inner"), LAYOUTS)
def test_equals_serial_attention_and_moves_what_the_formula_says(
    pool: Pool, expected: dict[str, dict[str, Tensor]], kind: str, size: int, inner: int
) -> None:
    results = pool.run(size, every_variant, kind, size, inner, size)
    for name, (groups, *_) in VARIANTS.items():
        check_equal([result[name]["found"] for result in results], expected[name], name)
        calls, moved = exchanged(kind, size, inner, groups)
        for result in results:
            assert result[name]["calls"] == calls, name
            assert result[name]["bytes"] == moved, name


def _beside_other_axes(rank: int, kind: str) -> tuple[int, dict[str, Any]]:
    parallel = ParallelConfig.resolve(tensor_model_parallel_size=2, context_parallel_size=2)
    mesh = Mesh.create(parallel, torch.device("cpu"))
    assert mesh.cp.ranks in [(0, 2), (1, 3)]
    axes = ContextAxes(mesh.cp, mesh.cp_inner, mesh.cp_outer)
    # Each tensor-parallel coordinate has work of its own.
    name = ("packed", "sinks")[mesh.tp.coordinate]
    return mesh.tp.coordinate, on_rank(axes, kind, name)["found"]


@pytest.mark.parametrize("kind", ["p2p", "a2a+p2p", "a2a"])
def test_ranks_of_the_axis_need_not_be_neighbours(
    pool: Pool, expected: dict[str, dict[str, Tensor]], kind: str
) -> None:
    results = pool.run(4, _beside_other_axes, kind)
    for tp, name in enumerate(("packed", "sinks")):
        check_equal([x for at, x in results if at == tp], expected[name], name)


def _half_precision(rank: int, kind: str) -> dict[str, Any]:
    _, axes = axes_of(rank, 2, 2, 2)
    result = on_rank(axes, kind, "packed full window sinks", dtype=torch.bfloat16)
    return {**result, "found": {key: x.double() for key, x in result["found"].items()}}


@pytest.mark.parametrize("kind", ["p2p", "all_gather"])
def test_half_precision_travels_as_it_is_and_its_gradients_in_single(pool: Pool, kind: str) -> None:
    results = pool.run(2, _half_precision, kind)
    kv = S * B * 4 * (D + E)
    moved = {"p2p": kv // 2 * (2 + 2 + 4), "all_gather": kv * (2 + 2 + 4)}
    assert all(sum(result["bytes"].values()) == moved[kind] for result in results)
    whole = serial("packed full window sinks")
    for coordinate, result in enumerate(results):
        for name in ("out", "q", "k", "v"):
            # Inputs have 8 bits: a few rounding steps of the largest values.
            difference = (result["found"][name] - whole[name][held(coordinate, 2)]).abs().max()
            assert difference < 0.05 * whole[name].abs().max(), name


def _masked_rank(rank: int, kind: str) -> dict[str, Any]:
    _, axes = axes_of(rank, 2, 2, 2)
    return on_rank(axes, kind, "packed", masked_gradient())["found"]


def masked_gradient() -> Tensor:
    """Return the output's gradient when the loss mask leaves coordinate 1 no token."""
    grad = inputs(4)[1].clone()
    grad[held(1, 2)] = 0
    return grad


@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a"])
def test_par_15_a_rank_with_only_masked_tokens_contributes_zero(pool: Pool, kind: str) -> None:
    """Nothing divides by a rank's own count: finite, and equal to the serial run."""
    results = pool.run(2, _masked_rank, kind)
    assert all(x.isfinite().all() for result in results for x in result.values())
    assert torch.equal(results[1]["q"], torch.zeros_like(results[1]["q"]))
    check_equal(results, serial("packed", masked_gradient()), kind)


def _order(rank: int) -> list[str]:
    """Return what a ring does, in order."""
    events: list[str] = []

    def said(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            events.append(name)
            return function(*args)

        return call

    _, axes = axes_of(rank, 3, 3, 3)
    kept = comm.shift, comm.Arrival.wait, Share.see, Share.back
    comm.shift, comm.Arrival.wait = said("shift", kept[0]), said("wait", kept[1])
    Share.see, Share.back = said("see", kept[2]), said("back", kept[3])
    try:
        on_rank(axes, "p2p", "causal")
    finally:
        comm.shift, comm.Arrival.wait, Share.see, Share.back = kept
    return events


def test_the_next_keys_travel_while_the_present_ones_are_multiplied(pool: Pool) -> None:
    forward = ["shift", "see", "wait", "shift", "see", "wait", "see"]
    # The first gradient to travel is the second block's; it does so during the third.
    back = ["shift", "back", "wait", "shift", "back", "shift", "wait", "back", "wait", "shift"]
    for events in pool.run(3, _order):
        assert events == [*forward, *back, "wait"]


def _dropout(rank: int, kind: str) -> tuple[Tensor, ...]:
    _, axes = axes_of(rank, 2, 2, 2)
    attend = context_attention(kind, axes, attention_blocked)
    whole, grad = inputs(4)
    mine = held(rank, 2)
    q, k, v = (x[mine].requires_grad_() for x in whole[:3])
    way = torch.randn(v.shape, dtype=F64, generator=torch.Generator().manual_seed(rank))

    def run(values: Tensor) -> Tensor:
        torch.manual_seed(7)
        return attend(q, k, values, FULL, Extras(dropout_p=0.3))

    out = run(v)
    out.backward(grad[mine])
    # Every rank moves its values at once; the output is linear in them.
    moved = ((run(v.detach() + way) - out) * grad[mine]).sum()
    assert v.grad is not None
    plain = attend(q, k, v, FULL, Extras())
    return out.detach(), (v.grad * way).sum(), moved.detach(), plain.detach()


@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a"])
def test_dropout_goes_back_through_the_masks_it_came_by(pool: Pool, kind: str) -> None:
    results = pool.run(2, _dropout, kind)
    by_gradient, by_difference = (sum(r[i] for r in results) for i in (1, 2))
    torch.testing.assert_close(by_gradient, by_difference, rtol=1e-10, atol=1e-12)
    assert all(not torch.allclose(r[0], r[3]) for r in results)


def settled(live: Live, limit: float) -> int:
    """Return what is alive once it is within ``limit``, or what still is after a long wait.

    Gloo's threads let go of what they sent at some later moment.
    """
    end = time.monotonic() + 20
    while live.now > limit and time.monotonic() < end:
        time.sleep(0.001)
    return live.now


def memory_of(axes: ContextAxes, kind: str, limit: float = torch.inf) -> tuple[int, int, int]:
    """Return bytes of this rank's inputs, kept after forward, and at the peak of both ways.

    ``limit`` is what the caller will allow to be kept.
    """
    sequence, heads, groups, channels = 128, 8, 4, 16
    # A ring of one rank is the measure, where a layer would take the serial attention.
    attend = context_attention(kind, axes, attention_sdpa)
    if axes.whole.size == 1:
        attend = partial(ring_attention, axis=axes.whole)

    share = sequence // axes.whole.size
    with pytest.MonkeyPatch.context() as patch, Live() as live:
        # Scores are not what is measured: the least at once, and none kept.
        patch.setattr(ring_block, "SCORES", 1)
        patch.setattr(ring_block, "KEPT", 0)
        q, k, v = (
            torch.ones(share, 1, n, channels).requires_grad_() for n in (heads, groups, groups)
        )
        given = live.now
        out = attend(q, k, v, CAUSAL, Extras())
        kept = settled(live, limit)
        out.backward(out.detach())
    return given, kept, live.most


def _memory(rank: int, kind: str, size: int, inner: int, limit: float) -> tuple[int, int, int]:
    return memory_of(axes_of(rank, size, inner, size)[1], kind, limit)


@pytest.mark.parametrize("kind", ["p2p", "a2a", "a2a+p2p", "all_gather"])
def test_a_rank_holds_only_its_share_of_the_sequence(pool: Pool, kind: str) -> None:
    alone = memory_of(ContextAxes(Axis("cp", (0,), 0, None)), "p2p")
    for size in (2, 4):
        limit = 1.3 * alone[1] / size
        for given, kept, most in pool.run(size, _memory, kind, size, 2, limit):
            # Inputs are cut exactly; what is kept besides is copies of them and the output.
            assert given * size == alone[0]
            assert kept <= limit
            # A ring holds up to four tensors of keys and values more than one rank alone, so that
            # four ranks have less than half each; a gather holds all of them, which is its price.
            if kind != "all_gather":
                assert most * size <= 2 * alone[2]
