"""Whole runs of pretrain_gpt.py on a tiny corpus: resume, stops, failures, evaluation, logs."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pretrain_gpt
from megatron.core.datasets.indexed import IndexedDataset, IndexedDatasetBuilder
from megatron.core.dist_checkpointing.format import read_index
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.kernels import matmul
from megatron.core.rng import DropoutKey
from megatron.core.utils import UserError
from megatron.training import pretrain
from megatron.training.objective import TokenLosses
from megatron.training.processes.launch import Launch
from tools import preprocess_data

ROOT = Path(__file__).resolve().parent.parent.parent
VOCABULARY = 60


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the prefix of a corpus of counting sequences, which a model can learn."""
    prefix = str(tmp_path_factory.mktemp("corpus") / "tiny")
    generator = np.random.default_rng(5)
    builder = IndexedDatasetBuilder(prefix, np.uint16)
    for _ in range(300):
        start, length = generator.integers(VOCABULARY), generator.integers(5, 40)
        tokens = (start + np.arange(length)) % VOCABULARY
        builder.add_document([*tokens.tolist(), VOCABULARY], [length + 1])
    builder.finalize()
    return prefix


@pytest.fixture
def run(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., int]]:
    """Yield what trains in this process, in a folder of its own, and returns the exit code."""
    others = set(multiprocessing.active_children())
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE") or name.startswith(("SLURM_", "OMPI_")):
            monkeypatch.delenv(name)

    def train(*more: object) -> int:
        return pretrain_gpt.main(flags(corpus, *more))

    yield train
    # A failed test's readers may ignore the signal that Python ends its children with.
    left = set(multiprocessing.active_children()) - others
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise
    for reader in left:
        reader.kill()
        reader.join()
    signal.signal(signal.SIGCHLD, before)


def flags(corpus: str, *more: object) -> list[str]:
    """Return a tiny model's command line, dropout on; later flags win."""
    model = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 16"
    batch = "--seq-length 16 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2"
    data = f"--data-path {corpus} --split 80,10,10 --num-workers 0"
    rest = "--tokenizer-type NullTokenizer --vocab-size 60 --device cpu --eval-iters 0"
    words = f"{model} {batch} {data} {rest} --log-interval 1 --metrics-file metrics.jsonl"
    return [*words.split(), *map(str, more)]


def rows(path: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def status(folder: str = "save") -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(folder, "run_status.json").read_text())
    return content


def tensors(folder: str) -> dict[str, torch.Tensor]:
    with Checkpoint(Path(folder)) as checkpoint:
        return {key: checkpoint.read(key) for key in checkpoint.index.tensors}


def same(row: dict[str, Any]) -> dict[str, Any]:
    """Return what must not depend on time or on restarts."""
    timed = ("elapsed_ms", "tokens_per_second", "memory_bytes", "attempt", "throughput")
    return {name: value for name, value in row.items() if name not in timed}


def test_a_run_learns(run: Callable[..., int], capfd: pytest.CaptureFixture[str]) -> None:
    assert run("--train-iters", 60, "--lr-decay-style", "constant") == 0
    losses = [row["lm_loss"] for row in rows()]
    assert losses[0] == pytest.approx(np.log(128), rel=0.05) or losses[0] < np.log(128)
    assert np.mean(losses[-5:]) < 0.6 * losses[0]
    out = capfd.readouterr().out
    line = re.compile(
        r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration       60/      60 \| "
        r"consumed samples:          240 \| elapsed time per iteration \(ms\): \d+\.\d \| "
        r"learning rate: 1\.000000E-02 \| global batch size:     4 \| lm loss: (\S+) \| "
        r"loss scale: 1\.0 \| grad norm: \d+\.\d{3} \| number of skipped iterations:   0 \| "
        r"number of nan iterations:   0 \|"
    )
    found = line.search(out)
    assert found and float(found[1]) == pytest.approx(losses[-1], rel=1e-6)
    assert "time to the first iteration (s) | imports:" in out


