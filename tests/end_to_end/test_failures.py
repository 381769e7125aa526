"""One rank of a run fails, dies or stalls: all end in time, and the first cause is shown first.

Ranks are forked with torch imported, for speed, and write their errors to one file, as under a
launcher; one test starts them with torchrun.
"""

import dataclasses
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain_gpt
from megatron.core import sharding
from megatron.core.utils import UserError
from megatron.training import arguments, pretrain
from megatron.training.program import Program

ROOT = Path(__file__).resolve().parents[2]
RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--max-position-embeddings 16 --global-batch-size 4 --lr 1e-3 --mock-data --log-interval 1 "
    "--tokenizer-type NullTokenizer --vocab-size 60 --train-iters 6 --eval-iters 0 --device cpu "
    "--num-workers 0 --save save --save-interval 100"
)
SHORT = "--distributed-timeout-seconds-after-init 4"
"""The limit of every step after the first iteration."""
LIMIT = 180.0
"""Seconds in which a run of a test must have ended, on a machine that does much else."""


class Planted:
    """A GPT's forward step that comes to ``what`` on one rank, in the second iteration."""

    def __init__(self, rank: int | None, what: Callable[[torch.nn.Module], None]) -> None:
        self.rank, self.what, self.is_done = rank, what, False

    def __call__(self, model: Any, batch: Any, x: Any, dropout: Any) -> Any:
        mine = self.rank in (None, int(os.environ["RANK"]))
        if mine and not self.is_done and dropout is not None and dropout.iteration == 2:
            self.is_done = True
            self.what(model)
        return pretrain_gpt.forward_step(model, batch, x, dropout)


def fail(model: torch.nn.Module) -> None:
    time.sleep(3)  # so that the others have come to wait
    raise ValueError("planted error")


def die(model: torch.nn.Module) -> None:
    time.sleep(3)  # so that a heartbeat has told of this step
    os.kill(os.getpid(), signal.SIGKILL)


def freeze(model: torch.nn.Module) -> None:
    time.sleep(3)
    os.kill(os.getpid(), signal.SIGSTOP)


def ask_too_much(model: torch.nn.Module) -> None:
    time.sleep(3)  # so that the others have come to wait
    torch.empty(1 << 60, dtype=torch.uint8)


def oversleep(model: torch.nn.Module) -> None:
    time.sleep(10 * LIMIT)


def refuse(model: torch.nn.Module) -> None:
    raise UserError("--planted (1) must be 2")


def press_ctrl_c(model: torch.nn.Module) -> None:
    time.sleep(2)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(LIMIT)


def exit_early(model: torch.nn.Module) -> None:
    time.sleep(2)
    sys.exit(3)


