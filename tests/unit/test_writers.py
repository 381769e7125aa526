"""Two writers of one folder of checkpoints: nothing mixes, the second is told of the first."""

import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing import catalog, lease, publishing, save, writer
from megatron.core.dist_checkpointing.lease import Lease, LostError
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.utils import UserError
from megatron.training.checkpoints.save import save_checkpoint
from tests.unit.checkpoint_files import WORLD, item
from tests.unit.checkpoint_runs import Run

Start = Callable[..., tuple[BaseProcess, Connection]]


@pytest.fixture(autouse=True, scope="module")
def _import_once() -> None:
    """Let processes be forked from one that has imported torch, unless there is one already."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])


@pytest.fixture
def start() -> Iterator[Start]:
    """Start processes that are killed at the end of a test."""
    context, begun = multiprocessing.get_context("forkserver"), list[BaseProcess]()

    def starting(target: Callable[..., None], *words: Any) -> tuple[BaseProcess, Connection]:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *words))
        process.start()
        begun.append(process)
        return process, ours

    yield starting
    for process in begun:
        process.kill()
        process.join()


def heard(line: Connection) -> Any:
    assert line.poll(120)
    return line.recv()


def kill(process: BaseProcess) -> None:
    """Kill a process at once, as the end of a machine does."""
    process.kill()
    process.join()


# Without any protection but the folders' names


def _saves(line: Connection, root: Path, value: int, iterations: int) -> None:
    torch.set_num_threads(1)
    tensor = torch.full((200_000,), value, dtype=torch.int32)
    line.send("ready")
    line.recv()
    done = 0
    for iteration in range(1, iterations + 1):
        catalog.clear(root)
        final = root / catalog.folder_name(iteration % 3)
        save.save([item("a", tensor), item("b", tensor[::3])], final, {}, WORLD)
        done += 1
    line.send(done)


def check_unmixed(root: Path) -> None:
    """Each checkpoint is whole, and of one writer."""
    found = catalog.scan(root)
    assert found.complete
    for one in found.complete:
        with Checkpoint(one.folder) as checkpoint:
            assert checkpoint.damages() == []
            a, b = checkpoint.read("a"), checkpoint.read("b")
        assert a.unique().tolist() == b.unique().tolist() and len(a.unique()) == 1


@pytest.mark.parametrize("killed", [False, True])
def test_two_that_write_the_same_checkpoints_at_once_never_mix(
    tmp_path: Path, start: Start, killed: bool
) -> None:
    older = tmp_path / "iter_0000099"
    save.save([item("a", torch.ones(9)), item("b", torch.ones(3))], older, {}, WORLD)
    (one, line), (_, other) = (start(_saves, tmp_path, value, 40) for value in (1, 2))
    for each in (line, other):
        assert heard(each) == "ready"
    for each in (line, other):
        each.send("go")
    if killed:
        while not list(tmp_path.glob(f"*{publishing.PARTIAL}")):
            time.sleep(0.001)
        time.sleep(0.05)
        kill(one)
    counts = [heard(other)] if killed else [heard(line), heard(other)]
    assert all(count == 40 for count in counts)  # no save fails because of the other's
    check_unmixed(tmp_path)
    catalog.clear(tmp_path)
    assert older.is_dir() and not catalog.scan(tmp_path).unfinished


def _fills(line: Connection, partial: Path) -> None:
    publishing.make_partial(partial)
    line.send("made")
    line.recv()


def test_a_folder_that_somebody_fills_is_left_alone_until_he_dies(
    tmp_path: Path, start: Start
) -> None:
    partial = publishing.partial_of(tmp_path / "iter_0000005", "0a0a0a0a")
    process, line = start(_fills, partial)
    assert heard(line) == "made"
    assert catalog.clear(tmp_path) == [partial] and partial.is_dir()
    with pytest.raises(FileExistsError):  # nor may anybody else have it
        publishing.make_partial(partial)
    kill(process)
    assert catalog.clear(tmp_path) == [] and not partial.exists()


def _stops_at(line: Connection, step: str, partial: Path, final: Path) -> None:
    """Publish a folder; wait for a word before a step of it."""
    module: Any = {"sign": writer, "rename": os}[step]
    act = getattr(module, step)

    def waiting(*words: Any) -> Any:
        line.send(step)
        line.recv()
        return act(*words)

    setattr(module, step, waiting)
    publishing.make_partial(partial)
    publishing.put_in_place(partial, final)
    line.send("done")


@pytest.mark.parametrize("step", ["sign", "rename"])
def test_a_folder_is_its_writers_from_its_making_until_it_is_in_place(
    tmp_path: Path, start: Start, step: str
) -> None:
    final = tmp_path / "iter_0000005"
    partial = publishing.partial_of(final, "0a0a0a0a")
    _, line = start(_stops_at, step, partial, final)
    assert heard(line) == step
    assert catalog.clear(tmp_path) == [partial] and partial.is_dir()
    line.send("go")
    assert heard(line) == "done"
    assert final.is_dir() and list(final.iterdir()) == []  # the name of the writer is gone


def test_a_folder_whose_record_nobody_can_read_is_left_alone_while_it_changes(
    tmp_path: Path,
) -> None:
    partial = publishing.partial_of(tmp_path / "iter_0000005", "0a0a0a0a")
    (partial / writer.RECORD).mkdir(parents=True)
    assert catalog.clear(tmp_path) == [partial]
    past = time.time() - 2 * publishing.PATIENCE
    for path in (partial / writer.RECORD, partial):
        os.utime(path, (past, past))
    assert catalog.clear(tmp_path) == [] and not partial.exists()


def test_a_folder_that_is_put_in_place_while_others_look_is_no_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = publishing.partial_of(tmp_path / "iter_0000005", "0a0a0a0a")
    publishing.make_partial(partial)

    def looked(folder: Path) -> writer.Writer:
        os.rename(folder, tmp_path / "iter_0000005")
        return elsewhere()

    monkeypatch.setattr(writer, "_signature", looked)
    assert catalog.clear(tmp_path) == []
    assert (tmp_path / "iter_0000005" / writer.RECORD).exists()


def test_one_on_another_machine_is_given_up_when_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = publishing.partial_of(tmp_path / "iter_0000005", "0a0a0a0a")
    publishing.make_partial(partial)
    far = elsewhere(job="torchrun's job 7")
    (partial / writer.RECORD).write_text(far.text)
    (partial / "rank00000.bin").touch()
    past = time.time() - 2 * publishing.PATIENCE
    for path in (partial, partial / writer.RECORD):
        os.utime(path, (past, past))
    assert catalog.clear(tmp_path) == [partial]  # it writes its file
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")  # a name that another job may have too
    assert catalog.clear(tmp_path) == [partial]
    os.utime(partial / "rank00000.bin", (past, past))
    assert catalog.clear(tmp_path) == [] and not partial.exists()


# One run at a time


def elsewhere(**changes: Any) -> writer.Writer:
    """Return the record of a process on another machine."""
    mine = writer.this_process()
    return dataclasses.replace(mine, host="far", machine="another", **changes)


def _owns(line: Connection, folder: Path) -> None:
    held = Lease(folder)
    line.send(os.getpid())
    line.recv()
    held.release()
    line.send("released")
    line.recv()


def test_the_second_is_refused_until_the_first_is_dead(tmp_path: Path, start: Start) -> None:
    process, line = start(_owns, tmp_path)
    number = heard(line)
    with pytest.raises(UserError, match=rf"--save \({tmp_path}\).*process {number} on .*remove"):
        Lease(tmp_path)
    kill(process)
    said: list[str] = []
    begin = time.monotonic()
    held = Lease(tmp_path, say=said.append)
    assert time.monotonic() - begin < lease.BEAT  # a restart does not wait
    assert len(said) == 1 and f"process {number}" in said[0] and "has ended" in said[0]
    held.check()
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_the_second_may_follow_when_the_first_has_ended(tmp_path: Path, start: Start) -> None:
    _, line = start(_owns, tmp_path)
    heard(line)
    line.send("end")
    assert heard(line) == "released"
    said: list[str] = []
    Lease(tmp_path, say=said.append).release()
    Lease(tmp_path, say=said.append).release()
    assert said == []


def test_a_number_that_is_used_again_is_not_the_process(tmp_path: Path) -> None:
    gone = dataclasses.replace(writer.this_process(), started="1")
    (tmp_path / writer.RECORD).write_text(gone.text)
    Lease(tmp_path).release()


def test_one_that_was_killed_and_that_nobody_has_waited_for_is_dead() -> None:
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    record = dataclasses.replace(
        writer.this_process(), pid=child, started=str(writer._start_of(child))
    )
    assert record.runs is True
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert record.runs is False
    os.waitpid(child, 0)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> float:
    """Have signs of life, and patience with them, in a test's time."""
    monkeypatch.setattr(lease, "BEAT", 0.05)
    monkeypatch.setattr(lease, "STALE", 1.5)
    return 1.5


