"""Schedules against the papers' closed forms, their orders against worked examples; no deadlock."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from megatron.core.pipeline_parallel.actions import Action, Pair
from megatron.core.pipeline_parallel.messages import Message
from megatron.core.pipeline_parallel.order import Post, Program, check, programs
from megatron.core.pipeline_parallel.placement import Placement
from megatron.core.pipeline_parallel.schedules import (
    SCHEDULES,
    Schedule,
    ScheduleName,
    make_schedule,
)
from megatron.core.pipeline_parallel.simulator import Costs, Deadlock, Timeline, simulate
from megatron.core.utils import UserError

CHUNKS: dict[str, tuple[int, ...]] = {"interleaved": (2, 3), "zb-v": (2,)}
RANKS, MICROBATCHES = (1, 2, 3, 4, 7), (1, 2, 3, 4, 5, 8, 13)
PAIRED: list[tuple[ScheduleName, int]] = [("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]
NAMED = [(name, chunks) for name in SCHEDULES for chunks in CHUNKS.get(name, (1,))]
# Forward, input gradient and weight gradient: equal, unequal, and no two with a common measure.
COSTS = [Costs(1, 1, 1), Costs(1, 2, 1), Costs(3.0, 3.7, 2.9, transfer=0.4)]


def every(name: ScheduleName, chunks: int, *, combined: bool = False) -> list[Schedule]:
    sizes = product(RANKS, MICROBATCHES)
    return [make_schedule(name, p, m, chunks, combined=combined) for p, m in sizes]


def num_pairs(schedule: Schedule) -> list[int]:
    return [sum(isinstance(step, Pair) for step in steps) for steps in schedule.steps]


def text(actions: tuple[Action, ...]) -> str:
    """Return actions as one writes them in the papers: F0 B0, with the chunk behind a point."""
    letters = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}
    return " ".join(f"{letters[a.kind]}{a.microbatch}.{a.chunk}" for a in actions)


@pytest.mark.parametrize(("name", "chunks"), NAMED)
def test_every_rank_does_each_part_of_each_microbatch_once(name: ScheduleName, chunks: int) -> None:
    for schedule in every(name, chunks):
        work = list(product(range(schedule.num_microbatches), range(chunks)))
        for actions in schedule.actions:
            kinds = {action.kind for action in actions}
            split = {"forward", "backward_input", "backward_weight"}
            assert kinds == (split if name.startswith("zb") else {"forward", "backward"})
            expected = [Action(kind, i, chunk) for kind in kinds for i, chunk in work]
            assert Counter(actions) == Counter(expected)


def test_gpipe_by_hand() -> None:
    assert text(make_schedule("gpipe", 2, 3).actions[0]) == "F0.0 F1.0 F2.0 B0.0 B1.0 B2.0"


def test_one_forward_one_backward_by_hand() -> None:
    """Figure 4 of Narayanan et al., 2021: four ranks; here four microbatches."""
    ranks = [text(actions).replace(".0", "") for actions in make_schedule("1f1b", 4, 4).actions]
    assert ranks == [
        "F0 F1 F2 F3 B0 B1 B2 B3",
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_interleaved_by_hand() -> None:
    """Two ranks, two chunks, four microbatches: rounds of two through chunk 0, then chunk 1."""
    first, last = (text(actions) for actions in make_schedule("interleaved", 2, 4, 2).actions)
    assert last == (
        "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0"
    )
    assert first == (
        "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0"
    )


def test_interleaved_group_larger_than_the_pipeline() -> None:
    """Groups of three, the last one of two; forwards alone show the rounds."""
    schedule = make_schedule("interleaved", 2, 5, 2, group_size=3).evaluation
    assert text(schedule.actions[0]) == ("F0.0 F1.0 F2.0 F0.1 F1.1 F2.1 F3.0 F4.0 F3.1 F4.1")


def test_zero_bubble_h1_by_hand() -> None:
    """Three ranks: the last postpones two weight gradients, the first none."""
    first, _, last = (text(a).replace(".0", "") for a in make_schedule("zb-h1", 3, 3).actions)
    assert first == "F0 F1 F2 I0 W0 I1 W1 I2 W2"
    assert last == "F0 I0 F1 I1 F2 I2 W0 W1 W2"


def test_a_v_holds_both_ends_on_rank_0_and_turns_on_the_last() -> None:
    placement = Placement(4, 2, "v")
    assert [placement.positions(rank) for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    for shape, position in product(("loop", "v"), range(8)):
        placement = Placement(4, 2, shape)  # type: ignore[arg-type]
        assert placement.position(*placement.owner(position)) == position


@pytest.mark.parametrize("costs", COSTS[:2])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_one_chunk(name: ScheduleName, costs: Costs) -> None:
    """(p-1)/m: Narayanan et al., 2021, section 2.2.1."""
    for p, m in product(RANKS, MICROBATCHES):
        assert simulate(make_schedule(name, p, m), costs).bubble == pytest.approx((p - 1) / m)


@pytest.mark.parametrize("costs", COSTS[:2])
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_bubble_of_interleaved(chunks: int, costs: Costs) -> None:
    """(p-1)/(v m): Narayanan et al., 2021, section 2.2.2; m is a multiple of p."""
    for p, rounds in product(RANKS, (1, 2, 4)):
        timeline = simulate(make_schedule("interleaved", p, p * rounds, chunks), costs)
        assert timeline.bubble == pytest.approx((p - 1) / (chunks * p * rounds))


def test_bubble_of_zero_bubble_h1() -> None:
    """(p-1)(F + I - W): Qi et al., 2023, table 2; a third of 1F1B's where all three are equal."""
    for p, m in product(RANKS, (8, 16, 32)):
        for costs in (Costs(1, 1, 1), Costs(2, 2, 1), Costs(1, 1.5, 1)):
            work = m * (costs.forward + costs.backward_input + costs.backward_weight)
            bubble = (p - 1) * (costs.forward + costs.backward_input - costs.backward_weight)
            timeline = simulate(make_schedule("zb-h1", p, m), costs)
            assert timeline.bubble == pytest.approx(bubble / work)