def drift(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if sharding.of(parameter).name == "decoder.final_layernorm.weight":
                parameter[3] += 1e-6


def nothing(model: torch.nn.Module) -> None:
    pass


class SlowReading:
    """A training set whose samples never come once a rank has read a few."""

    def __init__(self, dataset: Any, rank: int) -> None:
        self.dataset, self.rank, self.reads = dataset, rank, 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if self.reads == 5 and int(os.environ["RANK"]) == self.rank:
            time.sleep(10 * LIMIT)
        return self.dataset[index]


def read_slowly(config: Any, *rest: Any) -> Any:
    built = pretrain_gpt.build_datasets(config, *rest)
    return dataclasses.replace(built, train=SlowReading(built.train, 1))


def run_planted(words: list[str], rank: int | None, what: Callable[..., None], slow: bool) -> None:
    """Be an entry point of one's own, as a user would copy it."""

    def main() -> int:
        place = pretrain_gpt.launch.discover(os.environ)
        run = arguments.parse(words, "pretrain_gpt", world_size=place.world_size)
        program = Program(
            build_model=pretrain_gpt.build_model,
            build_datasets=read_slowly if slow else pretrain_gpt.build_datasets,
            forward_step=Planted(rank, what),
        )
        return pretrain.pretrain(run, place, program)

    arguments.run_main(main, "pretrain_gpt")


def one_rank(
    folder: str, environ: Mapping[str, str], words: list[str], planted: tuple[Any, ...]
) -> None:
    """Be one process of a run that was started by hand."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "TORCHELASTIC", "PMI_")):
            del os.environ[name]
    os.environ.update(environ)
    os.chdir(folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    os.dup2(os.open(f"out.{environ['RANK']}", flags), 1)
    os.dup2(os.open("err", flags), 2)
    sys.argv = ["pretrain_gpt.py", *words]
    run_planted(words, *planted)


@dataclass
class Ended:
    """How a run ended."""

    codes: list[int | None]
    """Exit codes by rank; None for one that had to be killed."""
    errors: str
    """All that was written on stderr."""
    seconds: float

    @property
    def lines(self) -> list[str]:
        """Return what was written on stderr, without warnings of torch's C++ code."""
        return [line for line in self.errors.splitlines() if not line.startswith("[W")]

    @property
    def blocks(self) -> list[str]:
        """Return what each rank said, in order; each begins with its coordinates."""
        found = re.split(r"^(?=\[[^\]]+\] rank \d)", "\n".join(self.lines), flags=re.MULTILINE)
        assert found[0] == "", "something was said before"
        return found[1:]


def launch(
    folder: Path,
    world: int,
    what: Callable[..., None],
    rank: int | None,
    words: str = "",
    *,
    slow_reading: bool = False,
    own_words: Mapping[int, str] | None = None,
    kept: tuple[int, ...] = (),
) -> Ended:
    """Run with ``what`` planted on ``rank`` and wait for the end of all ranks but ``kept``."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    processes = []
    for number in range(world):
        environ = {
            "RANK": str(number),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_ERROR_FILE": str(folder / f"error.{number}"),
        }
        given = f"{RUN} {words} {(own_words or {}).get(number, '')}".split()
        planted = (rank, what, slow_reading)
        process = context.Process(target=one_rank, args=(str(folder), environ, given, planted))
        process.start()
        processes.append(process)
    start = time.monotonic()
    for number, process in enumerate(processes):
        if number not in kept:
            process.join(max(0.0, start + LIMIT - time.monotonic()))
    seconds = time.monotonic() - start
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
    return Ended(codes, (folder / "err").read_text(), seconds)


def error_file(folder: Path, rank: int) -> str:
    content = json.loads((folder / f"error.{rank}").read_text())
    return str(content["message"]["message"])


def status(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "save" / "run_status.json").read_text())
    return content


def test_a_good_end_is_quiet(tmp_path: Path) -> None:
    ended = launch(tmp_path, 2, nothing, None)
    assert ended.codes == [0, 0]
    assert ended.lines == []
    assert status(tmp_path)["reason"] == "complete"


def test_hang_02_an_error_of_one_rank_is_shown_first(tmp_path: Path) -> None:
    words = "--pipeline-model-parallel-size 2 --global-batch-size 8"
    ended = launch(tmp_path, 4, fail, 1, words)
    assert ended.codes == [1] * 4
    first, *others = ended.blocks
    cause = "[pp0 dp1] rank 1 failed in iteration 2, last action forward(microbatch 0, chunk 0)"
    assert first.startswith(f"{cause}:\nTraceback") and "ValueError: planted error" in first
    # The others say where they stood.
    waiting = ["[pp0 dp0] rank 0", "[pp1 dp0] rank 2", "[pp1 dp1] rank 3"]
    for place, block in zip(waiting, sorted(others), strict=True):
        assert block.startswith(f"{place} ends, since {cause}; it was in iteration 2")
        assert "core/comm.py" in block
    assert "failed in iteration 2" in error_file(tmp_path, 0)
    assert error_file(tmp_path, 1).endswith("ValueError: planted error")
    assert status(tmp_path)["reason"] == "failure" and "planted" in status(tmp_path)["message"]


def test_a_rank_without_memory_says_what_would_need_less(tmp_path: Path) -> None:
    """In one message, without a stack; the others end with it."""
    words = "--use-distributed-optimizer --micro-batch-size 2"
    ended = launch(tmp_path, 2, ask_too_much, 1, words)
    assert ended.codes == [1, 1]
    first, held, planned, *advice = ended.lines
    assert first.startswith(
        "pretrain_gpt: [dp1] error: out of memory in iteration 2, last action forward(microbatch 0"
    )
    assert held.startswith("  held: ") and "weights 3" in held and "(resident " in held
    assert planned.startswith("  planned: ")
    assert any(line.startswith("    --micro-batch-size 1: saves ") for line in advice)
    assert "out of memory" in error_file(tmp_path, 0)


def test_ctrl_c_that_one_rank_sees_first_ends_all_as_interrupted(tmp_path: Path) -> None:
    ended = launch(tmp_path, 2, press_ctrl_c, 1)
    assert ended.codes == [130, 130]
    assert ended.lines == ["pretrain_gpt: [dp1] interrupted"]
    left = status(tmp_path)
    assert (left["reason"], left["resubmit"], left["iteration"]) == ("interrupted", False, 1)


def test_an_exit_of_the_programs_own_code_is_a_failure(tmp_path: Path) -> None:
    """It says no farewell: the others would wait for it until their limit."""
    ended = launch(tmp_path, 2, exit_early, 1)
    assert ended.codes == [3, 3]
    first, second = ended.blocks
    assert first.startswith("[dp1] rank 1 failed in iteration 2, last action forward(microbatch")
    assert "in exit_early" in first and "SystemExit: 3" in first
    assert second.startswith("[dp0] rank 0 ends, since [dp1] rank 1 failed")


@pytest.mark.parametrize("dead", [0, 1])
def test_hang_02_a_rank_that_is_killed_is_named(tmp_path: Path, dead: int) -> None:
    """Rank 0 holds what the ranks tell each other with; its death must be seen as well."""
    ended = launch(tmp_path, 2, die, dead)
    other = 1 - dead
    assert ended.codes[dead] == -signal.SIGKILL and ended.codes[other] == 1
    first, second = ended.blocks
    assert first.startswith(f"[dp{dead}] rank {dead} died without a word: it was killed, or")
    assert re.search(r"last heartbeat.*: iteration 2, last action forward\(microbatch 0", first)
    assert second.startswith(f"[dp{other}] rank {other} ends, since [dp{dead}] rank {dead} died")
    assert "core/comm.py" in second
    assert f"rank {dead} died" in error_file(tmp_path, other)


def test_hang_02_a_rank_that_stalls_is_named_with_its_stack(tmp_path: Path) -> None:
    """The others wait for it; time limits of theirs are no first cause."""
    ended = launch(tmp_path, 2, oversleep, 1, SHORT)
    assert ended.codes == [1, 1]
    first, second = ended.blocks
    assert re.match(r"\[dp1\] rank 1 stalled: nothing new for \d+ s; last heartbeat", first)
    assert "iteration 2, last action forward(microbatch 0, chunk 0); it is at:" in first
    assert "in oversleep" in first
    assert second.startswith("[dp0] rank 0 ends, since [dp1] rank 1 stalled")
    assert "core/comm.py" in second


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_rank_that_is_frozen_is_named_by_another(tmp_path: Path, frozen: int) -> None:
    """Rank 0 closes no connection, so that its silence alone tells of it."""
    ended = launch(tmp_path, 2, freeze, frozen, SHORT, kept=(frozen,))
    other = 1 - frozen
    assert ended.codes[frozen] is None and ended.codes[other] == 1
    first, second = ended.blocks
    assert first.startswith(f"[dp{frozen}] rank {frozen} stalled: nothing")
    assert re.search(r"last heartbeat.*: iteration 2, last action forward\(microbatch 0", first)
    assert second.startswith(
        f"[dp{other}] rank {other} ends, since [dp{frozen}] rank {frozen} stalled"
    )
    assert "core/comm.py" in second


def test_hang_01_a_reader_that_stalls_is_named(tmp_path: Path) -> None:
    """The process that reads samples ahead stands still, and its rank waits for it."""
    ended = launch(tmp_path, 2, nothing, None, f"{SHORT} --num-workers 1", slow_reading=True)
    assert ended.codes == [1, 1]
    first, second = ended.blocks
    assert first.startswith("[dp1] rank 1 stalled: nothing new for")
    assert "training/batches.py" in first and "core/comm.py" not in first
    assert second.startswith("[dp0] rank 0 ends, since [dp1] rank 1 stalled")


@pytest.mark.parametrize(("rank", "who"), [(None, ""), (1, "[dp1] ")])
def test_a_user_error_is_printed_once(tmp_path: Path, rank: int | None, who: str) -> None:
    """By rank 0 where all have it, else by the one that has it; nobody adds a stack."""
    ended = launch(tmp_path, 2, refuse, rank)
    assert ended.codes == [2, 2]
    assert ended.lines == [f"pretrain_gpt: {who}error: --planted (1) must be 2"]
    assert error_file(tmp_path, 0) == "--planted (1) must be 2"


def test_a_wrong_flag_is_printed_once(tmp_path: Path) -> None:
    """Every rank finds it on its own, before the ranks are connected."""
    ended = launch(tmp_path, 4, nothing, None, "--num-attention-heads 5")
    assert ended.codes == [2] * 4
    assert len(ended.lines) == 1 and "--num-attention-heads (5)" in ended.lines[0]
    assert "--num-attention-heads (5)" in error_file(tmp_path, 3)


def test_a_wrong_flag_of_one_rank_is_printed(tmp_path: Path) -> None:
    ended = launch(tmp_path, 2, nothing, None, own_words={1: "--num-attention-heads 5"}, kept=(0,))
    assert ended.codes[1] == 2
    assert len(ended.lines) == 1 and "--num-attention-heads (5)" in ended.lines[0]


def test_another_folder_to_save_to_is_found_at_the_start(tmp_path: Path) -> None:
    ended = launch(tmp_path, 2, nothing, None, "--save ./save", own_words={1: "--save ./other"})
    assert ended.codes == [2, 2]
    (line,) = ended.lines
    assert line.startswith("pretrain_gpt: error: rank 1 has another folder than rank 0 as --save")


def test_par_09_weights_that_drift_apart_stop_the_run(tmp_path: Path) -> None:
    words = "--check-weight-hash-across-dp-replicas-interval 3"
    ended = launch(tmp_path, 2, drift, 1, words)
    assert ended.codes == [1, 1]
    (line,) = ended.lines
    assert line.startswith(
        "pretrain_gpt: error: iteration 3: copies of weights that must be equal differ: "
        "decoder.final_layernorm.weight: [dp0] (rank 0) against [dp1] (rank 1). It happened since"
    )
    assert status(tmp_path)["reason"] == "failure"
    assert not list((tmp_path / "save").glob("iter_*"))


def test_hang_02_under_torchrun(tmp_path: Path) -> None:
    """Torchrun kills the others when one ends: the stacks are out by then, and it blames rank 1."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from tests.end_to_end.test_failures import fail, run_planted\n"
        "run_planted(sys.argv[1:], 1, fail, False)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, str(program), *RUN.split()],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=3 * LIMIT,
    )
    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if "] rank " in line]
    assert lines[0].startswith("[dp1] rank 1 failed in iteration 2, last action forward(")
    assert lines[1].startswith("[dp0] rank 0 ends, since [dp1] rank 1 failed in iteration 2")
    root_cause = result.stderr[result.stderr.index("Root Cause") :]
    assert re.search(r"rank +: 1 \(local_rank: 1\)", root_cause)
    assert "ValueError: planted error" in root_cause
