"""Rules of layouts: what a layout cannot hold, and the nearest ones that work."""

import time

import pytest

from megatron.core.utils import UserError
from megatron.training.arguments import ParsedRun, parse
from megatron.training.config import RunConfig

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 "
    "--micro-batch-size 2 --lr 1e-3 --mock-data"
)
DRY = f"{BASE} --dry-run --train-iters 10"


def plan(text: str, base: str = DRY) -> ParsedRun[RunConfig]:
    return parse(f"{base} {text}".split())


def refused(text: str, base: str = DRY) -> str:
    with pytest.raises(UserError) as caught:
        plan(text, base)
    return str(caught.value)


def test_fewer_groups_than_tensor_ranks_run() -> None:
    text = "--tensor-model-parallel-size 8 --group-query-attention --num-query-groups 2"
    config = parse(f"{BASE} --train-iters 10 {text}".split(), world_size=8).config
    assert config.model.attention.num_query_groups == 2


def flags_of(layout: str) -> str:
    """Return the flags of a layout such as ``8: tp2 pp2``, the first number being processes."""
    flags = {
        "tp": "--tensor-model-parallel-size",
        "pp": "--pipeline-model-parallel-size",
        "cp": "--context-parallel-size",
    }
    world, _, axes = layout.partition(":")
    words = [f"{flags[axis[:2]]} {axis[2:]}" for axis in axes.split()]
    return " ".join([f"--dry-run-world-size {world}", *words])


@pytest.mark.parametrize(
    ("layout", "flags", "parts"),
    [
        # The processes.
        ("6: tp4", "", ("--tensor-model-parallel-size 4 (flag)", "such as 4 or 8")),
        # Heads.
        ("6: tp6", "", ("--num-attention-heads (8)", "try --tensor-model-parallel-size 4 or 8")),
        # Layers.
        ("8: pp8", "", ("--num-layers (4) must be at least --pipeline-model-parallel-size (8)",)),
        # The sequence.
        ("4: cp4", "--seq-length 36", ("--seq-length (36)", "try 32 or 40")),
        # The batch.
        ("4: tp2", "--global-batch-size 6", ("--global-batch-size (6)", "try 4 or 8")),
        # Key heads.
        (
            "6: tp6",
            "--num-attention-heads 12 --hidden-size 96 --group-query-attention "
            "--num-query-groups 4",
            ("--num-query-groups (4)", "--tensor-model-parallel-size 4 or 12"),
        ),
        # A vocabulary that is padded already.
        ("4: tp4", "--padded-vocab-size 130", ("--padded-vocab-size (130)", "128 or 132")),
        # Heads of an all-to-all.
        (
            "8: tp2 cp4",
            "--num-attention-heads 4 --cp-comm-type a2a",
            ("--num-attention-heads (4)", "lower the latter to 2", "--cp-comm-type p2p"),
        ),
    ],
)
def test_what_a_layout_cannot_hold_names_layouts_that_work(
    layout: str, flags: str, parts: tuple[str, ...]
) -> None:
    message = refused(f"{flags_of(layout)} {flags}")
    for part in parts:
        assert part in message, message
    _, _, advice = message.rpartition("this works: ")
    assert advice != message, message
    for other in advice.split(", or "):
        assert plan(f"{flags_of(layout)} {flags} {other}").left_out == ()


@pytest.mark.parametrize("flags", ["--use-distributed-optimizer", "--use-megatron-fsdp"])
def test_instances_of_the_optimizer_share_the_replicas(flags: str) -> None:
    text = f"--dry-run-world-size 12 {flags} --num-distributed-optimizer-instances"
    assert plan(f"{text} 3 --global-batch-size 24").config.shares == 4
    message = refused(f"{text} 5 --global-batch-size 24")
    assert "(5) must divide the 12 ranks" in message and "choose one of 1, 2, 3, 4, 6" in message
    assert "leaves each instance one of the 12" in refused(f"{text} 12 --global-batch-size 24")


def test_settings_of_sharing_that_change_nothing_are_named() -> None:
    def idle(text: str) -> set[str]:
        run = plan(f"--dry-run-world-size 2 --global-batch-size 4 {text}")
        return {words.split()[0] for words in run.no_effect}

    unused = "--optimizer-offload-fraction 0.5 --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads"
    assert len(idle(unused)) == len(idle("")) + 3
    sharded = "--use-megatron-fsdp --ddp-bucket-size 100 --overlap-param-gather"
    assert {"--ddp-bucket-size", "--overlap-param-gather"} <= idle(sharded)
    useful = "--use-distributed-optimizer --overlap-param-gather"
    assert "--overlap-param-gather" not in idle(useful)


def test_a_size_of_zero_is_wrong_by_itself() -> None:
    for axis, flag in (("tp", "tensor-model"), ("pp", "pipeline-model"), ("cp", "context")):
        message = refused(flags_of(f"4: {axis}0"))
        assert message == f"--{flag}-parallel-size (0) must be at least 1"


def test_a_world_is_not_larger_than_any_could_be() -> None:
    """8,648,640 has 448 divisors, more than other numbers up to ten millions."""
    message = refused(flags_of("99999999999: tp2"))
    assert message == "--dry-run-world-size (99999999999) must be at most 10,000,000"
    begin = time.process_time()
    message = refused(flags_of("8648640: tp17"))
    assert "product divides 8648640: 1, 2, 3, 4, 5, 6, " in message and len(message) < 1500
    assert time.process_time() - begin < 60  # it takes 3


