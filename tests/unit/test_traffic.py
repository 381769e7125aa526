"""What layouts move, worked out by hand for a model of round sizes."""

import pytest

from megatron.training.arguments import parse
from megatron.training.config import RunConfig
from megatron.training.plan import traffic
from megatron.training.plan.report import report
from megatron.training.plan.traffic_passes import Costs

TP, PP, CP = (f"--{kind}-parallel-size" for kind in ("tensor-model", "pipeline-model", "context"))
# 16 tokens in a microbatch, 2 layers of width 8, 2 heads of 4 channels, 16 rows of the vocabulary.
BASE = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 "
    "--max-position-embeddings 16 --train-iters 10 --lr 1e-3 --mock-data --vocab-size 16 "
    "--tokenizer-type NullTokenizer --dry-run"
)
ROWS = 16
MICROBATCHES = 3
HIDDEN = 16 * 8 * 4
"""Bytes of a microbatch's hidden states in fp32."""
WORLD = {("world", "all_reduce"): (2, 64 + 16)}


def config(world: int, words: str = "") -> RunConfig:
    return parse(f"{BASE} {words} --dry-run-world-size {world}".split()).config


def moved(world: int, words: str, pp: int = 0) -> Costs:
    return traffic.expected(config(world, words), ROWS, MICROBATCHES, {"pp": pp})


def test_one_process_moves_nothing() -> None:
    assert moved(1, "") == {}
    assert traffic.lines(config(1), ROWS) == []


def test_tensor_parallel() -> None:
    # Two layers with two exits forward and two entries back, embedding and head: 10 a microbatch.
    # The cross entropy sums 1 and 3 numbers for each of 16 tokens.
    calls, size = 3 * (10 + 2), 3 * (10 * HIDDEN + 4 * 16 * 4)
    assert moved(2, f"{TP} 2") == {("tp", "all_reduce"): (calls, size), **WORLD}


def test_sequence_parallel() -> None:
    # Position table of 128, six vectors in each layer and two after them, 64 aligned elements each.
    parted = (128 + 2 * 6 * 64 + 2 * 64) * 4
    assert moved(2, f"{TP} 2 --sequence-parallel") == {
        ("tp", "all_gather"): (3 * 15, 3 * 15 * HIDDEN),
        ("tp", "reduce_scatter"): (3 * 10, 3 * 10 * HIDDEN),
        ("tp", "all_reduce"): (3 * 2 + 1, 3 * 4 * 16 * 4 + parted),
        **WORLD,
    }


def test_evaluation_goes_forward_only() -> None:
    run = config(2, f"{TP} 2")
    assert traffic.expected_evaluation(run, 128, 3, {"pp": 0}) == {
        ("tp", "all_reduce"): (3 * (5 + 2), 3 * (5 * HIDDEN + 4 * 16 * 4)),
        ("world", "all_reduce"): (1, 64),
    }


@pytest.mark.parametrize(("words", "each"), [("", 2 * 4 * 9 * 4), ("--disable-bias-linear", 256)])
def test_key_heads_that_two_ranks_hold(words: str, each: int) -> None:
    """Two layers with a key and a value head of 2 channels, of 8 inputs and perhaps a bias."""
    heads = "--num-attention-heads 4 --group-query-attention --num-query-groups 2"
    costs = moved(4, f"{TP} 4 {heads} {words}")
    assert costs["kv_replica", "all_reduce"] == (1, each)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("rank", [0, 1])
def test_two_stages(schedule: str, rank: int) -> None:
    assert moved(2, f"{PP} 2 --pipeline-schedule {schedule}", rank) == {
        ("pp", "send"): (3, 3 * HIDDEN),
        ("pp", "receive"): (3, 3 * HIDDEN),
        ("ends", "all_reduce"): (1, 16 * 8 * 4),
        **WORLD,
    }


@pytest.mark.parametrize(
    ("words", "hops"),
    [
        # Rank 0 holds stages 0 and 2 of four: it sends two activations and one gradient.
        ("--num-virtual-stages-per-pipeline-rank 2", 3),
        # Rank 0 holds stages 0 and 3; the turn, and the tied matrix, stay on one rank.
        ("--pipeline-schedule zb-v", 2),
    ],
)
def test_four_stages_on_two_ranks(words: str, hops: int) -> None:
    for rank in (0, 1):
        costs = moved(2, f"{PP} 2 --num-layers 4 {words}", rank)
        assert costs["pp", "send"] == costs["pp", "receive"] == (3 * hops, 3 * hops * HIDDEN)
        assert (("ends", "all_reduce") in costs) == (hops == 3)


