"""The text of a dry run: what its sections say, and that a large world is planned quickly."""

import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.indexed import IndexedDatasetBuilder
from megatron.core.utils import UserError
from megatron.training.arguments import parse
from megatron.training.plan.report import report

RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 2 "
    "--train-iters 25 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 50 --dry-run"
)


def corpus(prefix: Path, documents: int, length: int) -> str:
    builder = IndexedDatasetBuilder(str(prefix), np.uint16)
    for number in range(documents):
        builder.add_document(np.arange(number, number + length, dtype=np.uint16) % 50)
    builder.finalize()
    return str(prefix)


def data_lines(*more: object) -> list[str]:
    """Return the plan's lines on data, in single spaces."""
    text = report(parse([*RUN.split(), *map(str, more)]), "pretrain_gpt")
    section = text.split("\ndata:\n")[1].split("\n\n")[0]
    return [" ".join(line.split()) for line in section.splitlines()]


def test_every_split_of_a_corpus(tmp_path: Path) -> None:
    """10 documents of 20 tokens in shares of 8, 1, 1; 50 training samples of 8 read 400."""
    prefix = corpus(tmp_path / "a", documents=10, length=20)
    lines = data_lines("--data-path", prefix, "--split", "80,10,10", "--eval-iters", 5)
    assert lines == [
        f"train 100.00% 50 samples 160 tokens/epoch 2.500 epochs {prefix}",
        f"valid 100.00% 10 samples 20 tokens/epoch 4.000 epochs {prefix}",
        f"test 100.00% 10 samples 20 tokens/epoch 4.000 epochs {prefix}",
    ]


def test_a_blend_by_its_weights(tmp_path: Path) -> None:
    first = corpus(tmp_path / "a", documents=10, length=20)
    second = corpus(tmp_path / "b", documents=20, length=20)
    words = ("--train-data-path", 3, first, 1, second, "--train-iters", 50, "--eval-iters", 0)
    lines = data_lines(*words)
    assert lines == [
        f"train 75.00% 75 samples 200 tokens/epoch 3.000 epochs {first}",
        f"train 25.00% 25 samples 400 tokens/epoch 0.500 epochs {second}",
    ]


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "a", documents=10, length=20)
    lines = data_lines("--data-path", prefix, "--split", "0,1,0", "--eval-iters", 1)
    assert lines[-1] == "no training data: a run is refused"
    (line,) = data_lines("--train-data-path", tmp_path / "x", "--eval-iters", 0)
    assert line == f"train 100.00% 50 samples absent tokens/epoch ? epochs {tmp_path / 'x'}"


SMALL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--train-iters 10 --lr 1e-3 --mock-data --vocab-size 100 --tokenizer-type NullTokenizer "
    "--dry-run"
)


def sections(text: str) -> dict[str, list[str]]:
    """Return a plan's lines by section, in single spaces."""
    parts = report(parse(f"{SMALL} {text}".split()), "pretrain_gpt").split("\n\n")[1:]
    lines = [[" ".join(line.split()) for line in part.splitlines()] for part in parts]
    return {part[0].rstrip(":"): part[1:] for part in lines}


def test_the_plan_says_everything_that_is_known_without_a_device() -> None:
    found = sections(
        "--dry-run-world-size 8 --pipeline-model-parallel-size 2 --global-batch-size 32 "
        "--num-layers 3 --lr-decay-style cosine --data-impl mmap"
    )
    assert found["layout"] == [
        "processes 8 = tensor 1 x context 1 x data 4 x pipeline 2",
        "ranks count up along tensor, then context, then data, then pipeline",
        "ranks of a process group: dp 4, dp_cp 4 (see different tokens, gradients are summed over "
        "them), pp 2, ends 2 (first and last stage), world 8",
        "layers per stage: 2 1 = 3",
    ]
    assert found["pipeline"] == [
        "schedule 1f1b: 2 ranks with 1 stage each, 4 microbatches in an iteration",
        "bubble 25.00% of the work by simulation, 25.00% by the closed form (p-1)/m "
        "(stages taken as equal, transfers as free)",
        "by rank, its stages with their layers (E embedding, L head), and the most microbatches "
        "alive at once:",
        "0 0: E 0-1; 2 alive",
        "1 1: 2 L; 1 alive",
    ]
    assert found["batches"] == [
        "micro-batch 2 x 4 replicas x 4 microbatches = global batch 32",
        "10 iterations = 320 samples = 10.24K tokens",
    ]
    assert "vocabulary 101 rows, padded to 128" in found["parameters"][-1]
    assert "FLOPs per iteration" in found["operations"][0]
    memory = found["memory by pipeline rank"]
    assert memory[0] == "rank parameters weights gradients states activations total"
    assert [line.split()[0] for line in memory[1:3]] == ["0", "1"]
    assert memory[4].startswith(
        "--data-parallel-sharding-strategy is no_shard, over 4 replicas; the fullest rank would "
        "have: no_shard "
    )
    assert memory[5].startswith("largest micro-batch that fits 80 GiB")
    assert any("--data-impl mmap" in line for line in found["settings"])
    assert sum("weight decay" in line for line in found["learning rate"]) == 5
    decay, rest = found["optimizer groups"]
    assert decay.startswith("decay (adam): 14 parameters, ") and "layers.*.mlp.linear_fc1" in decay
    assert rest.startswith("no_decay (adam, no weight decay): 26 parameters, ")