def test_no_rank_waits_in_zero_bubble_v() -> None:
    """With equal costs a rank never stands still between its first action and its last."""
    for p in RANKS:
        timeline = simulate(make_schedule("zb-v", p, 2 * p + 3, 2), Costs(1, 1, 1))
        for rank, spans in enumerate(timeline.spans):
            assert spans[-1].end - spans[0].start == pytest.approx(timeline.busy(rank))
        # What is left is that the last rank starts p-1 half forwards late.
        assert timeline.makespan == pytest.approx(3 * (2 * p + 3) + (p - 1) / 2)


def test_a_better_schedule_has_the_smaller_bubble() -> None:
    def bubble(name: ScheduleName, chunks: int = 1) -> float:
        return simulate(make_schedule(name, 4, 8, chunks)).bubble

    assert bubble("1f1b") > bubble("interleaved", 2) > bubble("zb-h1") > bubble("zb-v", 2)


def peaks(timeline: Timeline) -> list[float]:
    return [timeline.peak(rank) for rank in range(len(timeline.spans))]


@pytest.mark.parametrize("costs", COSTS)
def test_live_microbatches(costs: Costs) -> None:
    """1F1B holds p - stage, the zero-bubble ones p everywhere, GPipe all."""
    for p, m in product(RANKS, MICROBATCHES):
        assert peaks(simulate(make_schedule("gpipe", p, m), costs)) == [m] * p
        expected = [min(m, p - stage) for stage in range(p)]
        assert peaks(simulate(make_schedule("1f1b", p, m), costs)) == expected
        assert max(peaks(simulate(make_schedule("zb-h1", p, m), costs))) <= p
        assert max(peaks(simulate(make_schedule("zb-v", p, m, 2), costs))) <= p


def test_live_microbatches_over_time() -> None:
    """Two ranks, two microbatches, unit costs: rank 0 does F0 F1 and waits for B0 until 4."""
    timeline = simulate(make_schedule("1f1b", 2, 2), Costs(1, 0.5, 0.5))
    assert [span.start for span in timeline.spans[0]] == [0, 1, 3, 5]
    assert timeline.live(0) == [(0, 1), (1, 2), (4, 1), (6, 0)]
    assert timeline.live(1) == [(1, 1), (3, 1), (5, 0)]