def test_activations_between_stages_are_shares_of_the_sequence() -> None:
    words = f"{PP} 2 {TP} 2 --sequence-parallel {CP} 2"
    assert moved(8, words)["pp", "send"] == (3, 3 * HIDDEN // 4)


def test_activations_between_stages_have_the_dtype_of_the_stream() -> None:
    assert moved(2, f"{PP} 2 --bf16")["pp", "send"] == (3, 3 * HIDDEN // 2)
    stream = "--fp32-residual-connection"
    assert moved(2, f"{PP} 2 --bf16 {stream}")["pp", "send"] == (3, 3 * HIDDEN)


def test_context_parallel_ring() -> None:
    # One hop; keys and values of 8 tokens, two heads, 4 channels each: forward, backward, gradient.
    costs = moved(2, f"{CP} 2")
    assert costs["cp", "shift"] == (3 * 2 * 3, 3 * 2 * 3 * (8 * 2 * 2 * 4) * 4)
    assert ("cp", "all_reduce") not in costs
    costs = moved(2, f"{CP} 2 --no-calculate-per-token-loss")
    assert costs["cp", "all_reduce"] == (3, 3 * 4)


def test_gradients_travel_in_the_dtype_of_sums() -> None:
    keys = 8 * 2 * 2 * 4
    costs = moved(2, f"{CP} 2 --bf16")
    assert costs["cp", "shift"] == (18, 3 * 2 * keys * (2 + 2 + 4))
    costs = moved(2, f"{CP} 2 --bf16 --cp-comm-type all_gather")
    assert costs["cp", "all_gather"] == (12, 3 * 2 * 2 * 2 * keys * 2)
    assert costs["cp", "reduce_scatter"] == (6, 3 * 2 * 2 * keys * 4)


def test_buckets_with_their_padding() -> None:
    """In the order of the buffer, in aligned elements, for two replicas: multiples of 128.

    fc2 128, fc1 128 | proj 64, qkv 192 | embedding 128, norms 64, 64 | norm 64, padding 64
    """
    words = (
        "--num-layers 1 --ffn-hidden-size 16 --normalization RMSNorm --disable-bias-linear "
        "--position-embedding-type rope"
    )
    assert moved(2, f"{words} --ddp-bucket-size 200")["dp_cp", "all_reduce"] == (4, 896 * 4)
    assert moved(2, words)["dp_cp", "all_reduce"] == (1, 896 * 4)


def test_wire_bytes_of_rings() -> None:
    expected = {
        "all_reduce": 1500.0,
        "all_gather": 750.0,
        "reduce_scatter": 750.0,
        "all_to_all": 750.0,
        "send": 1000.0,
        "receive": 1000.0,
        "shift": 1000.0,
    }
    for op, size in expected.items():
        assert traffic.wire_bytes(op, 1000, 4) == size
        assert traffic.wire_bytes(op, 1000, 1) == 0


def test_the_plan_says_what_is_moved() -> None:
    words = f"{BASE} {TP} 2 --dry-run-world-size 2 --global-batch-size 3"
    text = report(parse(words.split()), "pretrain_gpt")
    section = text.split("\ncommunication:\n")[1].split("\n\n")[0]
    # The plan's vocabulary is padded, which moves no more; 16128 bytes twice over, a half each.
    lines = [" ".join(line.split()) for line in section.splitlines()]
    assert lines[0].startswith("each rank moves 15.83 KiB an iteration")
    assert lines[1:] == [
        "tp 15.75 KiB all_reduce (36, 15.75 KiB)",
        "world 80 B all_reduce (2, 80 B)",
    ]


def test_the_plan_shows_the_busiest_stage() -> None:
    """The last stage alone sums the cross entropy."""
    first, *others = traffic.lines(config(4, f"{PP} 2 {TP} 2 --global-batch-size 8"), ROWS)
    assert first.startswith("a rank at pipeline coordinate 1, the busiest, moves ")
    assert {line.split()[0] for line in others} == {"tp", "pp", "ends", "world"}