@pytest.mark.usefixtures("soon")
def test_one_on_another_machine_is_refused_while_it_shows_life(tmp_path: Path) -> None:
    record = tmp_path / writer.RECORD
    record.write_text(elsewhere(pid=1234).text)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.1):
            os.utime(record)

    thread = threading.Thread(target=beat)
    thread.start()
    said: list[str] = []
    try:
        with pytest.raises(UserError, match="process 1234 on far"):
            Lease(tmp_path, say=said.append)
    finally:
        ended.set()
        thread.join()
    assert "whether it lives" in said[0]


def test_one_on_another_machine_is_followed_when_it_is_quiet(tmp_path: Path, soon: float) -> None:
    record = tmp_path / writer.RECORD
    record.write_text(elsewhere().text)
    begin = time.monotonic()
    Lease(tmp_path).release()
    assert time.monotonic() - begin > soon - 0.5
    record.write_text(elsewhere().text)
    past = time.time() - 60
    os.utime(record, (past, past))
    begin = time.monotonic()
    Lease(tmp_path).release()
    assert time.monotonic() - begin < soon  # it has been quiet for long


@pytest.fixture
def same_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the record of a process on another machine, of a job with this one's name."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job42")
    record = tmp_path / writer.RECORD
    record.write_text(elsewhere(pid=1234, job="torchrun's job job42").text)
    return record