def test_a_transfer_delays_the_next_rank_only() -> None:
    timeline = simulate(make_schedule("gpipe", 2, 2).evaluation, Costs(transfer=0.25))
    assert [span.start for span in timeline.spans[0]] == [0, 1]
    assert [span.start for span in timeline.spans[1]] == [1.25, 2.25]


def test_forward_only_in_a_v_never_waits() -> None:
    for p, m in product(RANKS, MICROBATCHES):
        timeline = simulate(make_schedule("zb-v", p, m, 2).evaluation)
        # The last microbatch enters after m-1 pairs of steps, and goes through all 2p stages.
        assert timeline.makespan == pytest.approx((m - 1) + p)


def pair_orders(ranks: Sequence[Program]) -> dict[tuple[int, int], list[Message]]:
    """Return, for each rank and each of its peers, the messages between them as the rank posts."""
    orders: dict[tuple[int, int], list[Message]] = {}
    for rank, program in enumerate(ranks):
        for instruction in program:
            if isinstance(instruction, Post):
                orders.setdefault((rank, instruction.peer), []).append(instruction.message)
    return orders


@pytest.mark.parametrize(("name", "chunks"), NAMED)
def test_unbuffered_transfers_never_wait_for_each_other(name: ScheduleName, chunks: int) -> None:
    for schedule in every(name, chunks):
        for whole in (schedule, schedule.evaluation):
            check(whole, programs(whole, prefetch=0), blocking=True)
            for prefetch in (0, 1, 3):
                ranks = programs(whole, prefetch)
                check(whole, ranks)
                orders = pair_orders(ranks)
                assert all(orders[a, b] == orders[b, a] for a, b in orders)


@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaved_with_any_group_and_count(chunks: int, combined: bool) -> None:
    for p, extra, m in product((2, 3, 4), range(3), range(1, 14)):
        size = (p, m, chunks, p + extra)
        schedule = make_schedule("interleaved", *size, combined=combined)
        check(schedule, programs(schedule))


@pytest.mark.parametrize(("name", "chunks"), PAIRED)
def test_pairs_hold_each_action_once_and_never_wait_for_each_other(
    name: ScheduleName, chunks: int
) -> None:
    for plain, combined in zip(
        every(name, chunks), every(name, chunks, combined=True), strict=True
    ):
        for before, after in zip(plain.actions, combined.actions, strict=True):
            assert Counter(before) == Counter(after)
            # Gradients are added up in the order of the plain schedule.
            backwards = [action for action in before if action.kind == "backward"]
            assert [action for action in after if action.kind == "backward"] == backwards
        for step in (step for steps in combined.steps for step in steps):
            if isinstance(step, Pair):
                assert (step.forward.kind, step.backward.kind) == ("forward", "backward")
                assert step.forward[1:] != step.backward[1:]
        check(combined, programs(combined, prefetch=0), blocking=True)
        for prefetch in (0, 1, 3):
            ranks = programs(combined, prefetch)
            check(combined, ranks)
            orders = pair_orders(ranks)
            assert all(orders[a, b] == orders[b, a] for a, b in orders)


def test_pairs_by_hand() -> None:
    """The last of two ranks runs one forward ahead, the first three, so that both have pairs."""
    first, last = make_schedule("1f1b", 2, 5, combined=True).steps
    forward, backward = ([Action(kind, i) for i in range(5)] for kind in ("forward", "backward"))
    assert first == (*forward[:3], *map(Pair, forward[3:], backward[:2]), *backward[2:])
    assert last == (forward[0], *map(Pair, forward[1:], backward[:4]), backward[4])
    (alone,) = make_schedule("1f1b", 1, 3, combined=True).steps
    assert alone == (forward[0], *map(Pair, forward[1:3], backward[:2]), backward[2])