def test_ds_08_documents_of_one_sentence_train_without_a_pair_objective(
    run: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    texts = [f"This is sentence number {number}." for number in range(10)]
    Path("c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = ("--tokenizer-type", "ByteLevelTokenizer")
    words = ("--input", "c.jsonl", "--output-prefix", "c", "--split-sentences", "--append-eod")
    assert preprocess_data.main([*words, *tokenizer, "--workers", "1"]) == 0
    assert len(IndexedDataset("c_text_sentence")) == len(texts)
    data = ("--data-path", "c_text_sentence", "--split", "80,10,10", "--vocab-size", 300)
    assert run(*data, *tokenizer, "--train-iters", 8, "--eval-iters", 1) == 0
    losses = [row["lm_loss"] for row in rows() if "split" not in row]
    assert len(losses) == 8 and losses[-1] < losses[0]


def test_positions_that_only_count_up_are_left_to_the_model(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[set[str]] = []
    original = pretrain_gpt.forward_step

    def recording(model: Any, batch: Any, x: Any, dropout: DropoutKey | None) -> TokenLosses:
        names.append(set(batch))
        return original(model, batch, x, dropout)

    monkeypatch.setattr(pretrain_gpt, "forward_step", recording)
    common = ("--train-iters", 1, "--eval-iters", 1)
    for flags, more in (
        ((), set()),
        (("--reset-attention-mask",), {"cu_seqlens"}),
        (("--reset-position-ids",), {"position_ids"}),
    ):
        names.clear()
        assert run(*common, *flags) == 0
        # Two microbatches of training, of validation and of testing.
        assert names == [{"tokens", "labels", "loss_mask"} | more] * 6


def test_timers_are_printed_when_they_measure_something(
    run: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("--train-iters", 2) == 0
    assert "across ranks" not in capfd.readouterr().out
    assert run("--train-iters", 2, "--timing-log-level", 1) == 0
    out = capfd.readouterr().out
    block = r"\(min, max\) time across ranks \(ms\):\n {4}forward-backward \.{31}: \(\d+\.\d\d, "
    assert len(re.findall(block, out)) == 2
    assert run("--train-iters", 1, "--save", "save") == 0
    assert re.search(r"across ranks \(ms\):\n {4}save-checkpoint \.+: \(", capfd.readouterr().out)


def test_res_15_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(run: Callable[..., int]) -> None:
    evaluation = ("--eval-interval", 2, "--eval-iters", 1)
    whole = ("--train-iters", 10, *evaluation)
    assert run(*whole, "--save", "whole", "--metrics-file", "whole.jsonl") == 0
    assert run(*whole, "--save", "cut", "--exit-interval", 5) == 0
    assert status("cut")["reason"] == "interval" and status("cut")["iteration"] == 5
    assert run(*whole, "--save", "cut", "--load", "cut") == 0
    straight, pieces = rows("whole.jsonl"), rows()
    assert [same(row) for row in straight] == [same(row) for row in pieces]
    assert {row["attempt"] for row in pieces if row.get("iteration", 0) > 5} == {1}
    one, other = tensors("whole/iter_0000010"), tensors("cut/iter_0000010")
    assert one.keys() == other.keys()
    for key in one:
        assert torch.equal(one[key], other[key]), key


def test_dropout_is_on_in_these_runs(run: Callable[..., int]) -> None:
    """So that the equality above says something: the masks change the loss and follow the seed."""
    assert run("--train-iters", 1) == 0
    assert run("--train-iters", 1, "--hidden-dropout", 0, "--attention-dropout", 0) == 0
    assert run("--train-iters", 1) == 0
    first, without, again = [row["lm_loss"] for row in rows()]
    assert first == again != without


def test_res_08_no_sample_is_read_twice_or_left_out(
    run: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    ramp = ("--train-iters", 10, "--rampup-batch-size", 2, 2, 12, "--save", "save")
    assert run(*ramp, "--exit-interval", 4) == 0
    assert run(*ramp, "--load", "save") == 0
    ranges = [(row["first_sample"], row["last_sample"]) for row in rows()]
    assert len(ranges) == 10
    assert ranges[0][0] == 0
    assert all(after[0] == before[1] + 1 for before, after in zip(ranges, ranges[1:], strict=False))
    assert {last - first + 1 for first, last in ranges} == {2, 4}
    first = ranges[4][0]
    assert f"the first sample is number {first} of the training set" in capfd.readouterr().out


def test_res_11_a_complete_run_is_left_alone(
    run: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ("--train-iters", 4, "--save", "save", "--load", "save")
    assert run(*flags) == 0
    before = {path: path.stat().st_mtime_ns for path in Path("save").rglob("*")}
    lines = len(rows())
    assert run(*flags) == 0
    assert {path: path.stat().st_mtime_ns for path in Path("save").rglob("*")} == before
    assert len(rows()) == lines
    assert "already complete" in capfd.readouterr().out
    # Killed after its last save, before it could say so: the next run says it.
    left = json.loads(Path("save/run_status.json").read_text())
    Path("save/run_status.json").write_text(
        json.dumps({**left, "reason": "running", "resubmit": True, "attempt": 3})
    )
    assert run(*flags) == 0
    assert json.loads(Path("save/run_status.json").read_text()) == {**left, "attempt": 3}


def test_res_13_a_skipped_last_iteration_is_saved(run: Callable[..., int]) -> None:
    assert (
        run("--train-iters", 6, "--save", "save", "--save-interval", 3, "--iterations-to-skip", 6)
        == 0
    )
    before, after = tensors("save/iter_0000003"), tensors("save/iter_0000006")
    assert before.keys() == after.keys()
    with Checkpoint(Path("save/iter_0000006")) as checkpoint:
        progress = checkpoint.index.facts["progress"]
    assert (progress["iteration"], progress["consumed_samples"]) == (6, 24)
    assert progress["skipped_samples"] == 4
    last = rows()[-1]
    assert last["skipped"] and last["lm_loss"] is None and last["grad_norm"] is None


def test_iterations_to_skip_leaves_out_their_samples_and_no_others(run: Callable[..., int]) -> None:
    assert run("--train-iters", 4, "--iterations-to-skip", 2, 3) == 0
    first, second, third, fourth = rows()
    assert second["skipped"] and third["skipped"] and not fourth["skipped"]
    assert (fourth["first_sample"], fourth["skipped_samples"]) == (12, 8)
    for row in (first, fourth):  # --clip-grad is 1
        assert row["clipped_grad_norm"] == pytest.approx(min(row["grad_norm"], 1.0), rel=1e-5)


class Interfering:
    """A forward step that does something at one iteration."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, iteration: int, act: Callable[[], object]
    ) -> None:
        self.iteration, self.act = iteration, act
        self._original = pretrain_gpt.forward_step
        monkeypatch.setattr(pretrain_gpt, "forward_step", self)

    def __call__(self, model: Any, batch: Any, x: Any, dropout: DropoutKey | None) -> TokenLosses:
        losses, mask, *_ = self._original(model, batch, x, dropout)
        if dropout is not None and dropout.iteration == self.iteration:
            factor = self.act()
            losses = losses * (factor if isinstance(factor, float) else 1.0)
        return TokenLosses(losses, mask)


def test_opt_06_a_nan_stops_the_run_with_its_samples(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Interfering(monkeypatch, 3, lambda: float("nan"))
    assert run("--train-iters", 5, "--save", "save", "--save-interval", 1) == 1
    error = capfd.readouterr().err
    assert "iteration 3: loss is nan on rank 0; samples 8 to 11" in error
    assert "Traceback" not in error
    left = status()
    assert left["reason"] == "failure" and not left["resubmit"] and left["iteration"] == 2
    assert left["checkpoint"] == "save/iter_0000002"
    assert not Path("save/iter_0000003").exists()


def test_opt_06_skipping_counts_and_goes_on(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Interfering(monkeypatch, 3, lambda: float("nan"))
    flags = ("--train-iters", 5, "--skip-non-finite-iterations", 1, "--log-interval", 5)
    assert run(*flags) == 0
    bad = [row for row in rows() if row["skipped"]]
    assert [row["iteration"] for row in bad] == [3] and bad[0]["nan"]
    good = [row["lm_loss"] for row in rows() if not row["skipped"]]
    line = next(line for line in capfd.readouterr().out.splitlines() if "] iteration " in line)
    assert "number of skipped iterations:   1 | number of nan iterations:   1 |" in line
    shown = re.search(r"lm loss: (\S+)", line)
    assert shown and float(shown[1]) == pytest.approx(np.mean(good), rel=1e-6)


def test_sig_02_a_signal_saves_and_stops_cleanly(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    Interfering(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    before = signal.getsignal(signal.SIGUSR1)
    flags = (
        "--train-iters",
        100,
        "--save",
        "save",
        "--exit-signal-handler",
        "--exit-signal",
        "USR1",
    )
    assert run(*flags, "--micro-batch-size", 4, "--exit-code-on-early-stop", 75) == 75
    assert signal.getsignal(signal.SIGUSR1) == before
    left = status()
    assert (left["reason"], left["iteration"], left["resubmit"]) == ("signal", 3, True)
    assert left["checkpoint"] == "save/iter_0000003" and Path(left["checkpoint"]).is_dir()


def ignores(process: int | None, number: int) -> bool:
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    return bool(int(status.split("SigIgn:")[1].split()[0], 16) >> (number - 1) & 1)


def test_a_signal_to_all_processes_spares_the_readers(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = set(multiprocessing.active_children())

    def signal_everyone() -> None:
        readers = set(multiprocessing.active_children()) - others
        assert readers
        processes = [*(reader.pid for reader in readers), os.getpid()]
        # From outside: readers take their parent's signals for the order to leave.
        subprocess.run(["kill", "-TERM", *map(str, processes)], check=True)
        # Once the handler has run here, readers have had time to die of theirs; whoever ignores a
        # signal never gets it.
        handler: Any = signal.getsignal(signal.SIGTERM)
        while not handler.__self__.received:
            time.sleep(0.001)
        assert all(ignores(reader.pid, signal.SIGTERM) for reader in readers)

    Interfering(monkeypatch, 2, signal_everyone)
    stop = ("--train-iters", 50, "--save", "save", "--exit-signal-handler", "--num-workers", 1)
    assert run(*stop, "--micro-batch-size", 4) == 0
    assert (status()["reason"], status()["iteration"]) == ("signal", 2)


def test_sig_01_without_the_option_a_signal_ends_the_process_at_once(
    corpus: str, tmp_path: Path
) -> None:
    command = [sys.executable, str(ROOT / "pretrain_gpt.py")]
    command += flags(corpus, "--train-iters", 100000, "--save", "save", "--save-interval", 2)
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "iteration        3/" in line:
                break
        process.terminate()
        process.stdout.read()
        # By the signal itself: the training loop has not looked at it and left in order.
        assert process.wait(timeout=60) == -signal.SIGTERM
    left = json.loads((tmp_path / "save" / "run_status.json").read_text())
    assert left["reason"] == "running" and left["iteration"] >= 2
    assert Path(tmp_path, left["checkpoint"]).is_dir()  # published before, so it is known


def test_env_04_without_a_launcher_one_process_just_works(corpus: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags(corpus, "--train-iters", 2)]
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "launch: 1 process (no launcher)" in done.stdout
    assert "iteration        2/       2" in done.stdout


@pytest.mark.parametrize(("environ", "expected"), [({}, 3), ({"LOCAL_RANK": "1"}, 1)])
def test_a_launchers_local_rank_counts_unless_the_environment_has_one(
    run: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    expected: int,
) -> None:
    places: list[Launch] = []
    monkeypatch.setattr(
        pretrain, "pretrain", lambda parsed, place, program: places.append(place) or 0
    )
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", **environ}.items():
        monkeypatch.setenv(name, value)
    assert run("--train-iters", 1, "--local_rank", 3) == 0
    assert [place.local_rank for place in places] == [expected]


def test_a_stop_file_saves_stops_and_goes(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    Interfering(monkeypatch, 2, lambda: Path("save/stop").touch())
    assert run("--train-iters", 100, "--save", "save") == 0
    left = status()
    assert (left["reason"], left["iteration"], left["resubmit"]) == ("stop file", 2, False)
    assert not Path("save/stop").exists()


def test_a_whole_validation_set_does_not_depend_on_the_batch(run: Callable[..., int]) -> None:
    common = ("--train-iters", 1, "--eval-iters", -1, "--fp64", "--hidden-dropout", 0)
    common += ("--attention-dropout", 0)
    for micro in (1, 2, 4):
        assert run(*common, "--micro-batch-size", micro) == 0
    found = [row["lm_loss"] for row in rows() if row.get("split") == "valid"]
    assert len(found) == 3
    assert found == pytest.approx([found[0]] * 3, rel=1e-12)
    tests = [row["lm_loss"] for row in rows() if row.get("split") == "test"]
    assert tests == pytest.approx([tests[0]] * 3, rel=1e-12) and tests[0] != found[0]


def test_skip_train_evaluates_what_was_saved(
    run: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    evaluation = ("--eval-iters", -1)
    assert run("--train-iters", 3, "--save", "save", *evaluation) == 0
    before = {path: path.stat().st_mtime_ns for path in Path("save").rglob("*")}
    capfd.readouterr()
    assert run("--skip-train", "--load", "save", *evaluation) == 0
    out = capfd.readouterr().out
    trained = [row for row in rows() if row.get("split") == "valid"][-1]
    shown = re.search(
        r"-{60,}\n validation loss at iteration 3 on validation set \| lm loss value: (\S+) \| "
        r"lm loss PPL: (\S+) \| \n-{60,}\n",
        out,
    )
    assert shown and float(shown[1]) == pytest.approx(trained["lm_loss"], rel=1e-6)
    assert float(shown[2]) == pytest.approx(np.exp(trained["lm_loss"]), rel=1e-5)
    assert {path: path.stat().st_mtime_ns for path in Path("save").rglob("*")} == before


def test_tensorboard_has_the_usual_tags_and_forgets_what_a_resume_replaces(
    run: Callable[..., int],
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = ("--tensorboard-dir", "tb", "--save", "save", "--save-interval", 2)
    flags += ("--eval-interval", 2, "--eval-iters", 1, "--log-validation-ppl-to-tensorboard")
    assert run(*flags, "--train-iters", 6, "--exit-interval", 5) == 0
    assert run(*flags, "--train-iters", 6, "--load", "save", "--ckpt-step", 4) == 0
    events = EventAccumulator("tb")
    events.Reload()
    tags = set(events.Tags()["scalars"])
    for tag in ("lm loss", "learning-rate", "batch-size", "loss-scale", "grad-norm"):
        assert {tag, f"{tag} vs samples"} <= tags
    assert {"iteration-time", "lm loss validation", "lm loss validation ppl"} <= tags
    assert [event.step for event in events.Scalars("lm loss")] == [1, 2, 3, 4, 5, 6]
    by_iteration = {row["iteration"]: row for row in rows() if "split" not in row}
    for event in events.Scalars("lm loss"):
        assert event.value == pytest.approx(by_iteration[event.step]["lm_loss"], rel=1e-6)


def test_documents_that_do_not_see_each_other(run: Callable[..., int]) -> None:
    packed = ("--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss")
    assert run("--train-iters", 2, *packed) == 0
    assert run("--train-iters", 2) == 0
    first, _, plain, _ = [row["lm_loss"] for row in rows()]
    assert np.isfinite(first) and first != plain


def test_workers_read_the_same_samples(run: Callable[..., int]) -> None:
    assert run("--train-iters", 3) == 0
    assert run("--train-iters", 3, "--num-workers", 1) == 0
    losses = [row["lm_loss"] for row in rows()]
    assert losses[:3] == losses[3:]


@pytest.mark.parametrize("precision", ["--bf16", "--fp64"])
def test_other_precisions_resume_exactly_too(run: Callable[..., int], precision: str) -> None:
    flags = (precision, "--train-iters", 4, "--save", "save")
    assert run(precision, "--train-iters", 4) == 0
    assert run(*flags, "--exit-interval", 2) == 0
    assert run(*flags, "--load", "save") == 0
    found = [same(row) for row in rows()]
    assert found[:4] == found[4:]


HALVES = {
    "bf16": (("--bf16",), 0.01),
    "fp16": (("--fp16", "--initial-loss-scale", 2**16), 0.002),
}


def test_half_precision_learns_what_fp32_does(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short form of benchmarks/precision.py: means of ten iterations stay within bounds."""
    monkeypatch.setattr(matmul, "cpu_features", frozenset)  # products by way of fp32
    curves = {}
    flags = ("--train-iters", 40, "--log-interval", 40, "--hidden-dropout", 0)
    flags += ("--attention-dropout", 0)
    for name, (words, _) in {"fp32": ((), 0.0), **HALVES}.items():
        assert run(*flags, *words, "--metrics-file", f"{name}.jsonl") == 0
        losses = [row["lm_loss"] for row in rows(f"{name}.jsonl")]
        curves[name] = np.array(losses).reshape(4, 10).mean(1)
    assert curves["fp32"][-1] < 0.9 * curves["fp32"][0]
    for name, (_, bound) in HALVES.items():
        assert curves[name] == pytest.approx(curves["fp32"], rel=bound)


def test_fp16_resumes_across_overflows(
    run: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    """The scale doubles after each step, so overflows come again and again."""
    flags = ("--fp16", "--initial-loss-scale", 2**21, "--loss-scale-window", 1, "--hysteresis", 1)
    flags += ("--train-iters", 12, "--log-interval", 6)
    assert run(*flags, "--save", "straight") == 0
    out = capfd.readouterr().out
    assert run(*flags, "--save", "save", "--exit-interval", 6) == 0
    assert run(*flags, "--save", "save", "--load", "save") == 0
    found = [same(row) for row in rows()]
    assert found[:12] == found[12:]
    for half in (found[:6], found[6:12]):
        skipped = sum(row["skipped"] for row in half)
        assert 0 < skipped < 6 and not any(row["nan"] for row in half)
        assert f"loss scale: {half[-1]['loss_scale']:.1f} |" in out
        assert f"number of skipped iterations: {skipped:3d} | number of nan iterations:   0" in out
    assert found[11]["consumed_samples"] == 48
    straight, resumed = tensors("straight/iter_0000012"), tensors("save/iter_0000012")
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(x, resumed[key]) for key, x in straight.items())
    facts = [read_index(Path(f"{name}/iter_0000012")).facts for name in ("straight", "save")]
    assert facts[0]["optimizer"] == facts[1]["optimizer"]
    trained = sum(not row["skipped"] for row in found[:12])
    assert facts[0]["optimizer"]["step"] == trained
    assert facts[0]["optimizer"]["loss_scale"]["scale"] == found[11]["loss_scale"]


def test_fp16_that_overflows_at_the_smallest_scale_ends_the_run(
    run: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    scale = ("--initial-loss-scale", 2**40, "--min-loss-scale", 2**38, "--hysteresis", 1)
    assert run("--fp16", *scale, "--train-iters", 9) == 1
    assert "iteration 3: gradient norm is" in capfd.readouterr().err
    assert [row["loss_scale"] for row in rows()] == [2**39, 2**38]
    # What the message says instead:
    assert run("--fp16", *scale, "--train-iters", 4, "--skip-non-finite-iterations", 2) == 0
    assert [row["nan"] for row in rows()[2:]] == [False, False, True, True]


def test_a_cyclic_order_and_a_length_in_samples(run: Callable[..., int]) -> None:
    flags = ("--dataloader-type", "cyclic", "--train-samples", 20, "--lr-warmup-samples", 8)
    assert run(*flags) == 0
    assert [row["consumed_samples"] for row in rows()] == [4, 8, 12, 16, 20]
    rates = [row["learning_rate"] for row in rows()]
    assert rates[:3] == pytest.approx([0.0, 0.005, 0.01])


def test_a_corpus_of_which_no_token_counts_is_warned_of(
    run: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "ends"), np.uint16)
    for _ in range(300):
        builder.add_document([VOCABULARY] * 5, [5])
    builder.finalize()
    words = ("--data-path", tmp_path / "ends", "--eod-mask-loss", "--train-iters", 4)
    assert run(*words, "--log-interval", 2) == 0
    out = capfd.readouterr().out
    assert re.findall(r"warning: no token of iteration (\d+) counts", out) == ["1", "3"]
    assert "lm loss" not in out and out.count("number of skipped iterations:   2 |") == 2
    assert [row["lm_loss"] for row in rows()] == [None] * 4


@pytest.mark.parametrize(
    ("flag", "place"),
    [
        ("--save", "/proc/x"),
        ("--save", "/dev/null"),
        ("--save", "file"),
        ("--save", "tracked"),
        ("--metrics-file", "."),
        ("--metrics-file", "/proc/x/metrics"),
        ("--tensorboard-dir", "/proc/x"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_any_work(
    run: Callable[..., int], flag: str, place: str
) -> None:
    Path("file").touch()
    Path("tracked", "latest_checkpointed_iteration.txt").mkdir(parents=True)
    with pytest.raises(UserError, match=f"^{flag} {re.escape(place)}"):
        run("--train-iters", 2, flag, place)
    assert not Path("metrics.jsonl").exists()


def test_activations_are_counted_in_the_iterations_that_are_reported(
    run: Callable[..., int],
) -> None:
    """As planned, but for a twentieth, and without a trace in any number."""
    assert run("--train-iters", 3) == 0
    plain = [row["lm_loss"] for row in rows()]
    Path("metrics.jsonl").unlink()
    assert run("--train-iters", 3, "--log-memory-interval", 2) == 0
    training = [row for row in rows() if "lm_loss" in row]
    assert [row["lm_loss"] for row in training] == plain
    (reported,) = [row for row in rows() if "measured_bytes" in row]
    planned = reported["planned_bytes"]["activations"]
    assert reported["measured_bytes"]["activations"] == pytest.approx(planned, rel=0.05)
