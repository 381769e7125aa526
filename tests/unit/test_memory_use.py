"""Memory in a run: reports beside the plan, and what is said when there is none left."""

import errno
import gc
import resource
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pretrain_gpt
from megatron.core.mesh import Mesh
from megatron.core.optimizer.optimizer import build_optimizer
from megatron.core.tokenizers.vocabulary import resolve_vocabulary
from megatron.training import memory
from megatron.training.arguments import parse
from megatron.training.build import build_chunks
from megatron.training.failing.failure import RunFailed, describe
from megatron.training.failing.heartbeat import Pulse
from megatron.training.memory_use.log import MemoryLog
from megatron.training.memory_use.out_of_memory import explained, is_out_of_memory
from megatron.training.memory_use.use import MemoryUse
from megatron.training.records.metrics import Facts, Metrics

RUN = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 4 "
    "--train-iters 10 --lr 1e-3 --mock-data --vocab-size 100 --device cpu "
    "--tokenizer-type NullTokenizer --global-batch-size 8"
)
TOO_MUCH = 1 << 60


def of_torch() -> None:
    torch.empty(TOO_MUCH, dtype=torch.uint8)


def of_numpy() -> None:
    np.empty(TOO_MUCH, dtype=np.uint8)


def of_cuda() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def of_the_system() -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def use() -> MemoryUse:
    """Return the memory of a run of one process that is ready to train."""
    parsed = parse(RUN.split(), world_size=1)
    run, mesh = parsed.config, Mesh.serial()
    vocabulary = resolve_vocabulary(run.tokenizer, 101, 1)
    chunks = build_chunks(run, mesh, vocabulary, pretrain_gpt.build_model)
    found = MemoryUse(run, mesh)
    found.origins, found.padded_rows = parsed.origins, vocabulary.padded_rows
    found.optimizer = build_optimizer(run.optimizer, chunks, mesh, run.precision)
    return found


@pytest.mark.parametrize("ask", [of_torch, of_numpy, of_cuda, of_the_system])
def test_an_error_of_memory_says_what_was_held_and_what_would_need_less(ask: object) -> None:
    pulse = Pulse()
    pulse.timed("iteration 7")
    held = use()
    held.passing.change(3 << 20)
    with pytest.raises(RunFailed) as caught, explained(held, pulse):
        ask()  # type: ignore[operator]
    first, mine, planned, *advice = str(caught.value).splitlines()
    assert first.startswith("out of memory in iteration 7: ")
    assert mine.startswith("  held: communication 3.00 MiB, states 862.00 KiB, weights 431.00 KiB")
    assert "resident" in mine
    total = f"{held.planned[0].total / 2**20:.2f} MiB"
    assert planned.startswith(
        f"  planned: {total} at the fullest moment, each at most: activations"
    )
    assert " there is room for about " in planned
    assert advice[0] == f"  the fullest rank has {total}; what would lower that:"
    assert any(line.startswith("    --micro-batch-size 2: saves ") for line in advice)
    failure = describe(caught.value)
    assert failure.code == 1 and failure.is_plain


class Taken:
    """A writer that keeps memory rows; what else a run writes is not looked at."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []

    def memory(self, row: dict[str, Any]) -> None:
        self.taken.append(row)


def test_a_report_has_what_is_held_beside_what_was_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, printed, taken = use(), list[str](), Taken()
    facts = Facts(
        train_iters=10,
        seq_length=32,
        world_size=1,
        flops_per_sample=1.0,
        peak_flops=None,
        attempt=0,
        memory=lambda: 0,
    )
    log = MemoryLog(held, Metrics(facts, [taken], printed.append), printed.append)  # type: ignore[list-item]
    held.passing.change(500)
    log.report(4)
    (row,) = taken.taken
    (planned,) = held.planned
    assert (row["iteration"], row["pipeline_rank"]) == (4, 0)
    for name, size in planned.fixed.items():
        assert row["measured_bytes"][name] == row["planned_bytes"][name] == size
    assert row["measured_bytes"]["communication"] == 500
    assert row["measured_bytes"]["resident"] > 10_000_000
    assert row["planned_bytes"]["activations"] == planned.activations > 0
    assert len(printed) == 1  # nothing to warn of
    # Five percent more are a fault of the plan, told once.
    weights = planned.fixed["weights"]
    for more, warnings in ((weights // 25, 0), (weights // 15, 1), (weights // 15, 1)):
        monkeypatch.setattr(
            held, "fixed", lambda more=more: {**planned.fixed, "weights": weights + more}
        )
        log.report(5)
        found = [line for line in printed if line.startswith("warning: ")]
        assert len(found) == warnings
    assert f"weights {weights + weights // 15:,} bytes, planned {weights:,}" in found[0]


def test_other_errors_pass() -> None:
    for error in (RuntimeError("shapes differ"), ValueError("no"), OSError(errno.ENOENT, "gone")):
        assert not is_out_of_memory(error)
        with pytest.raises(type(error)), explained(use(), Pulse()):
            raise error


def test_before_the_vocabulary_is_known_there_is_no_plan() -> None:
    parsed = parse(RUN.split(), world_size=1)
    with pytest.raises(RunFailed) as caught:
        with explained(MemoryUse(parsed.config, Mesh.serial()), Pulse()):
            of_torch()
    first, mine = str(caught.value).splitlines()
    assert first.startswith("out of memory in starting: ") and mine.startswith("  held: nothing (")


def test_what_was_under_way_is_given_up_first() -> None:
    """The message needs memory itself."""
    gone: list[weakref.ref[torch.Tensor]] = []

    def work() -> None:
        activation = torch.zeros(10)
        gone.append(weakref.ref(activation))
        of_torch()

    with pytest.raises(RunFailed), explained(use(), Pulse()):
        work()
    gc.collect()
    assert gone[0]() is None


def test_what_is_left_under_a_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    data = next(
        1024 * int(line.split()[1])
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmData")
    )
    resource.setrlimit(resource.RLIMIT_DATA, (data + (64 << 20), before[1]))
    try:
        left, limit = memory.left(torch.device("cpu"))
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    assert 32 << 20 < left <= 64 << 20 and limit.startswith("RLIMIT_DATA of ")


def test_what_is_left_of_a_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    assert memory.left(torch.device("cpu")) == (2000, "the control group's 4.88 KiB")
    (tmp_path / "memory.max").write_text("max\n")
    left, limit = memory.left(torch.device("cpu"))
    assert left > 5000 and limit.startswith("the machine's ")


def test_a_level_of_unused_memory_has_no_effect_on_the_cpu() -> None:
    text = f"{RUN} --empty-unused-memory-level 2"
    assert "--empty-unused-memory-level (--device is cpu)" in parse(text.split()).no_effect
    on_cuda = parse(text.replace("--device cpu", "--dry-run").split())
    assert not any("unused-memory" in note for note in on_cuda.no_effect)


def test_unused_memory_is_given_back_where_the_level_asks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    for level, times in ((0, 0), (1, 1), (2, 2)):
        emptied.clear()
        for kind in ("cuda", "cpu"):
            empty = memory.emptying(level, torch.device(kind))
            empty(1)
            empty(2)
        assert len(emptied) == times
