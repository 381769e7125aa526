"""Tokens on their way to experts and back, whatever the loads: even, all on one, none on most.

Results are those of experts at hand, and each call has the bytes that follow from sizes alone.
"""

import pytest
import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.grid import ParallelConfig
from megatron.core.mesh import Mesh
from megatron.core.transformer.moe.dispatcher import Local, build_dispatcher
from megatron.core.transformer.moe.routing import Routing
from tests import deepep_stand_in
from tests.harness import Pool
from tests.host_reads import reading

TOKENS, HIDDEN, EXPERTS, CHOICES = 3, 4, 4, 2
LOADS = ("uneven", "one", "far", "dropped")
WORD = 8
"""Bytes of a number of a token, a weight, a count, or of an expert's name."""
LAYOUTS = {"ep2": (2, 2, 1), "etp2": (2, 1, 2), "ep4": (4, 4, 1), "ep2 etp2": (4, 2, 2)}


def routing_of(loads: str, rank: int) -> Routing:
    """Return where the tokens of a rank go."""
    generator = torch.Generator().manual_seed(rank)
    experts_TK = torch.stack(
        [torch.randperm(EXPERTS, generator=generator)[:CHOICES] for _ in range(TOKENS)]
    )
    kept_TK = None
    if loads == "one":  # every choice of every token, twice the same expert
        experts_TK = torch.full((TOKENS, CHOICES), 1)
    elif loads == "far":  # all experts of this half of the ranks have nothing to do
        experts_TK = torch.tensor([[EXPERTS - 1, EXPERTS - 2]]).repeat(TOKENS, 1)
    elif loads == "dropped":
        kept_TK = torch.rand(TOKENS, CHOICES, generator=generator) < 0.5
        kept_TK[0] = rank > 0  # the first rank's first token goes nowhere
    weights_TK = torch.rand(TOKENS, CHOICES, generator=generator).double().requires_grad_()
    counts = torch.zeros(EXPERTS, dtype=torch.int64)
    return Routing(experts_TK, weights_TK, kept_TK, {}, counts, counts)


def tokens_of(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(TOKENS, HIDDEN, generator=generator).double().requires_grad_()


def compute(first: int, share: float, x_NH: Tensor, sizes: list[int]) -> Tensor:
    """Return ``share`` of what experts from number ``first`` on make of their rows."""
    parts = x_NH.split(sizes)
    return torch.cat([share * (first + e + 2) * part.sin() for e, part in enumerate(parts)])


def travels(rank: int, kind: str, loads: str, ep: int, etp: int) -> dict[str, Tensor]:
    sizes = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
    mesh = Mesh.create(ParallelConfig.resolve(**sizes), torch.device("cpu"))
    own, x_TH, routing = EXPERTS // ep, tokens_of(rank), routing_of(loads, rank)
    first = mesh.ep.coordinate * own
    with pytest.MonkeyPatch.context() as patch:
        deepep_stand_in.install(patch)
        return _travels(kind, x_TH, routing, first, etp, mesh)


def expected_calls(kind: str, routing: Routing, ranks: int, etp: int) -> list[tuple[str, int]]:
    """Return every call of a layer's forward and backward in order, and its bytes, in closed form.

    A choice that is dropped sends no row; one that stays sends one to each rank of its expert.
    """
    tokens, choices = TOKENS * HIDDEN * WORD, TOKENS * CHOICES * WORD
    if kind == "allgather":
        forward = [("all_gather", size) for size in (tokens, choices, choices)]
        backward = [("reduce_scatter", size) for size in (choices, tokens)]
        calls = [*forward, ("reduce_scatter", tokens), ("all_gather", tokens), *backward]
        return [(name, ranks * size) for name, size in calls]
    if kind == "flex":  # a package's calls are its own
        return []
    kept = TOKENS * CHOICES if routing.kept_TK is None else int(routing.kept_TK.sum())
    row = HIDDEN * WORD
    return [("all_gather", ranks * EXPERTS * WORD), *[("all_to_all", kept * etp * row)] * 4]


def _travels(
    kind: str, x_TH: Tensor, routing: Routing, first: int, etp: int, mesh: Mesh
) -> dict[str, Tensor]:
    dispatch = build_dispatcher(kind, EXPERTS, mesh, torch.float64)
    with comm.recording() as calls, comm.counting() as traffic, reading() as reads:
        found = list[tuple[str, str, int]]()
        traffic.add = lambda axis, name, size: found.append((axis.name, name, size))  # type: ignore[method-assign]
        y_TH = dispatch(x_TH, routing, lambda x, n: compute(first, 1.0 / etp, x, n))
        (y_TH * (1 + torch.arange(y_TH.numel()).view_as(y_TH))).sum().backward()
    assert kind == "flex" or reads == ["tolist"]  # where the host waits for the device
    names = [call.name for call in calls]
    everyone = comm.gather_objects(names, mesh.world)
    assert all(each == names for each in everyone)
    assert found == [
        ("etp_ep", *call) for call in expected_calls(kind, routing, mesh.world.size, etp)
    ]
    grads = (x_TH.grad, routing.weights_TK.grad)
    return {"y": y_TH.detach(), "x": grads[0], "weights": grads[1]}


@pytest.mark.parametrize("loads", LOADS)
@pytest.mark.parametrize("kind", ["allgather", "alltoall", "flex"])
@pytest.mark.parametrize(
    "layout", ["ep2 etp2", *(pytest.param(n, marks=pytest.mark.slow) for n in list(LAYOUTS)[:3])]
)
def test_outputs_and_gradients_are_those_of_experts_at_hand(
    pool: Pool, layout: str, kind: str, loads: str
) -> None:
    world, ep, etp = LAYOUTS[layout]
    found = pool.run(world, travels, kind, loads, ep, etp)
    for rank, ours in enumerate(found):
        x_TH, routing = tokens_of(rank), routing_of(loads, rank)
        y_TH = Local(EXPERTS)(x_TH, routing, lambda x, n: compute(0, 1.0, x, n))
        (y_TH * (1 + torch.arange(y_TH.numel()).view_as(y_TH))).sum().backward()
        expected = {"y": y_TH.detach(), "x": x_TH.grad, "weights": routing.weights_TK.grad}
        for name, value in expected.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-13, atol=1e-13, msg=name)