@pytest.mark.parametrize("costs", COSTS[:2])
def test_pairs_cost_microbatches_and_no_time(costs: Costs) -> None:
    """Combined 1F1B has the bubble of 1F1B, and holds 2 (p - stage) microbatches."""
    for p, m in product(RANKS, MICROBATCHES):
        schedule = make_schedule("1f1b", p, m, combined=True)
        timeline = simulate(schedule, costs)
        assert timeline.bubble == pytest.approx((p - 1) / m)
        assert peaks(timeline) == [min(m, 2 * (p - stage)) for stage in range(p)]
        assert num_pairs(schedule) == [max(0, m - 2 * (p - stage) + 1) for stage in range(p)]
    for p, rounds, chunks in product(RANKS, (1, 2, 4), (2, 3)):
        schedule = make_schedule("interleaved", p, p * rounds, chunks, combined=True)
        timeline = simulate(schedule, costs)
        assert timeline.bubble == pytest.approx((p - 1) / (chunks * p * rounds))
        ahead = [2 * (p - rank - 1) + (chunks - 1) * p + 1 for rank in range(p)]
        work = chunks * p * rounds
        assert peaks(timeline) == [pytest.approx(min(work, a + 1) / chunks) for a in ahead]
        assert num_pairs(schedule) == [max(0, work - a) for a in ahead]


def test_hops_on_one_rank_are_no_transfers() -> None:
    """A V of two ranks: of the hops 0-1, 1-2 and 2-3 the middle one stays on rank 1."""
    posts = [step for step in programs(make_schedule("zb-v", 2, 1, 2))[0] if isinstance(step, Post)]
    assert [(post.message.kind, post.message.source, post.sends) for post in posts] == [
        ("activation", 0, True),
        ("activation", 2, False),
        ("gradient", 3, True),
        ("gradient", 1, False),
    ]
    alone = make_schedule("interleaved", 1, 4, 3)
    assert programs(alone)[0] == alone.actions[0]


def test_a_broken_list_is_named() -> None:
    """Rank 1 wants the backward of a microbatch before its forward."""
    good = make_schedule("1f1b", 2, 2)
    first, second = good.actions
    bad = replace(good, steps=(first, (second[1], second[0], *second[2:])))
    with pytest.raises(Deadlock) as error:
        simulate(bad)
    message = str(error.value)
    assert "rank 1 stands before backward(microbatch 0, chunk 0) without its forward" in message
    assert "rank 0 stands before backward(microbatch 0, chunk 0) without gradient" in message


def test_receives_in_the_wrong_order_are_named() -> None:
    """Rank 0 sends an activation and waits for a gradient; rank 1 sends the gradient first."""
    schedule = make_schedule("1f1b", 2, 2)
    first, second = (list(program) for program in programs(schedule, prefetch=0))
    kinds = [step.sends for step in second if isinstance(step, Post)]
    assert kinds == [False, False, True, True]  # the second activation before the first gradient
    receive = [index for index, step in enumerate(second) if isinstance(step, Post)][1]
    gradient = [index for index, step in enumerate(second) if isinstance(step, Post)][2]
    second.insert(gradient, second.pop(receive))
    with pytest.raises(Deadlock) as error:
        check(schedule, [tuple(first), tuple(second)])
    message = str(error.value)
    assert "rank 0 stands before backward(microbatch 0, chunk 0)" in message
    assert "rank 1 stands before forward(microbatch 1, chunk 0)" in message
    assert "its transfer under way is the activation of microbatch 1 from stage 0" in message
    assert "its transfer under way is the gradient of microbatch 0 from stage 1" in message


@pytest.mark.parametrize(
    ("name", "chunks", "group", "said"),
    [
        ("interleaved", 1, None, "2 or more"),
        ("zb-v", 1, None, "two stages per rank"),
        ("1f1b", 2, None, "there would be 2; take .*interleaved or zb-v"),
        ("interleaved", 2, 3, r"--microbatch-group-size-per-virtual-pipeline-stage \(3\)"),
    ],
)
def test_refused(name: ScheduleName, chunks: int, group: int | None, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_schedule(name, 4, 8, chunks, group)


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("zb-h1", 1), ("zb-v", 2)])
def test_schedules_without_pairs(name: ScheduleName, chunks: int) -> None:
    with pytest.raises(UserError, match=f"do not take turns in --pipeline-schedule {name}"):
        make_schedule(name, 4, 8, chunks, combined=True)
