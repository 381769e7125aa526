"""Multi-token prediction on every layout is the serial one: losses, norms, gradients, weights.

And in whole runs: logs, evaluations, checkpoints that go on elsewhere, and text without it.
"""

from pathlib import Path

import pytest

import pretrain_gpt
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.training.arguments import parse
from megatron.training.program import Program
from megatron.training.verification import equality, outcomes
from megatron.training.verification.outcomes import Outcome
from megatron.training.verification.small_run import VOCABULARY
from tests.harness import Pool
from tests.programs import assert_rows_equal, launch, metrics
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


def test_runs_log_save_and_go_on_elsewhere(pool: Pool, tmp_path: Path) -> None:
    words = f"{BASE} {VARIANTS['untied']} --train-iters 4 --eval-interval 2 --eval-iters 1".split()
    words += "--log-interval 1 --num-workers 0 --metrics-file metrics.jsonl --save save".split()

    def train(folder: str, world: int, more: str) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        arguments = (*words, *more.split())
        ended = launch(pool, world, "pretrain_gpt", *arguments, folder=tmp_path / folder)
        assert [one.code for one in ended] == [0] * world
        return ended[0].out

    printed = train("whole", 1, "")
    assert printed.count("| mtp_1 loss: ") == 4 and "| mtp_2 loss value: " in printed
    train("parts", 2, f"{PP} 2 --exit-interval 2")
    printed = train("parts", 4, f"{TP} 2 {PP} 2 --pipeline-schedule zb-v --load save")
    assert "weights loaded, optimizer loaded" in printed
    expected = metrics(tmp_path / "whole" / "metrics.jsonl")
    assert all({"lm_loss", "mtp_1_loss", "mtp_2_loss"} <= row.keys() for row in expected)
    assert {row.get("split") for row in expected} == {None, "valid", "test"}
    assert_rows_equal(metrics(tmp_path / "parts" / "metrics.jsonl"), expected)
    with Checkpoint(tmp_path / "parts" / "save" / "iter_0000004") as checkpoint:
        names = {key for key in checkpoint.index.tensors if key.startswith("model.mtp.layers.1.")}
    ends = {name.removeprefix("model.mtp.layers.1.").removesuffix(".weight") for name in names}
    assert {"enorm", "hnorm", "eh_proj", "final_layernorm"} <= ends
    assert "transformer_layer.self_attention.linear_qkv" in ends

    asked = "--load save --device cpu --max-new-tokens 3 --temperature 0 --prompt".split()
    (text,) = launch(pool, 1, "tools.generate_text", *asked, "1 2", folder=tmp_path / "parts")
    assert text.code == 0 and len(text.out.splitlines()[-1].split()) == 5