def test_a_ramp_of_millions_of_sizes_is_refused() -> None:
    words = "--dry-run-world-size 1 --global-batch-size 80000000 --rampup-batch-size"
    assert "79999999 increments" in refused(f"{words} 1 1 1000")
    assert "try --global-batch-size 79999999 or 80000002" in refused(f"{words} 1 3 1000")


def test_the_nearest_layout_comes_first() -> None:
    message = refused(f"{flags_of('24: tp3 pp4')} --num-layers 8")
    assert message.endswith(
        "; with 24 processes this works: --tensor-model-parallel-size 2, or "
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 3"
    ), message


def test_what_a_layout_does_not_decide_names_none() -> None:
    assert "this works" not in refused("--dry-run-world-size 2 --expert-model-parallel-size 2")
    assert "this works" not in refused("--dry-run-world-size 2 --train-samples 10")
    assert "this works" not in refused("--num-attention-heads 7")


@pytest.mark.parametrize(
    ("layout", "flags", "parts"),
    [
        ("2: pp2", "--pipeline-schedule interleaved", ("-stages-per-pipeline-rank 2", "1f1b")),
        (
            "2: pp2",
            "--pipeline-schedule 1f1b --num-virtual-stages-per-pipeline-rank 2",
            ("--pipeline-schedule 1f1b", "there would be 2", "interleaved or zb-v"),
        ),
        (
            "2: pp2",
            "--pipeline-schedule zb-v --num-layers 12 --num-virtual-stages-per-pipeline-rank 3",
            ("--pipeline-schedule zb-v", "there would be 3", "leave out"),
        ),
        ("4: pp4", "--pipeline-schedule zb-v", ("--num-layers (4)", "8 = ", "zb-v needs")),
        (
            "2: pp2",
            "--num-layers 10 --num-layers-per-virtual-pipeline-stage 3",
            (
                "--num-layers (10)",
                "--num-layers-per-virtual-pipeline-stage (3)",
                "per-virtual-pipeline-stage 1 or 5, or",
            ),
        ),
        (
            "4: pp4",
            "--num-layers 8 --num-virtual-stages-per-pipeline-rank 2 "
            "--microbatch-group-size-per-virtual-pipeline-stage 3",
            ("--microbatch-group-size-per-virtual-pipeline-stage (3)", "(4)"),
        ),
        (
            "8: cp8",
            "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
            ("--hierarchical-context-parallel-sizes (now 2 2)", "try 2 4 or 4 2"),
        ),
        ("8: cp8", "--cp-comm-type a2a+p2p", ("now absent", "try 2 4 or 4 2")),
        ("2: cp2", "--cp-comm-type p2p a2a", ("has 2 values", "--num-layers (4)")),
        ("2: cp2", "--cp-comm-type ring", ("--cp-comm-type ring", "p2p, all_gather, a2a")),
        (
            "4: tp2 pp2",
            "--use-tp-pp-dp-mapping --expert-tensor-parallel-size 1 "
            "--expert-model-parallel-size 2 --num-experts 4 --tensor-model-parallel-size 1",
            ("--use-tp-pp-dp-mapping", "--expert-model-parallel-size (2)", "leave out"),
        ),
    ],
)
def test_what_does_not_go_with_a_layout_says_what_does(
    layout: str, flags: str, parts: tuple[str, ...]
) -> None:
    message = refused(f"{flags_of(layout)} {flags}")
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("2: pp2", "--pipeline-schedule zb-h1 --global-batch-size 2"),
        ("2: pp2", "--pipeline-schedule zb-v --global-batch-size 6"),
        ("2: pp2", "--pipeline-schedule gpipe"),
        # Microbatches that are no multiple of the stages.
        ("2: pp2", "--num-layers-per-virtual-pipeline-stage 1 --global-batch-size 6"),
        # Uneven stages.
        ("3: pp3", "--num-layers 7 --pipeline-schedule zb-h1"),
        ("2: pp2", "--pipeline-model-parallel-layout Et|tttL"),
        # Both ends count as layers: 6 + 2 in stages of two.
        (
            "2: pp2",
            "--num-layers 6 --num-layers-per-virtual-pipeline-stage 2 "
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
        ),
        # A group of microbatches counts only where a rank holds several stages.
        ("4: pp4", "--microbatch-group-size-per-virtual-pipeline-stage 2"),
        # Dropout, documents and kinds of softmax under context parallelism.
        ("2: cp2", "--attention-dropout 0.1 --reset-attention-mask --softmax-type learnable"),
        ("4: cp4", "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"),
        ("4: cp4", "--hierarchical-context-parallel-sizes 3 2"),
        ("2: cp2", "--cp-comm-type p2p a2a all_gather p2p"),
        ("8: tp2 cp2 pp2", "--use-tp-pp-dp-mapping --sequence-parallel"),
        ("8: tp2 pp2", "--use-tp-pp-dp-mapping --sequence-parallel"),
    ],
)
def test_layouts_that_work_are_planned(layout: str, flags: str) -> None:
    assert plan(f"{flags_of(layout)} {flags}").left_out == ()
