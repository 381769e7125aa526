"""What a backward has for communication, by hand; tests/distributed/test_memory.py measures it."""

import pytest

from megatron.core.optimizer.memory import BYTES
from megatron.training.arguments import parse
from megatron.training.config import RunConfig
from megatron.training.plan import passing, sums
from megatron.training.plan.buffer_plans import chunk_buffers
from megatron.training.plan.gathered import gathered
from megatron.training.plan.passing import Passing

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--train-iters 10 --lr 1e-3 --mock-data --vocab-size 15 --make-vocab-size-divisible-by 16 "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --dry-run"
)
GRADS, ALL = (
    f"--data-parallel-sharding-strategy {name}" for name in ("optim_grads", "optim_grads_params")
)
ROWS = 16
LAYER = 50176
"""Elements of a layer, 12 x 64 x 64 + 13 x 64, padded to shares of 64."""
NORM = 256
"""Elements of the last norm, padded; its gradients wait for their turn, after the layers."""


def config(text: str, world: int = 4) -> RunConfig:
    return parse(f"{SMALL} --dry-run-world-size {world} {text}".split()).config


def of(run: RunConfig) -> Passing:
    (plans,) = chunk_buffers(run, ROWS, 0)
    return passing.of_stage(run, run.stages[0], plans)


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        # A unit's gradients and their sum; when that begins, the one before is under way.
        (GRADS, 4 + 4 / 4),
        (f"{GRADS} --overlap-grad-reduce", 2 * (4 + 4 / 4)),
        # Two units' weights, and at the same time a sum under way.
        (ALL, 4 + 2 * 4),
        (f"{ALL} --overlap-grad-reduce", 4 + 2 * 4 + (4 + 4 / 4)),
        (f"{ALL} --bf16", 4 + 2 * 2),
        (f"{GRADS} --bf16 --grad-reduce-in-bf16", 2 + 2 / 4),
        # A copy of half the size is sent.
        (
            f"{GRADS} --bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32",
            4 + 2 + 2 / 4,
        ),
        (f"{GRADS} --num-distributed-optimizer-instances 2", 4 + 4 / 2),
    ],
)
def test_of_equal_layers_there_are_as_many_as_the_table_says(text: str, whole: float) -> None:
    run = config(text)
    assert of(run).most == whole * LAYER + BYTES[run.precision.grad_dtype] * NORM


def test_a_tied_embedding_stays_from_its_first_use_to_its_last() -> None:
    text = f"{SMALL} --dry-run-world-size 4 {ALL}".replace(
        "--untie-embeddings-and-output-weights", ""
    )
    run = parse(text.split()).config
    (plans,) = chunk_buffers(run, ROWS, 0)
    found = passing.of_stage(run, run.stages[0], plans)
    apart = of(config(ALL))
    both = 8 * ROWS * 64
    assert found.during["decoder.layers.1"] == apart.during["decoder.layers.1"] + both
    assert set(found.during) == {"embedding", "output_layer", "decoder"} | {
        f"decoder.layers.{number}" for number in range(4)
    }


def test_nothing_is_there_for_communication_where_nothing_is_shared_out() -> None:
    assert of(config("--use-distributed-optimizer")) == Passing()
    assert of(config(ALL, world=1)) == Passing()


def test_a_backward_in_two_parts_has_all_gradients_in_between() -> None:
    text = f"{ALL} --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"
    run = config(f"{text} --global-batch-size 16", world=8)
    (plans,) = chunk_buffers(run, ROWS, 0)
    found = passing.of_stage(run, run.stages[0], plans)
    everything = 4 * sum(plan.size for plan in plans)
    assert found.gradients == everything < found.end
    # One that finds them has them all the time.
    weights = found.during["decoder.layers.1"] - 4 * LAYER
    assert found.later["decoder.layers.1"] == everything + weights


def test_layers_that_run_again_give_their_weights_up_in_between() -> None:
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
    one, four = (of(config(f"{ALL} {full} {count}")) for count in (1, 4))
    assert one == of(config(ALL))
    # The weights of the layer before are gathered when its own backward begins.
    assert four.during["decoder.layers.3"] == one.during["decoder.layers.3"] - 4 * LAYER
    assert four.during["decoder.layers.2"] == one.during["decoder.layers.2"]
    # Meanwhile there were those of a layer that ran, beside those that waited for their turn.
    assert four.most == one.most + 4 * LAYER


def test_gradients_travel_as_copies_where_they_travel_in_half() -> None:
    narrow = "--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32"
    for text, factor in (("", 2), ("--use-distributed-optimizer", 2 + 2 / 4), (GRADS, 0)):
        run = config(f"{narrow} {text}")
        chunks = chunk_buffers(run, ROWS, 0)
        assert sums.copies(run, chunks) == [factor * sum(plan.size for plan in chunks[0])]
    run = config("--bf16")
    assert sums.copies(run, chunk_buffers(run, ROWS, 0)) == [0]


def test_pieces_of_a_share_are_packed() -> None:
    """One piece is summed where it lies; those of several buckets are put together."""
    text = "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
    for size, is_packed in ((1_000_000, False), (300, True)):
        run = config(f"{text} --ddp-bucket-size {size}")
        (plans,) = chunk_buffers(run, ROWS, 0)
        (norms,) = (plan for plan in plans if plan.key.summed == ("tp",))  # type: ignore[attr-defined]
        assert sums.largest_moment(run, ROWS, 0, plans) == is_packed * norms.size // 2 * 4


def test_what_is_gathered_of_activations() -> None:
    """By hand: 64 tokens of 64 channels in fp32."""
    split = config("--tensor-model-parallel-size 2 --sequence-parallel", world=2)
    (stage,) = split.stages
    assert set(gathered(split, stage, 2).values()) == {64 * 64 * 4}
    assert gathered(config("--tensor-model-parallel-size 2", world=2), stage, 2) == {}
    ring = config("--context-parallel-size 2", world=2)
    # Keys, values and their gradients of half the tokens come once.
    assert gathered(ring, stage, 2) == {
        f"decoder.layers.{number}": 32 * 64 * 2 * 8 for number in range(4)
    }
    exchanged = config("--context-parallel-size 2 --cp-comm-type a2a", world=2)
    assert set(gathered(exchanged, stage, 2).values()) == {0}
