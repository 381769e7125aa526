"""Host memory that is planned for copies of a save, against what the ranks of a layout write."""

import pytest

import pretrain_gpt
from megatron.core import rng
from megatron.core.dist_checkpointing.staging import HostBuffer, stage
from megatron.core.optimizer.optimizer import build_optimizer
from megatron.core.tokenizers.vocabulary import resolve_vocabulary
from megatron.core.utils import silent
from megatron.training.checkpoints.facts import RunFacts
from megatron.training.checkpoints.run import CheckpointedRun
from megatron.training.checkpoints.save import contents
from megatron.training.plan.memory import MemoryPlan
from tests.unit.test_memory_plan import DP4, IDS, LAYOUTS, LLAMA, PP2, TP4, config, made_up

SAVE = "--save s --async-save"
RUNS = {
    "serial": "",
    "bf16": "--bf16 --qk-layernorm",
    "weights alone": "--bf16 --no-save-optim",
    "muon": LAYOUTS["muon"],
    "tp4": f"{TP4} --bf16 {LLAMA}",
    "pp2 untied": f"{PP2} {LLAMA}",
    "dp4": f"{DP4} --bf16",
    "dp4, the first replica": f"{DP4} --bf16 --no-ckpt-fully-parallel-save",
    "dp4 optim": f"{DP4} --bf16 --use-distributed-optimizer",
    "dp4 optim, weights by the first": f"{DP4} --bf16 --use-distributed-optimizer "
    "--no-ckpt-fully-parallel-save",
    "dp4 all": f"{DP4} --bf16 --use-megatron-fsdp",
    "dp4 all, each its own": f"{DP4} --bf16 --use-megatron-fsdp --no-ckpt-fully-parallel-save",
    "dp4 in two": f"{DP4} --use-distributed-optimizer --num-distributed-optimizer-instances 2",
}

FACTS = RunFacts(
    config={}, schedule=None, tokenizer="", vocabulary=9, vocabulary_rows=9, objective="tokens"
)


def written(words: str, pp: int) -> int:
    """Return the bytes that the first rank of a stage copies."""
    run = config(f"{words} {SAVE}")
    mesh = made_up(run, 0, pp)
    vocabulary = resolve_vocabulary(run.tokenizer, IDS, run.parallel.tensor_model_parallel_size)
    stages = [run.stages[position] for position in run.placement.positions(pp)]
    chunks = pretrain_gpt.build_model(run, mesh, vocabulary, stages)
    for chunk in chunks:
        rng.initialize(chunk, 1)
    optimizer = build_optimizer(run.optimizer, chunks, mesh, run.precision, run.replicas)
    buffer = HostBuffer(run.checkpoint.speed.host_limit)
    stage(contents(CheckpointedRun(run.checkpoint, mesh, chunks, optimizer, FACTS, silent)), buffer)
    return buffer.bytes


@pytest.mark.parametrize("name", RUNS)
def test_copies_take_what_is_planned(name: str) -> None:
    """At most, and within a tenth; the first rank holds no padding, or a row in a hundred of it."""
    run = config(f"{RUNS[name]} {SAVE}")
    tp = run.parallel.tensor_model_parallel_size
    padded = resolve_vocabulary(run.tokenizer, IDS, tp).padded_rows
    for pp, planned in enumerate(MemoryPlan(run, padded).ranks()):
        size = written(RUNS[name], pp)
        assert size <= planned.staged <= 1.1 * size + 2**17, (size, planned.staged)
        assert planned.categories()["staged"] == planned.staged


def test_copies_are_planned_where_a_save_is_beside_training_alone() -> None:
    for words in ("", "--save s", "--async-save"):
        (planned,) = MemoryPlan(config(words), 128).ranks()
        assert planned.staged == 0 and "staged" not in planned.categories()
    limited = f"{SAVE} --async-save-host-gib 0.0001"
    (planned,) = MemoryPlan(config(limited), 128).ranks()
    assert planned.staged == int(0.0001 * 2**30) >= written("--async-save-host-gib 0.0001", 0) > 0
