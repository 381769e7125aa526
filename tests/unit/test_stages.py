"""Layers over stages: sums always equal the request, or the request is refused with its numbers."""

from itertools import product
from typing import Any

import pytest

from megatron.core.pipeline_parallel.config import PipelineConfig
from megatron.core.pipeline_parallel.layout import LayoutStage, parse_layout
from megatron.core.pipeline_parallel.placement import Placement
from megatron.core.pipeline_parallel.stages import Stage, chunks_per_rank, make_stages, plan_stages
from megatron.core.utils import UserError


def counts(stages: list[Stage]) -> list[int]:
    return [len(stage.layers) for stage in stages]


def test_par_02_all_layers_are_there_or_the_split_is_refused() -> None:
    """Every layer once and in order, for every way of splitting."""
    ways: list[dict[str, Any]] = [
        {},
        {"account_for_embedding": True},
        {"account_for_loss": True},
        {"account_for_embedding": True, "account_for_loss": True},
        {"first": 3},
        {"last": 2},
        {"first": 2, "last": 4},
    ]
    places = [Placement(p, v) for p, v in product(range(1, 7), (1, 2, 3))]
    places += [Placement(p, 2, "v") for p in range(1, 5)]
    done = refused = 0
    for layers, placement, way in product(range(1, 21), places, ways):
        try:
            stages = plan_stages(layers, placement, **way)
        except UserError as error:
            refused += 1
            assert str(layers) in str(error) or "V-shaped" in str(error) or "one rank" in str(error)
            continue
        done += 1
        assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
        assert len(stages) == placement.num_stages
        assert [stage.is_first for stage in stages] == [True] + [False] * (len(stages) - 1)
        assert [stage.is_last for stage in stages] == [False] * (len(stages) - 1) + [True]
    assert done > 1000 and refused > 500


def test_thirty_layers_on_four_stages() -> None:
    assert counts(make_stages(30, 4)) == [8, 8, 7, 7]


@pytest.mark.parametrize(
    ("layers", "placement", "way", "expected"),
    [
        # Megatron's: the embedding counts as a layer of the first stage, the loss of the last.
        (31, Placement(4), {"account_for_embedding": True}, [7, 8, 8, 8]),
        (30, Placement(4), {"account_for_embedding": True, "account_for_loss": True}, [7, 8, 8, 7]),
        (14, Placement(4, 2), {"account_for_embedding": True, "account_for_loss": True},
         [1, 2, 2, 2, 2, 2, 2, 1]),
        (3, Placement(4), {"account_for_embedding": True}, [0, 1, 1, 1]),
        (28, Placement(4), {"first": 6, "last": 6}, [6, 8, 8, 6]),
        (29, Placement(4), {"first": 5}, [5, 8, 8, 8]),
        (10, Placement(2), {"last": 4}, [6, 4]),
        # Over all chunks of the end's rank: 4 of rank 0 in two chunks, 6 of each other.
        (22, Placement(4, 2), {"first": 4}, [2, 3, 3, 3, 2, 3, 3, 3]),
        (10, Placement(2, 2, "v"), {}, [3, 3, 2, 2]),
    ],
)  # fmt: skip
def test_splits_by_hand(
    layers: int, placement: Placement, way: dict[str, Any], expected: list[int]
) -> None:
    assert counts(plan_stages(layers, placement, **way)) == expected


