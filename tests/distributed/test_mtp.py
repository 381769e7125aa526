"""Multi-token prediction on every layout is the serial one: losses, norms, gradients, weights."""

import pytest

import pretrain_gpt
from megatron.training import equality, outcomes
from megatron.training.arguments import parse
from megatron.training.outcomes import Outcome
from megatron.training.pretrain import Program
from megatron.training.small_run import VOCABULARY
from tests.harness import Pool
from tools.verify_layout import closed_form

IDS, DEPTHS, ITERATIONS = VOCABULARY, 2, 3
# Epsilon is far above rounding, or Adam would make steps of it.
BASE = (
    "--num-layers 4 --hidden-size 24 --num-attention-heads 4 --ffn-hidden-size 48 --seq-length 16 "
    f"--micro-batch-size 2 --global-batch-size 8 --train-iters {ITERATIONS} --lr 1e-2 --mock-data "
    f"--tokenizer-type NullTokenizer --vocab-size {IDS - 1} --make-vocab-size-divisible-by 8 "
    "--attention-dropout 0 --hidden-dropout 0 --fp64 --init-method-std 0.2 --device cpu "
    f"--adam-eps 1e-3 --mtp-num-layers {DEPTHS} --mtp-loss-scaling-factor 0.7"
)
VARIANTS = {
    "tied": "--position-embedding-type rope",
    "untied": (
        "--position-embedding-type rope --untie-embeddings-and-output-weights --swiglu "
        "--normalization RMSNorm --disable-bias-linear --group-query-attention "
        "--num-query-groups 2 --no-calculate-per-token-loss"
    ),
    "packed": (
        "--position-embedding-type rope --reset-position-ids --reset-attention-mask "
        "--eod-mask-loss --window-size 5,0 --window-attn-skip-freq 2"
    ),
}
TP, PP, CP = (f"--{name}-parallel-size" for name in ("tensor-model", "pipeline-model", "context"))
LAYOUTS = [
    (2, f"{TP} 2"),
    (2, f"{TP} 2 --sequence-parallel --tp-comm-overlap"),
    (2, f"{PP} 2"),
    (2, f"{PP} 2 --pipeline-model-parallel-layout Et|ttt||mmL"),
    (2, f"{PP} 2 --pipeline-schedule zb-h1"),
    (2, f"{PP} 2 --pipeline-schedule zb-v"),
    (2, f"{CP} 2"),
    (2, f"{CP} 2 --cp-comm-type p2p a2a all_gather p2p"),
    (2, "--overlap-grad-reduce --ddp-bucket-size 900"),
    (4, f"{PP} 2 --pipeline-schedule zb-v --overlap-grad-reduce --ddp-bucket-size 900"),
    (8, f"{TP} 2 --sequence-parallel {PP} 2 {CP} 2"),
]


def outcome(pool: Pool, world: int, words: str) -> tuple[Outcome, list[outcomes.Traffic]]:
    """Return what came out of a layout, and what its ranks should have moved."""
    run = parse(f"{BASE} {words} --dry-run --dry-run-world-size {world}".split()).config
    program = Program(
        build_model=pretrain_gpt.build_model,
        build_datasets=pretrain_gpt.build_datasets,
        forward_step=pretrain_gpt.forward_step,
    )
    case = equality.Case(config=run, program=program, vocabulary=IDS)
    return equality.run(pool, case), closed_form(run)


@pytest.fixture(scope="module", params=VARIANTS)
def serial(request: pytest.FixtureRequest, pool: Pool) -> tuple[str, Outcome]:
    return request.param, outcome(pool, 1, VARIANTS[request.param])[0]


@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_equals_the_serial_run(
    pool: Pool, serial: tuple[str, Outcome], world: int, layout: str
) -> None:
    variant, expected = serial
    found, moved = outcome(pool, world, f"{VARIANTS[variant]} {layout}")
    # The loss of each depth is compared, too.
    assert len(found.losses) == (1 + DEPTHS) * ITERATIONS
    apart = outcomes.compare(found, expected)
    assert apart.are_equal, apart
    assert found.traffic == moved
