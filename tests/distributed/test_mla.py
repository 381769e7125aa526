"""Multi-latent attention on every layout is the serial one: losses, norms, gradients, weights."""

import pytest

import pretrain_gpt
from megatron.training.arguments import parse
from megatron.training.program import Program
from megatron.training.verification import equality, outcomes
from megatron.training.verification.outcomes import Outcome
from tests.harness import Pool

IDS = 40
BASE = (
    "--num-layers 4 --hidden-size 24 --num-attention-heads 4 --ffn-hidden-size 48 --seq-length 16 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-2 --mock-data "
    f"--tokenizer-type NullTokenizer --vocab-size {IDS - 1} --make-vocab-size-divisible-by 8 "
    "--attention-dropout 0 --hidden-dropout 0 --fp64 --init-method-std 0.2 --device cpu "
    "--adam-eps 1e-3 --multi-latent-attention --kv-lora-rank 10 --qk-head-dim 6 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 5 --no-calculate-per-token-loss"
)
# Every size differs from every other. Adam would make steps of rounding without such an epsilon.
VARIANTS = {
    "latent queries": (
        "--q-lora-rank 14 --qk-layernorm --rotary-scaling-factor 4 --mscale 0.7 "
        "--mscale-all-dim 0.5 --original-max-position-embeddings 8 --normalization RMSNorm "
        "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
        "--position-embedding-type rope --apply-layernorm-1p"
    ),
    "plain queries": (
        "--rope-type rope --rotary-percent 0.5 --mscale-all-dim 0.3 --rotary-scaling-factor 2 "
        "--softmax-type learnable --window-size 5,0 --window-attn-skip-freq 2"
    ),
    "packed": (
        "--q-lora-rank 14 --qk-layernorm --position-embedding-type none --reset-position-ids "
        "--reset-attention-mask --eod-mask-loss --calculate-per-token-loss"
    ),
}
TP, PP, CP = (f"--{name}-parallel-size" for name in ("tensor-model", "pipeline-model", "context"))
LAYOUTS = [
    (2, f"{TP} 2"),
    (2, f"{TP} 2 --sequence-parallel"),
    (4, f"{TP} 4 --sequence-parallel"),
    (2, f"{PP} 2"),
    (2, f"{PP} 2 --pipeline-schedule zb-v"),
    (2, f"{CP} 2"),
    (2, f"{CP} 2 --cp-comm-type all_gather"),
    (2, f"{CP} 2 --cp-comm-type a2a"),
    (4, f"{TP} 2 --sequence-parallel {PP} 2 --pipeline-schedule zb-h1"),
    (4, f"{TP} 2 --sequence-parallel {CP} 2"),
]


def outcome(pool: Pool, world: int, words: str) -> Outcome:
    run = parse(f"{BASE} {words} --dry-run --dry-run-world-size {world}".split()).config
    program = Program(
        build_model=pretrain_gpt.build_model,
        build_datasets=pretrain_gpt.build_datasets,
        forward_step=pretrain_gpt.forward_step,
    )
    return equality.run(pool, equality.Case(config=run, program=program, vocabulary=IDS))


@pytest.fixture(scope="module", params=VARIANTS)
def serial(request: pytest.FixtureRequest, pool: Pool) -> tuple[str, Outcome]:
    return request.param, outcome(pool, 1, VARIANTS[request.param])


@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_equals_the_serial_run(
    pool: Pool, serial: tuple[str, Outcome], world: int, layout: str
) -> None:
    variant, expected = serial
    found = outcomes.compare(outcome(pool, world, f"{VARIANTS[variant]} {layout}"), expected)
    assert found.are_equal, found
