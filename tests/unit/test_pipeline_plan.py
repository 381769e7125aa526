"""What a schedule has alive, and its bubble, against the simulator over the whole iteration."""

import pytest

from megatron.core.pipeline_parallel.actions import Action
from megatron.core.pipeline_parallel.config import PipelineConfig
from megatron.core.pipeline_parallel.placement import Placement
from megatron.core.pipeline_parallel.simulator import simulate
from megatron.training.plan import pipeline as pipeline_plan
from megatron.training.plan.pipeline import Alive

CASES = [
    *((name, p, 1, None) for name in ("gpipe", "1f1b", "zb-h1") for p in (2, 3, 5)),
    *(("zb-v", p, 2, None) for p in (2, 3, 5)),
    *(("interleaved", p, v, g) for p, v, g in ((2, 2, None), (3, 3, 4), (4, 2, 7), (5, 3, 10))),
    *(("combined-1f1b", p, 1, None) for p in (1, 2, 3, 5)),
    *(("combined-interleaved", p, v, g) for p, v, g in ((2, 2, None), (3, 3, 4), (4, 2, 7))),
]
COUNTS = (1, 2, 5, 11, 24, 47, 48)


def made(name: str, ranks: int, chunks: int, group: int | None) -> tuple[PipelineConfig, Placement]:
    config = PipelineConfig.resolve(
        pipeline_schedule=name.removeprefix("combined-"),
        microbatch_group_size_per_vp_stage=group,
        overlap_moe_expert_parallel_comm=name.startswith("combined-"),
    )
    return config, Placement(ranks, chunks, "v" if name == "zb-v" else "loop")


@pytest.mark.parametrize(("name", "ranks", "chunks", "group"), CASES)
def test_a_short_iteration_tells_of_a_long_one(
    name: str, ranks: int, chunks: int, group: int | None
) -> None:
    config, placement = made(name, ranks, chunks, group)
    for count in COUNTS:
        whole = simulate(config.schedule(placement, count))
        bubble = pipeline_plan.bubble(config, placement, count)
        assert bubble == pytest.approx(whole.bubble, abs=1e-9), count
        for rank, moments in enumerate(pipeline_plan.alive(config, placement, count)):
            assert max(moment.microbatches for moment in moments) == whole.peak(rank), count


@pytest.mark.parametrize(("name", "ranks", "chunks", "group"), CASES)
def test_no_moment_is_fuller_than_those_that_are_given(
    name: str, ranks: int, chunks: int, group: int | None
) -> None:
    config, placement = made(name, ranks, chunks, group)
    for count in (3, 21):
        found = pipeline_plan.alive(config, placement, count)
        for rank, actions in enumerate(config.schedule(placement, count).actions):
            for moment in every_moment(actions, chunks):
                assert any(
                    all(a <= b for a, b in zip(sum(moment, ()), fuller, strict=True))
                    for given in found[rank]
                    for fuller in before_and_after(given, splits=name.startswith("zb"))
                ), moment


def before_and_after(given: Alive, *, splits: bool) -> list[tuple[int, ...]]:
    """Return what is alive before the backward of a moment and, if it leaves something, after."""
    kept, postponed = list(given.kept), list(given.postponed)
    before = (*kept, *postponed)
    kept[given.chunk] -= 1
    postponed[given.chunk] += 1
    return [before, (*kept, *postponed)] if splits else [before]


def every_moment(actions: tuple[Action, ...], chunks: int) -> set[tuple[tuple[int, ...], ...]]:
    """Return what is alive after each action, found by asking of every microbatch."""
    found = set()
    for stop in range(1, len(actions) + 1):
        done = set(actions[:stop])
        kept, postponed = [0] * chunks, [0] * chunks
        for action in done:
            if action.kind == "forward":
                ends = {action._replace(kind=kind) for kind in ("backward", "backward_input")}
                kept[action.chunk] += not ends & done
            elif action.kind == "backward_input":
                later = action._replace(kind="backward_weight")
                postponed[action.chunk] += later not in done
        found.add((tuple(kept), tuple(postponed)))
    return found


@pytest.mark.parametrize(("name", "ranks", "chunks", "group"), CASES)
def test_closed_forms(name: str, ranks: int, chunks: int, group: int | None) -> None:
    config, placement = made(name, ranks, chunks, group)
    count = 6 * (group or ranks)
    _, value = pipeline_plan.closed_form(config, placement, count)
    assert pipeline_plan.bubble(config, placement, count) == pytest.approx(value, rel=1e-9)


def test_zero_bubble_by_hand() -> None:
    """4 ranks, 8 microbatches of 3 units: 1F1B waits 9 units of 24, ZB-H1 3, ZB-V half of that."""
    for name, waits in (("1f1b", 9), ("zb-h1", 3), ("zb-v", 1.5)):
        config, placement = made(name, 4, 2 if name == "zb-v" else 1, None)
        assert pipeline_plan.bubble(config, placement, 8) == pytest.approx(waits / 24)


def test_one_rank_does_not_wait() -> None:
    assert pipeline_plan.bubble(PipelineConfig.resolve(), Placement(1), 8) == 0


def test_thousands_of_microbatches_are_not_played_through() -> None:
    config, placement = made("interleaved", 16, 8, None)
    assert pipeline_plan._enough(config, placement, 5120) <= 80
    assert max(
        moment.microbatches for moment in pipeline_plan.alive(config, placement, 5120)[0]
    ) == pytest.approx(17.875)  # (2 x 15 + 7 x 16 + 1) / 8