def test_layout_of_the_flags_own_example() -> None:
    """32 stages for 16 ranks: as Megatron-LM's documentation tabulates it."""
    text = "Et*3|(tt|)*29,m|L"
    assert chunks_per_rank(61, 16, layout=text) == 2
    placement = Placement(16, 2)
    stages = plan_stages(61, placement, layout=text, mtp_num_layers=1)
    held = [[stages[p] for p in placement.positions(rank)] for rank in range(16)]
    assert [counts(chunks) for chunks in held] == [[3, 2], *[[2, 2]] * 13, [2, 0], [2, 0]]
    assert held[0][0].is_first and held[15][1].is_last
    assert held[14][1].num_mtp_layers == 1
    assert held[15][1].layers == range(61, 61)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("EtL", [(True, 1, 0, True)]),
        ("E||t|L", [(True, 0, 0, False), (False, 0, 0, False), (False, 1, 0, False),
                    (False, 0, 0, True)]),
        ("E t * 2 , | ( t | ) * 2 , t L", [(True, 2, 0, False), (False, 1, 0, False),
                                           (False, 1, 0, False), (False, 1, 0, True)]),
        ("E(t(t|)*2)*2tmL", [(True, 2, 0, False), (False, 1, 0, False), (False, 2, 0, False),
                             (False, 1, 0, False), (False, 1, 1, True)]),
    ],
)  # fmt: skip
def test_layout_strings(text: str, expected: list[tuple[bool, int, int, bool]]) -> None:
    assert parse_layout(text) == [LayoutStage(*stage) for stage in expected]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Ett|(tt|L", "not closed"),
        ("Ett)|L", r"'\)' makes no sense after 'Ett'"),
        ("Etx|L", "'x' makes no sense"),
        ("E*|L", r"'\*' makes no sense"),
        ("*3EtL", "makes no sense"),
        ("t|tL", "E must stand in stage 0 alone, but stands in no stage"),
        ("Et|Et|L", "stands in 0, 1"),
        ("Et|Lt", r"stage 1 \(Lt\) must be in the order"),
        ("EtL|t", "L must stand in stage 1 alone, but stands in 0"),
        ("Et*999999999999tL", "more than 100,000 letters"),
        (f"Et*{'9' * 5000}L", "more than 100,000 letters"),
        ("E((((t*9999)*9999)*9999)*9999)L", "more than 100,000 letters"),
        (f"E{'t*99999' * 2}L", "more than 100,000 letters"),
    ],
)
def test_misspelled_layouts(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_layout(text)


@pytest.mark.parametrize(
    ("layers", "placement", "way", "said"),
    [
        (20, Placement(1), {"last": 1}, r"last-pipeline-num-layers \(1\) needs .* at least 2"),
        (20, Placement(2), {"first": 4, "last": 4}, r"must be --num-layers \(20\)"),
        (20, Placement(4), {"first": 19}, r"leaves 1 of --num-layers \(20\) for the other 3 ranks"),
        (20, Placement(2, 4), {"first": 3}, r"--num-virtual-.* 4\) on rank 0: 3"),
        (3, Placement(2, 2), {}, r"\(3\) must be at least 4 = --pipeline-.* \(2\)"),
        (20, Placement(2, 2, "v"), {"first": 4}, "V-shaped"),
        (20, Placement(2), {"first": 4, "account_for_loss": True}, "keep one"),
        (5, Placement(2), {"layout": "Ett|ttL"}, r"has 4 t, not --num-layers \(5\)"),
        (4, Placement(4), {"layout": "Ett|ttL"}, r"has 2 stages, not .*size \(4\)"),
        (4, Placement(2), {"layout": "Ett|ttmL"}, r"has 1 m, not --mtp-num-layers \(0\)"),
    ],
)  # fmt: skip
def test_par_03_refused_with_numbers(
    layers: int, placement: Placement, way: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        plan_stages(layers, placement, **way)


def test_zero_repeats_are_counted_as_such() -> None:
    assert parse_layout("Et*0|m*000L") == [LayoutStage(True, 0, 0, False), (False, 0, 0, True)]


def test_a_pipeline_has_not_more_stages_than_anyone_has() -> None:
    with pytest.raises(UserError, match=r"--pipeline-model-parallel-size \(257\) must be at most"):
        PipelineConfig.resolve().stages(9000, 257)
    many = PipelineConfig.resolve(num_virtual_stages_per_pipeline_rank=99999999999)
    with pytest.raises(UserError, match=r"199999999998 stages = .* \(2\) x 99999999999"):
        many.stages(4, 2)


def test_chunks_per_rank() -> None:
    assert chunks_per_rank(16, 4) == 1
    assert chunks_per_rank(16, 4, layers_per_stage=2) == 2
    assert chunks_per_rank(16, 4, stages_per_rank=3) == 3
    with pytest.raises(UserError, match=r"\(16\) is not divisible by .* \(4\) x .* \(3\)"):
        chunks_per_rank(16, 4, layers_per_stage=3)
    with pytest.raises(UserError, match="3 stages, no multiple of"):
        chunks_per_rank(4, 2, layout="Ett|t|tL")
    with pytest.raises(UserError, match="keep one"):
        chunks_per_rank(16, 4, layers_per_stage=2, stages_per_rank=2)


@pytest.mark.parametrize(
    ("ranks", "layout", "rank"),
    [(4, "E|tttt||L", 2), (3, "Ett||ttL", 1), (4, "E|tt||||tt||L", 2)],
)
def test_a_rank_that_would_hold_nothing_is_refused(ranks: int, layout: str, rank: int) -> None:
    config = PipelineConfig.resolve(pipeline_model_parallel_layout=layout)
    with pytest.raises(UserError, match=rf"gives rank {rank} of the pipeline nothing to hold"):
        config.stages(4, ranks)


@pytest.mark.parametrize(("ranks", "layout"), [(2, "E||tttt|L"), (3, "E|tttt|L"), (1, "E||ttttL")])
def test_a_stage_may_be_empty_on_a_rank_that_holds_another(ranks: int, layout: str) -> None:
    config = PipelineConfig.resolve(pipeline_model_parallel_layout=layout)
    assert sum(len(stage.layers) for stage in config.stages(4, ranks)) == 4