def test_groups_and_both_rates_of_muon_are_planned() -> None:
    found = sections(
        "--optimizer muon --decoupled-lr 2e-3 --decoupled-min-lr 1e-4 "
        "--param-group-overrides *.linear_fc2.weight:lr_mult=0.5"
    )
    assert [line.split(":")[0] for line in found["optimizer groups"]] == [
        "adam decay (adam)",
        "adam decay decoupled (adam, --decoupled-lr)",
        "adam no_decay (adam, no weight decay)",
        "muon decay (muon)",
        "muon decay *.linear_fc2.weight (muon, lr x 0.5)",
    ]
    rates = [line for line in found["learning rate"] if "embedding and head" in line]
    assert len(rates) == 5
    assert rates[0].endswith("embedding and head 2.000000e-03, weight decay 0.01")
    assert rates[-1].endswith("embedding and head 1.000000e-04, weight decay 0.01")
    with pytest.raises(UserError, match="linear_fc3.*: no parameter has such a name"):
        sections("--param-group-overrides *.linear_fc3.*:lr_mult=0.5")


def test_a_v_has_both_ends_on_one_rank_and_another_order_of_ranks() -> None:
    found = sections(
        "--dry-run-world-size 16 --pipeline-model-parallel-size 2 --pipeline-schedule zb-v "
        "--context-parallel-size 2 --tensor-model-parallel-size 2 --use-tp-pp-dp-mapping "
        "--expert-tensor-parallel-size 4 --global-batch-size 24"
    )
    assert found["layout"][:2] == [
        "processes 16 = tensor 2 x context 2 x data 2 x pipeline 2",
        "ranks count up along tensor, then context, then pipeline, then data",
    ]
    assert found["pipeline"][0] == (
        "schedule zb-v: 2 ranks with 2 stages each, 6 microbatches in an iteration"
    )
    assert found["pipeline"][3:] == ["0 0: E 0-1 | 3: 6-7 L; 2 alive", "1 1: 2-3 | 2: 4-5; 2 alive"]


def test_stages_that_are_laid_out_and_many_alike() -> None:
    laid = sections(
        "--dry-run-world-size 2 --pipeline-model-parallel-size 2 "
        "--pipeline-model-parallel-layout E|t*4||t*4,L"
    )
    assert laid["layout"][-1] == "layers per stage: 0 4 0 4 = 8"
    assert laid["pipeline"][3:] == ["0 0: E | 2: none; 1 alive", "1 1: 0-3 | 3: 4-7 L; 1 alive"]
    many = sections("--dry-run-world-size 20 --pipeline-model-parallel-size 20 --num-layers 40")
    assert many["layout"][-1] == "layers per stage: 2 in each of 20 = 40"
    # Inner ranks differ only by what is alive, here one microbatch on each.
    memory = many["memory by pipeline rank"]
    assert [line.split()[0] for line in memory[1:4]] == ["0", "1-18", "19"]


def test_a_run_of_evaluations_has_no_bubble_and_a_run_on_one_rank_no_pipeline() -> None:
    found = sections("--skip-train --dry-run-world-size 2 --pipeline-model-parallel-size 2")
    assert len(found["pipeline"]) == 4 and not any("bubble" in line for line in found["pipeline"])
    memory = found["memory by pipeline rank"]
    assert memory[0] == "rank parameters weights total" and len(memory) == 4
    assert "pipeline" not in sections("")
    assert len(sections("")["memory per rank"]) == 4


def test_pairs_are_told_of_with_pipelines_and_without() -> None:
    words = (
        "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
        "--overlap-moe-expert-parallel-comm"
    )
    alone = sections(f"{words} --dry-run-world-size 2 --global-batch-size 20")["pipeline"]
    assert alone[0].startswith("schedule combined 1f1b: 1 rank with 1 stage each, ")
    assert alone[-1].endswith("; 2 alive")
    pipeline = "--pipeline-model-parallel-size 2 --dry-run-world-size 4 --global-batch-size 8000000"
    found = sections(f"{words} {pipeline}")["pipeline"]
    assert found[0].startswith("schedule combined 1f1b: 2 ranks with 1 stage each, ")
    assert [line.rpartition("; ")[2] for line in found[-2:]] == ["4 alive", "2 alive"]


