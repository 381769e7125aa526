"""Tokens that travel under other work: every number is that of the serial run, and they do travel.

What is under way while something is computed is counted by who started it and who computes, never
by time.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import pretrain_gpt
from megatron.core import comm
from megatron.core.comm import Arrival, Call
from megatron.core.kernels import matmul
from megatron.core.kernels.grouped import Loop
from megatron.training.arguments import parse
from megatron.training.program import Program
from megatron.training.verification import equality, outcomes
from megatron.training.verification.outcomes import Outcome
from tests.call_order import disagreement
from tests.distributed.test_moe_layouts import (
    A2A,
    BASE,
    CP,
    EP,
    ETP,
    IDS,
    ITERATIONS,
    PP,
    TP,
    VARIANTS,
    outcome,
)
from tests.harness import Pool

LAYERS = 4
SHARED = "--moe-shared-expert-overlap"
COMBINED = "--overlap-moe-expert-parallel-comm"
DELAYED = f"{COMBINED} --delay-wgrad-compute"
VIRTUAL = "--num-virtual-stages-per-pipeline-rank 2"
PARTS = "--recompute-granularity selective --recompute-modules"
ONE = "--micro-batch-size 1"
LAYOUTS = [
    (2, f"{EP} 2 {SHARED}"),
    (2, f"{EP} 2 {COMBINED}"),
    (2, f"{EP} 2 {DELAYED} {SHARED} --overlap-grad-reduce"),
    (4, f"{PP} 2 {EP} 2 {COMBINED}"),
    (4, f"{PP} 2 {EP} 2 {VIRTUAL} {DELAYED}"),
    (4, f"{PP} 2 {EP} 2 {DELAYED} --use-distributed-optimizer --overlap-grad-reduce"),
    (4, f"{PP} 2 {EP} 2 {VIRTUAL} {COMBINED} --no-overlap-p2p-communication"),
    (2, f"{TP} 2 {ETP} 1 {EP} 2 {DELAYED} {SHARED}"),
    (4, f"{TP} 2 {ETP} 2 {EP} 2 --sequence-parallel {DELAYED} {SHARED}"),
    (4, f"{CP} 2 {EP} 4 {COMBINED} {SHARED}"),
    (2, f"{EP} 2 {SHARED} {PARTS} moe layernorm"),
    (2, f"{EP} 2 {DELAYED} {SHARED} {PARTS} moe_act core_attn layernorm"),
    (4, f"{EP} 2 {DELAYED} --use-distributed-optimizer --overlap-param-gather"),
]
USUAL = 5
"""How many of the layouts every run of the tests tries."""


@pytest.fixture(scope="module", params=["rich", "ahead"])
def serial(request: pytest.FixtureRequest, pool: Pool) -> tuple[str, Outcome]:
    words = f"{VARIANTS[request.param]} {ONE}"
    return words, outcome(pool, 1, words)[0]


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(*layout, marks=() if number < USUAL else pytest.mark.slow)
        for number, layout in enumerate(LAYOUTS)
    ],
)
def test_equals_the_serial_run(
    pool: Pool, serial: tuple[str, Outcome], world: int, layout: str
) -> None:
    words, expected = serial
    found, moved = outcome(pool, world, f"{words} {A2A} {layout}")
    apart = outcomes.compare(found, expected)
    assert apart.are_equal, apart
    assert found.traffic == moved


class Flight(NamedTuple):
    """What was computed while rows were under way."""

    by_others: int
    """Products of the thread that had not sent them."""
    by_sender: int
    weight_gradients: int
    """Of them, those of weights."""


class Watch:
    """Counts products by what is under way meanwhile."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.flights: list[Flight] = []
        self._under_way: dict[int, tuple[int, list[tuple[int, str]]]] = {}
        exchange, wait = comm.exchange, Arrival.wait

        def leaves(*arguments: Any, **named: Any) -> Arrival:
            arrival = exchange(*arguments, **named)
            self._under_way[id(arrival)] = (threading.get_ident(), [])
            return arrival

        def lands(arrival: Arrival) -> Any:
            sender, done = self._under_way.pop(id(arrival))
            others = [what for thread, what in done if thread != sender]
            own = [what for thread, what in done if thread == sender]
            weights = own.count("accumulate_wgrad")
            self.flights.append(Flight(len(others), len(own), weights))
            return wait(arrival)

        patch.setattr(comm, "exchange", leaves)
        patch.setattr(Arrival, "wait", lands)
        products = [(matmul, name) for name in ("linear", "matmul", "accumulate_wgrad")]
        for where, name in [*products, (Loop, "product")]:
            patch.setattr(where, name, self._counted(name, getattr(where, name)))

    def _counted(self, name: str, product: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            for _, done in self._under_way.values():
                done.append((threading.get_ident(), name))
            return product(*arguments)

        return run


def watched(rank: int, case: equality.Case) -> tuple[list[Flight], list[Call]]:
    """Return all flights of a rank, and its calls."""
    with pytest.MonkeyPatch.context() as patch, comm.recording() as calls:
        watch = Watch(patch)
        equality.train_on_rank(rank, case)
    return watch.flights, calls


def flights(pool: Pool, world: int, words: str) -> list[list[Flight]]:
    """Return the flights of each rank; the ranks' calls find each other, by NCCL's rule too."""
    given = f"{BASE} {VARIANTS['plain']} {A2A} {EP} 2 {ONE} {words}"
    run = parse(f"{given} --dry-run --dry-run-world-size {world}".split()).config
    program = Program(
        build_model=pretrain_gpt.build_model,
        build_datasets=pretrain_gpt.build_datasets,
        forward_step=pretrain_gpt.forward_step,
    )
    case = equality.Case(config=run, program=program, vocabulary=IDS)
    found = pool.run(world, watched, case)
    assert disagreement({rank: calls for rank, (_, calls) in enumerate(found)}) is None
    return [those for those, _ in found]


def test_rows_travel_under_the_other_half_of_a_pair(pool: Pool) -> None:
    """Four microbatches of a rank make three pairs; each layer's rows go there and back, twice."""
    per_pass = 2 * LAYERS
    for found in flights(pool, 2, COMBINED):
        assert len(found) == ITERATIONS * 4 * 2 * per_pass
        assert sum(each.by_others > 0 for each in found) == ITERATIONS * 3 * 2 * per_pass
        assert not any(each.by_sender for each in found)
    for found in flights(pool, 2, ""):
        assert len(found) == ITERATIONS * 4 * 2 * per_pass
        assert not any(each.by_others or each.by_sender for each in found)


def test_pairs_of_a_pipeline(pool: Pool) -> None:
    """Of four microbatches the first of two ranks pairs one, the last three; layers are halved."""
    ranks = flights(pool, 4, f"{PP} 2 {COMBINED}")
    for found, pairs in zip(ranks, (1, 1, 3, 3), strict=True):
        assert sum(each.by_others > 0 for each in found) == ITERATIONS * pairs * 2 * LAYERS


def test_weight_gradients_are_computed_while_rows_travel(pool: Pool) -> None:
    """All backwards but the last one of an iteration leave them until then."""
    per_backward = 2 * LAYERS
    for found in flights(pool, 2, DELAYED):
        assert sum(each.weight_gradients > 0 for each in found) == ITERATIONS * 3 * per_backward
        assert all(each.by_sender == each.weight_gradients for each in found)


def test_shared_experts_compute_while_rows_travel(pool: Pool) -> None:
    """Rows on the way to experts have them beside, and so have the rows' gradients."""
    words = f"--moe-shared-expert-intermediate-size 12 {SHARED}"
    for found in flights(pool, 2, words):
        there = [each for each in found if each.by_sender]
        assert len(there) == ITERATIONS * 4 * 2 * LAYERS and len(found) == 2 * len(there)
        # Two products forward; of each the gradients of input and weight backward.
        assert {each.by_sender for each in there} == {2, 4}
        assert sum(each.weight_gradients > 0 for each in there) == len(there) // 2
