"""An encoder alone on every layout is the serial one: losses, norms, gradients, weights, traffic.

And in whole runs: logs, evaluations, checkpoints that go on elsewhere.
"""

import shutil
from pathlib import Path

import pytest

import pretrain_bert
from megatron.core.utils import UserError
from megatron.training.arguments import parse
from megatron.training.program import Program
from megatron.training.verification import equality, outcomes
from megatron.training.verification.outcomes import Outcome
from megatron.training.verification.small_run import VOCABULARY
from megatron.training.verification.worker_pool import RankFailed
from tests.harness import Pool
from tests.programs import assert_rows_equal, launch, metrics
from tools.verify_layout import closed_form

DATA = Path(__file__).resolve().parent.parent / "data"
IDS, ITERATIONS = VOCABULARY, 3
# Epsilon is far above rounding, or Adam would make steps of it.
BASE = (
    "--num-layers 4 --hidden-size 24 --num-attention-heads 4 --ffn-hidden-size 48 --seq-length 16 "
    f"--micro-batch-size 2 --global-batch-size 8 --train-iters {ITERATIONS} --lr 1e-2 --mock-data "
    f"--tokenizer-type NullTokenizer --vocab-size {IDS - 1} --make-vocab-size-divisible-by 8 "
    "--attention-dropout 0 --hidden-dropout 0 --fp64 --init-method-std 0.2 --device cpu "
    "--adam-eps 1e-3"
)
VARIANTS = {
    "both heads": "",
    "untied, words alone": (
        "--bert-no-binary-head --untie-embeddings-and-output-weights --position-embedding-type "
        "rope --normalization RMSNorm --group-query-attention --num-query-groups 2 "
        "--logits-at-once 300"
    ),
    "means of microbatches": "--no-calculate-per-token-loss --window-size 3,3",
}
TP, PP, CP = (f"--{name}-parallel-size" for name in ("tensor-model", "pipeline-model", "context"))
SHARED = "--use-distributed-optimizer --data-parallel-sharding-strategy"
SP = f"{TP} 2 --sequence-parallel"
LAYOUTS = [
    (2, f"{TP} 2"),
    (2, f"{SP} --tp-comm-overlap"),
    (2, f"{PP} 2"),
    (2, f"{CP} 2"),
    (8, f"{SP} {PP} 2 {CP} 2"),
    *(
        pytest.param(world, layout, marks=pytest.mark.slow)
        for world, layout in [
            (2, "--overlap-grad-reduce --ddp-bucket-size 900"),
            (2, f"{PP} 2 --pipeline-schedule zb-v"),
            (2, f"{PP} 2 --pipeline-schedule zb-h1"),
            (2, f"{PP} 2 --num-layers-per-virtual-pipeline-stage 1"),
            (
                4,
                f"{PP} 4 --recompute-granularity full --recompute-method uniform "
                f"--recompute-num-layers 1",
            ),
            (2, f"{CP} 2 --cp-comm-type a2a"),
            (2, f"{CP} 2 --cp-comm-type all_gather"),
            (2, f"{SHARED} optim_grads_params --use-megatron-fsdp"),
            (2, "--use-torch-fsdp2"),
            (4, f"{SP} {SHARED} optim"),
            (8, f"{SP} {PP} 4"),
        ]
    ),
]


def outcome(pool: Pool, world: int, words: str) -> tuple[Outcome, list[outcomes.Traffic]]:
    """Return what came out of a layout, and what its ranks should have moved."""
    flags = f"{BASE} {words} --dry-run --dry-run-world-size {world}".split()
    run = parse(flags, "pretrain_bert").config
    program = Program(
        build_model=pretrain_bert.build_model,
        build_datasets=pretrain_bert.build_datasets,
        forward_step=pretrain_bert.forward_step,
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
    heads = 1 if "no-binary-head" in VARIANTS[variant] else 2  # both losses are compared
    assert len(found.losses) == heads * ITERATIONS
    apart = outcomes.compare(found, expected)
    assert apart.are_equal, apart
    assert found.traffic == moved


def test_runs_log_save_and_go_on_elsewhere(pool: Pool, tmp_path: Path) -> None:
    """On a corpus of sentences: logs of both losses, resume bit for bit, and on another layout."""
    for path in (DATA / "mcore_t5").glob("s.*"):
        shutil.copy(path, tmp_path)
    pieces = [f"##p{i}" if i >= 20 and i % 3 == 0 else f"w{i}" for i in range(5, 200)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (tmp_path / "vocab.txt").write_text("\n".join([*special, *pieces]))
    words = (
        "--num-layers 2 --hidden-size 24 --num-attention-heads 4 --seq-length 32 --fp64 --lr 1e-2 "
        "--micro-batch-size 2 --global-batch-size 4 --train-iters 4 --device cpu --adam-eps 1e-3 "
        f"--vocab-file {tmp_path}/vocab.txt --data-path {tmp_path}/s --split 80,10,10 "
        f"--data-cache-path {tmp_path}/cache --eval-interval 2 --eval-iters 1 --log-interval 1 "
        "--num-workers 0 --metrics-file metrics.jsonl --save save --attention-dropout 0 "
        "--hidden-dropout 0"
    ).split()

    def train(folder: str, world: int, more: str) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        arguments = (*words, *more.split())
        ended = launch(pool, world, "pretrain_bert", *arguments, folder=tmp_path / folder)
        assert [one.code for one in ended] == [0] * world, ended[0].err
        return ended[0].out

    printed = train("whole", 1, "--hidden-dropout 0.1")
    assert printed.count("| sop loss: ") == 4 and "| sop loss value: " in printed
    train("again", 1, "--hidden-dropout 0.1 --exit-interval 2")
    train("again", 1, "--hidden-dropout 0.1 --load save")
    one, other = (metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "again"))
    assert all({"lm_loss", "sop_loss"} <= row.keys() for row in one)
    assert_rows_equal(other, one)
    train("dry", 1, "")
    train("parts", 2, f"{PP} 2 --exit-interval 2")
    printed = train("parts", 4, f"{SP} {CP} 2 --load save")
    assert "weights loaded, optimizer loaded" in printed
    one, other = (metrics(tmp_path / name / "metrics.jsonl") for name in ("dry", "parts"))
    assert_rows_equal(other, one)

    asked = "--load save --device cpu --max-new-tokens 3 --prompt w7".split()
    with pytest.raises(RankFailed, match="an encoder alone .*writes no text"):
        launch(pool, 1, "tools.generate_text", *asked, folder=tmp_path / "whole")
    more = f"--load save --ckpt-convert-format torch_dist --ckpt-convert-save {tmp_path}/out"
    with pytest.raises(RankFailed, match="an encoder alone .*names there are not known"):
        launch(pool, 1, "pretrain_bert", *words, *more.split(), folder=tmp_path / "whole")


@pytest.mark.parametrize(
    ("program", "given", "match"),
    [
        ("pretrain_gpt", "--masked-words", "run pretrain_bert.py"),
        ("pretrain_bert", "--encoder-alone False", "leave the first out"),
        ("pretrain_bert", "--bert-no-binary-head --sentence-order-head", "leave it out"),
    ],
)
def test_settings_of_another_model_are_refused(program: str, given: str, match: str) -> None:
    with pytest.raises(UserError, match=match):
        parse(f"{BASE} {given} --dry-run".split(), program)
