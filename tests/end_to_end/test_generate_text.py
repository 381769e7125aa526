"""tools/generate_text.py on a checkpoint of a run that learned to count."""

import importlib.util
import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from megatron.core.datasets.indexed import IndexedDatasetBuilder
from megatron.core.grid import ParallelConfig
from megatron.core.mesh import Axis
from megatron.core.utils import UserError, silent
from megatron.training.generation import Processes, open_checkpoint
from megatron.training.processes import setup
from tests.harness import Pool
from tests.programs import ByHand, by_hand, free_port, launch

ROOT = Path(__file__).resolve().parent.parent.parent
IDS = 20
COUNT = "5 6 7 8"


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the checkpoints of a model that counts modulo 20; the vocabulary is padded."""
    folder = tmp_path_factory.mktemp("generate")
    with IndexedDatasetBuilder(str(folder / "count"), np.uint16) as builder:
        for start in range(100):
            builder.add_document([*((start + np.arange(30)) % IDS).tolist(), IDS])
        builder.finalize()
    words = (
        "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --max-position-embeddings 64 "
        "--seq-length 32 --micro-batch-size 8 --lr 1e-2 --lr-decay-style constant "
        "--train-iters 60 --hidden-dropout 0 --attention-dropout 0 --num-workers 0 --device cpu "
        f"--tokenizer-type NullTokenizer --vocab-size {IDS} --split 100,0,0 --eval-iters 0 "
        f"--data-path {folder / 'count'} --save {folder / 'save'} --log-interval 100"
    )
    assert pretrain_gpt.main(words.split()) == 0
    return str(folder / "save")


@pytest.fixture
def generate(checkpoints: str) -> Callable[..., int]:
    tool = load_tool("generate_text")

    def run(*more: object) -> int:
        common = ["--load", checkpoints, "--device", "cpu", "--temperature", "0"]
        code: int = tool.main([*common, *map(str, more)])
        return code

    return run


def test_it_goes_on_counting(
    generate: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate("--prompt", COUNT, "--num-tokens-to-generate", 6) == 0
    assert "9 10 11 12 13 14" in capsys.readouterr().out


@pytest.mark.parametrize("cache", ["--kv-cache", "--no-kv-cache"])
def test_a_file_of_prompts_of_several_lengths(
    generate: Callable[..., int], tmp_path: Path, cache: str
) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text(f"{COUNT}\n\n1 2 3\n11 12 13 14 15 16\n")
    files = ("--prompt-file", prompts, "--output", output)
    assert generate(*files, "--num-tokens-to-generate", 3, cache) == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["tokens"] for record in records] == [[9, 10, 11], [4, 5, 6], [17, 18, 19]]
    assert all(len(r["log_probabilities"]) == 3 and r["finish"] == "length" for r in records)


def test_stop_tokens_and_samples(generate: Callable[..., int], tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    more = ("--prompt", COUNT, "--stop-token", "12", "--num-samples", 2, "--output", output)
    assert generate(*more, "--num-tokens-to-generate", 9) == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["tokens"] for record in records] == [[9, 10, 11, 12]] * 2
    assert [record["finish"] for record in records] == ["stop", "stop"]
    assert records[0]["text"] == " 9 10 11"


def test_one_prompt_per_line(
    generate: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{COUNT}\nnot numbers\n2 3 4 5\n"))
    assert generate("--num-tokens-to-generate", 2) == 0
    printed = capsys.readouterr()
    assert f"{COUNT} 9 10" in printed.out and "2 3 4 5 6 7" in printed.out
    assert "not 'not'" in printed.err


def test_lines_come_one_by_one_and_none_when_none_is_there() -> None:
    """Two lines in one write are two; half a line waits for its end; the end is no line."""
    reading, writing = os.pipe()
    with open(reading, encoding="utf-8") as file:
        lines = load_tool("generate_text").Lines(file)
        assert lines.next(0.01) is None
        os.write(writing, "first\nsecond\nhäl".encode())
        assert [lines.next(5), lines.next(5), lines.next(0.01)] == ["first\n", "second\n", None]
        os.write(writing, b"f\n\nlast")
        os.close(writing)
        assert [lines.next(5) for _ in range(5)] == ["hälf\n", "\n", "last", "", ""]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--prompt", "1", "--prompt-file", "x"), "exclude each other"),
        (("--prompt-file", "absent.txt"), "absent.txt"),
        (("--prompt", "1 2", "--stop-token", "3 4"), "2 tokens"),
        (("--prompt", "1", "--top-p", "2"), "--top-p"),
        (("--prompt", "1", "--ckpt-step", "7"), "7"),
        (("--prompt", "1", "--num-tokens-to-generate", "100"), "--max-position-embeddings"),
        (("--prompt", "1", "--num-samples", "0"), "--num-samples"),
        (("--prompt", "1", "--temperature", "-1"), "--temperature"),
        (
            (
                "--prompt",
                "1",
                "--no-such-flag",
            ),
            "--no-such-flag",
        ),
    ],
)
def test_mistakes_are_named(
    generate: Callable[..., int], more: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        generate(*more)


def test_a_folder_without_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no checkpoint"):
        load_tool("generate_text").main(["--load", str(tmp_path), "--prompt", "1"])


LAYOUTS = ("--tensor-model-parallel-size", 2), ("--pipeline-model-parallel-size", 2)


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return checkpoints of an untrained model in fp64, which says something else at each draw."""
    folder = tmp_path_factory.mktemp("two") / "save"
    words = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --max-position-embeddings 64 "
        "--seq-length 32 --micro-batch-size 2 --lr 1e-2 --train-iters 1 --fp64 --device cpu "
        "--tokenizer-type NullTokenizer --vocab-size 20 --mock-data --eval-iters 0 "
        f"--init-method-std 0.3 --num-workers 0 --save {folder}"
    )
    assert pretrain_gpt.main(words.split()) == 0
    return str(folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_processes_write_what_one_writes(
    pool: Pool, two_layers: str, tmp_path: Path, layout: tuple[str, int]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("1 2 3\n7\n")
    common = ("--load", two_layers, "--device", "cpu", "--prompt-file", prompts, "--top-k", 15)
    more = ("--num-samples", 2, "--seed", 4, "--num-tokens-to-generate", 6, "--output")
    serial_words = (*common, *more, tmp_path / "one.jsonl")
    assert load_tool("generate_text").main([str(word) for word in serial_words]) == 0
    ended = launch(
        pool, 2, "tools.generate_text", *common, *more, "two.jsonl", *layout, folder=tmp_path
    )
    assert [(one.code, one.out) for one in ended] == [(0, "")] * 2
    assert "loaded" in ended[0].err and not ended[1].err
    read = [
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("one.jsonl", "two.jsonl")
    ]
    assert len({tuple(record["tokens"]) for record in read[0]}) == 4
    for serial, parallel in zip(*read, strict=True):
        logarithms = pytest.approx(serial.pop("log_probabilities"), rel=1e-10)
        assert parallel.pop("log_probabilities") == logarithms
        assert parallel == serial


def test_the_first_process_reads_and_prints(checkpoints: str, tmp_path: Path) -> None:
    """A conversation through torchrun, as a user has it."""
    command = (
        f"-m torch.distributed.run --nproc-per-node 2 --master-port {free_port()} "
        f"{ROOT}/tools/generate_text.py --load {checkpoints} --device cpu --temperature 0 "
        "--tensor-model-parallel-size 2 --num-tokens-to-generate 2"
    )
    ended = subprocess.run(
        [sys.executable, *command.split()],
        input=f"{COUNT}\nnot numbers\n2 3 4 5\n",
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=True,
    )
    assert ended.stdout.splitlines() == [f"{COUNT} 9 10", "2 3 4 5 6 7"]
    assert ended.stderr.count("not 'not'") == 1


@pytest.mark.parametrize(
    ("world", "layout", "message"),
    [
        (2, (), r"2 processes for one copy.*--tensor-model-parallel-size \(1\) x.*over 1"),
        (1, LAYOUTS[0], r"1 process for one copy.*spread over 2; start 2"),
        (1, ("--context-parallel-size", 2), r"--context-parallel-size \(2\).*leave it out"),
        (1, ("--expert-model-parallel-size", 2), r"--expert-model-parallel-size \(2\)"),
        (1, ("--pipeline-model-parallel-size", 0), "must be at least 1"),
    ],
)
def test_layouts_that_cannot_generate_are_refused_before_any_work(
    checkpoints: str,
    monkeypatch: pytest.MonkeyPatch,
    world: int,
    layout: tuple[object, ...],
    message: str,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(UserError, match=message):
        load_tool("generate_text").main(["--load", checkpoints, *map(str, layout)])


def started(checkpoints: str, folder: Path, *more: object, **given: Any) -> ByHand:
    words = ("--load", checkpoints, "--device", "cpu", *more)
    return by_hand("tools.generate_text", words, folder=folder, **given)


@pytest.mark.parametrize(
    ("world", "flag", "message"),
    [
        (3, "--tensor-model-parallel-size", "--num-attention-heads (2)"),
        (2, "--pipeline-model-parallel-size", "--pipeline-model-parallel-size (2)"),
    ],
)
def test_a_model_that_does_not_divide_is_named_once(
    checkpoints: str, tmp_path: Path, world: int, flag: str, message: str
) -> None:
    run = started(checkpoints, tmp_path, "--prompt", "1", flag, world, world=world)
    assert run.codes() == [2] * world
    said = run.errors.read_text()
    assert said.count("generate_text: error: ") == 1 and said.count(message) == 1
    assert "Traceback" not in said


def test_a_port_that_is_taken_is_one_message(checkpoints: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        more = ("--prompt", "1", *LAYOUTS[0])
        run = started(checkpoints, tmp_path, *more, world=2, ranks=[0], port=port)
        assert run.codes() == [2]
    said = run.errors.read_text()
    assert "generate_text: error: rank 0 of 2 (RANK and WORLD_SIZE) cannot listen at" in said
    assert "set MASTER_PORT to a free one" in said and "Traceback" not in said


def test_processes_that_are_told_different_things_are_refused(
    checkpoints: str, tmp_path: Path
) -> None:
    more = ("--prompt", "1", *LAYOUTS[0])
    own = {1: ("--top-k", 3)}
    run = started(checkpoints, tmp_path, *more, world=2, own_words=own)
    assert run.codes() == [2, 2]
    said = run.errors.read_text()
    assert said.count("rank 1 has --top-k 3, rank 0 0") == 1 and "Traceback" not in said


def test_a_process_that_dies_in_a_conversation_is_missed(checkpoints: str, tmp_path: Path) -> None:
    """The first one waits for a line meanwhile, and would tell the other of it in a while."""
    run = started(checkpoints, tmp_path, *LAYOUTS[0], world=2)
    run.wait_for("loaded")
    run.processes[1].kill()
    assert run.codes(timeout=60) == [1, -signal.SIGKILL]
    assert "[tp1] rank 1 died" in run.errors.read_text()


def test_groups_have_the_limit_that_is_asked_for(pool: Pool, checkpoints: str) -> None:
    assert pool.run(2, limits, checkpoints) == [{timedelta(minutes=3) + setup.MARGIN}] * 2


def limits(rank: int, checkpoints: str) -> set[timedelta]:
    world = Axis("world", (0, 1), rank, dist.group.WORLD)
    layout = ParallelConfig.resolve(tensor_model_parallel_size=2)
    limit = timedelta(minutes=3) + setup.MARGIN
    processes = Processes(world, torch.device("cpu"), layout, limit)
    mesh = open_checkpoint(checkpoints, None, processes, silent).model.mesh
    groups = [axis.group for name, axis in mesh.axes.items() if axis.group and name != "world"]
    return {group._get_backend(torch.device("cpu")).options._timeout for group in groups}