def test_what_a_rank_holds_is_a_table_and_what_fits_is_said() -> None:
    found = sections(
        "--dry-run-world-size 4 --use-distributed-optimizer --bf16 --dry-run-memory 0.001 "
        "--global-batch-size 8"
    )
    header, row, note, strategies, fits, *advice = found["memory per rank"]
    assert header == "rank parameters weights gradients masters states activations total"
    assert row.split()[:2] == ["0", "410,240"]
    assert note.startswith("activations and communication are each at their fullest moment")
    assert strategies.startswith("--data-parallel-sharding-strategy is optim, over 4 replicas")
    assert fits == "no micro-batch fits 0.001 GiB (--dry-run-memory)"
    assert advice[0].startswith("the fullest rank has ") and "saves" in advice[1]


def test_a_model_that_is_fullest_while_it_is_built_is_told() -> None:
    text = "--optimizer sgd --sgd-momentum 0 --micro-batch-size 1"
    assert any("that of building" in line for line in sections(text)["memory per rank"])


def test_a_batch_that_grows_is_planned_at_its_largest() -> None:
    found = sections(
        "--dry-run-world-size 2 --pipeline-model-parallel-size 2 --rampup-batch-size 4 4 100 "
        "--global-batch-size 16"
    )
    assert found["pipeline"][0].endswith("8 microbatches in the largest iteration")


def test_the_plan_without_data_or_tokenizer_says_so() -> None:
    words = RUN.replace("--tokenizer-type NullTokenizer --vocab-size 50", "").split()
    text = report(parse([*words, "--data-path", "nowhere"]), "pretrain_gpt")
    assert "absent tokens/epoch         ? epochs  nowhere" in text
    assert "vocabulary 50,257 rows" in text and "as a guess" in text
    small = [*words, "--tokenizer-type", "ByteLevelTokenizer", "--vocab-size", "100"]
    with pytest.raises(UserError, match="has 258 ids but the model's vocabulary has 100 rows"):
        report(parse(small), "pretrain_gpt")
    assert "none named" in report(parse(words), "pretrain_gpt")
    words = [*words, "--tokenizer-type", "BertWordPieceCase", "--vocab-extra-ids", "100"]
    assert "vocabulary 29,098 rows" in report(parse(words), "pretrain_gpt")


def test_a_world_of_6144_gpus_is_planned_in_seconds() -> None:
    """128 stages and 512 microbatches: 131,072 actions, of which few are played through."""
    begin = time.process_time()
    found = sections(
        "--dry-run-world-size 6144 --tensor-model-parallel-size 8 --sequence-parallel "
        "--pipeline-model-parallel-size 16 --num-virtual-stages-per-pipeline-rank 8 "
        "--num-layers 128 --num-attention-heads 96 --hidden-size 12288 --seq-length 4096 --bf16 "
        "--global-batch-size 24576 --micro-batch-size 1"
    )
    assert time.process_time() - begin < 10  # it takes 2
    # 15 / (8 x 512)
    assert found["pipeline"][1].startswith("bubble 0.37% of the work by simulation, 0.37%")
    assert found["pipeline"][3].endswith("112: 112; 17.875 alive")


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "zb-v"])
def test_many_microbatches_are_not_listed_one_by_one(schedule: str) -> None:
    tracemalloc.start()
    found = sections(
        f"--dry-run-world-size 100000 --pipeline-model-parallel-size 2 --num-layers 4 "
        f"--global-batch-size 80000000000 --pipeline-schedule {schedule}"
    )
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**26
    head, bubble = found["pipeline"][:2]
    assert head.startswith(f"schedule {schedule}: 2 ranks") and "800000 microbatches" in head
    assert bubble.startswith("bubble 0.00% of the work")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "--pipeline-model-parallel-size 2 --pipeline-schedule interleaved",
            "--num-virtual-stages",
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 "
            "--num-virtual-stages-per-pipeline-rank 2",
            "interleaved or zb-v",
        ),
        (
            "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 8",
            r"\(8\) leaves 0 of --num-layers \(8\) .* at most 7",
        ),
        (
            "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3 "
            "--decoder-last-pipeline-num-layers 3",
            r"\(3\) \+ .* \(3\) must be --num-layers \(8\)",
        ),
        (
            "--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 3 "
            "--account-for-loss-in-pipeline-split",
            r"last-pipeline-num-layers \(3\) and --account-for.* keep one",
        ),
        (
            "--context-parallel-size 2 --cp-comm-type a2a+p2p",
            r"--hierarchical-context-parallel-sizes .* product --context-parallel-size \(2\)",
        ),
        ("--context-parallel-size 2 --seq-length 30", r"\(30\) .* try 28 or 32"),
        ("--tensor-model-parallel-size 2 --num-attention-heads 7", "not divisible by"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_numbers(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse(f"{SMALL} --dry-run-world-size 2 {text}".split())