def beating(record: Path, ended: threading.Event, times: int) -> threading.Thread:
    """Return a thread that gives signs of life."""

    def beat() -> None:
        for number in range(times):
            if ended.wait(0.1):
                return
            os.utime(record, (time.time(), time.time() + number))

    thread = threading.Thread(target=beat)
    thread.start()
    return thread


@pytest.mark.parametrize("signs", [0, 1])
def test_a_job_that_is_started_anew_on_another_machine_waits_for_two_beats(
    tmp_path: Path, same_job: Path, monkeypatch: pytest.MonkeyPatch, signs: int
) -> None:
    """A process that its launcher is just ending may show life once more."""
    monkeypatch.setattr(lease, "BEAT", 0.5)
    thread = beating(same_job, threading.Event(), signs)
    said: list[str] = []
    begin = time.monotonic()
    held = Lease(tmp_path, say=said.append)
    assert 1.0 <= time.monotonic() - begin < lease.STALE / 2
    thread.join()
    held.check()
    held.release()
    assert "process 1234 on far" in said[0] and "looking for up to 1 s" in said[0]


def test_another_job_of_the_same_name_is_refused_while_it_lives(
    tmp_path: Path, same_job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "BEAT", 1.0)
    ended = threading.Event()
    thread = beating(same_job, ended, 1000)
    try:
        with pytest.raises(UserError, match=r"process 1234 on far.*one name \(--rdzv-id\)"):
            Lease(tmp_path)
    finally:
        ended.set()
        thread.join()


@pytest.mark.usefixtures("soon")
def test_signs_of_life_are_given_while_it_is_held(tmp_path: Path) -> None:
    held = Lease(tmp_path)
    past = time.time() - 60
    os.utime(tmp_path / writer.RECORD, (past, past))
    end = time.monotonic() + 60
    while (tmp_path / writer.RECORD).stat().st_mtime < past + 30:
        assert time.monotonic() < end
        time.sleep(0.02)
    held.release()


def _races(line: Connection, folder: Path) -> None:
    line.send("ready")
    line.recv()
    try:
        held = Lease(folder)
        time.sleep(0.2)
        held.check()
    except (UserError, LostError) as error:
        line.send(type(error).__name__)
    else:
        line.send("held")
    line.recv()


def test_of_several_that_start_at_once_one_has_it(tmp_path: Path, start: Start) -> None:
    gone = dataclasses.replace(writer.this_process(), started="1")
    (tmp_path / writer.RECORD).write_text(gone.text)
    lines = [start(_races, tmp_path)[1] for _ in range(4)]
    for line in lines:
        assert heard(line) == "ready"
    for line in lines:
        line.send("go")
    assert sorted(heard(line) for line in lines).count("held") == 1


def test_a_record_that_was_removed_by_hand_comes_back(tmp_path: Path) -> None:
    held = Lease(tmp_path / "save")
    (tmp_path / "save" / writer.RECORD).unlink()
    held.check()
    assert writer.parse((tmp_path / "save" / writer.RECORD).read_text()) is not None
    held.check()
    held.release()


def test_a_record_that_could_not_be_written_leaves_nothing_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    held = Lease(tmp_path)
    (tmp_path / writer.RECORD).unlink()
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            held.check()
    assert list(tmp_path.iterdir()) == [] and len(os.listdir("/proc/self/fd")) == before
    held.check()
    held.release()


def test_a_record_that_never_was_whole_is_made_anew(tmp_path: Path) -> None:
    """As it stays behind when not even the removal of a failed one works."""
    held = Lease(tmp_path)
    (tmp_path / writer.RECORD).unlink()
    (tmp_path / writer.RECORD).touch()
    with pytest.raises(LostError, match="another run"):
        held.check()  # somebody may just be writing it
    past = time.time() - 2 * lease.STALE
    os.utime(tmp_path / writer.RECORD, (past, past))
    held.check()
    held.check()
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_who_has_lost_the_folder_saves_no_more(tmp_path: Path) -> None:
    run = Run(tmp_path).train(1)
    run.save()
    held = Lease(tmp_path)
    other = elsewhere(pid=77)
    (tmp_path / writer.RECORD).write_text(other.text)
    run.train(2)
    saved = save_checkpoint(dataclasses.replace(run.as_saved, lease=held), run.state)
    assert saved.folder is None and "now saved to by process 77 on far" in run.lines[-1]
    assert catalog.read_tracker(tmp_path) == 1
    assert [one.name for one in catalog.scan(tmp_path).complete] == [1]
    held.release()
    assert (tmp_path / writer.RECORD).read_text() == other.text
