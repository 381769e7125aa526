"""What would lower a run's memory: choices that go together with it, planned anew."""

import pytest

from megatron.training.arguments import ParsedRun, parse
from megatron.training.config import RunConfig
from megatron.training.plan.memory import MemoryPlan
from megatron.training.plan.savings import Savings

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 8 "
    "--global-batch-size 32 --train-iters 10 --lr 1e-3 --mock-data --vocab-size 100 --device cpu "
    "--tokenizer-type NullTokenizer --dry-run"
)
ROWS = 128


def run(text: str) -> ParsedRun[RunConfig]:
    return parse(f"{SMALL} {text}".split())


def savings(text: str) -> Savings:
    parsed = run(text)
    return Savings(parsed.config, parsed.origins, ROWS)


def total(text: str) -> int:
    return max(rank.total for rank in MemoryPlan(run(text).config, ROWS).ranks())


def test_each_choice_is_planned_as_if_it_were_given() -> None:
    text = "--dry-run-world-size 4 --use-distributed-optimizer"
    found = savings(text)
    choices = found.choices(0)
    assert found.total == total(text)
    for choice in choices:
        # `optim` follows from the switch: a strategy that is named replaces it.
        assert choice.total == total(f"{text} {choice.flags}") < found.total
    assert [choice.total for choice in choices] == sorted(choice.total for choice in choices)
    flags = {choice.flags for choice in choices}
    assert "--data-parallel-sharding-strategy optim_grads_params" in flags
    assert "--micro-batch-size 1" in flags  # nothing fits no memory at all
    assert "--bf16" in flags
    assert not any("no_shard" in choice or choice.endswith("optim") for choice in flags)


def test_the_largest_micro_batch_that_fits_is_chosen() -> None:
    found = savings("")
    room = total("--micro-batch-size 4")
    assert "--micro-batch-size 4" in {choice.flags for choice in found.choices(room)}
    assert "--micro-batch-size 2" in {choice.flags for choice in found.choices(room - 1)}


def test_choices_are_added_until_they_fit() -> None:
    found = savings("--dry-run-world-size 2")
    choices = found.choices(0)
    best = found.together(choices, choices[0].total)
    assert best is choices[0]
    more = found.together(choices, choices[0].total - 1)
    assert more is not None and more.total < choices[0].total
    assert more.flags.startswith(f"{choices[0].flags} --")
    assert more.total == total(f"--dry-run-world-size 2 {more.flags}")
    assert found.together([], 1e9) is None


def test_what_one_process_cannot_hold_is_shared_out() -> None:
    found = savings("")
    shared = "--data-parallel-sharding-strategy optim_grads_params"
    for world in (2, 4):
        room = total(f"{shared} --dry-run-world-size {world}")
        more = found.on_more_processes(None, room)
        assert more is not None and more.total == room
        assert more.flags == f"{world} processes with {shared}"
    assert found.on_more_processes(None, 1000) is None
    lines = list(found.lines(room))
    assert lines[0].startswith("the fullest rank has ")
    assert any(line.startswith("  --micro-batch-size") for line in lines)


def test_more_processes_come_with_all_other_choices_where_alone_they_do_not_do() -> None:
    found = savings("--dry-run-world-size 2")
    *_, last = found.lines(total("--micro-batch-size 1 --dry-run-world-size 4") / 4)
    assert last.startswith("it fits on ") and " and --" in last
    assert last.count("--data-parallel-sharding-strategy") == 1
    assert "--bf16" in last and "--micro-batch-size 1" in last


def test_what_is_done_already_is_not_offered() -> None:
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    flags = {choice.flags for choice in savings(f"--bf16 {full} --micro-batch-size 1").choices(0)}
    precise = "--use-precision-aware-optimizer --exp-avg-dtype bf16"
    assert flags == {f"{precise} --exp-avg-sq-dtype fp16"}


@pytest.mark.parametrize(
    ("betas", "formats"),
    [
        ("--adam-beta2 0.95", "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"),
        ("--adam-beta2 0.999", "--exp-avg-dtype bf16 --exp-avg-sq-dtype fp16"),
        ("--adam-beta2 0.9999", "--exp-avg-dtype bf16"),
        ("--adam-beta1 0.9999 --adam-beta2 0.9999", None),
    ],
)
def test_moments_are_kept_in_what_they_can_follow_their_gradients_in(
    betas: str, formats: str | None
) -> None:
    flags = {choice.flags for choice in savings(f"--bf16 {betas}").choices(0)}
    found = {text for text in flags if "precision-aware" in text}
    assert found == ({f"--use-precision-aware-optimizer {formats}"} if formats else set())


def test_choices_that_do_not_go_together_with_the_run_are_left_out() -> None:
    """Offload of whole layers contradicts recomputation."""
    flags = {choice.flags for choice in savings("--cpu-offloading-num-layers 2").choices(0)}
    assert not any("recompute" in choice for choice in flags)
    assert flags


@pytest.mark.parametrize("text", ["", "--dry-run-world-size 4"])
def test_a_run_that_fits_is_told_so_first(text: str) -> None:
    found = savings(text)
    choices = found.choices(1e12)
    first = list(found.lines(1e12))[1]
    assert first.startswith(f"  {choices[0].flags}: saves ") and first.endswith(", which fits")
