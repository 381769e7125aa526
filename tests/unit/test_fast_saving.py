"""Saves by several threads and beside training: the bytes of a plain save, in bounded memory."""

import ctypes
import os
import random
import re
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.core.dist_checkpointing import checksum, format, part, priority, save, staging
from megatron.core.dist_checkpointing.background import BackgroundSave
from megatron.core.dist_checkpointing.config import SpeedConfig
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.dist_checkpointing.save import SaveError
from megatron.core.dist_checkpointing.staging import HostBuffer, stage
from megatron.core.utils import UserError
from tests.unit.checkpoint_files import WORLD, item

CPU = torch.device("cpu")


def made() -> dict[str, Tensor]:
    """Return tensors of every kind of layout in memory."""
    draw = torch.Generator().manual_seed(1)
    wide = torch.randn(6, 900, generator=draw)
    return {
        "plain": torch.randn(37, 11, generator=draw),
        "strided": torch.randn(64, 10, generator=draw)[:, ::2],
        "rows": wide[1:5, 7:801],
        "turned": torch.randn(3, 40, 5, generator=draw).transpose(0, 2),
        "bytes": torch.arange(250, dtype=torch.uint8),
        "half": torch.randn(100, generator=draw).bfloat16(),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
    }


def items(tensors: dict[str, Tensor]) -> list[save.Item]:
    return [item(name, tensor) for name, tensor in tensors.items()]


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "CHUNK", 256)


def test_checksums_of_parts_join_to_that_of_the_whole() -> None:
    draw = random.Random(1)
    for _ in range(50):
        first, second = (draw.randbytes(draw.choice([0, 1, 7, 300, 5000])) for _ in range(2))
        whole = checksum.joined(zlib.crc32(first), zlib.crc32(second), len(second))
        assert whole == zlib.crc32(first + second)


@pytest.mark.usefixtures("small_chunks")
def test_many_chunks_by_many_threads_are_the_bytes_in_order(tmp_path: Path) -> None:
    tensors = made()
    index = part.write(stage(items(tensors)), tmp_path, 3)
    content = (tmp_path / "rank00003.bin").read_bytes()
    assert index.files == {"rank00003.bin": len(content)}
    for name, tensor in tensors.items():
        for box in index.tensors[name].boxes:
            assert content[box.offset : box.offset + tensor.nbytes] == raw(tensor), name
            assert box.crc32 == zlib.crc32(raw(tensor)), name
    assert len(index.tensors["rows"].boxes) == 1 and tensors["rows"].nbytes > 10 * part.CHUNK


def test_copies_use_one_memory_again_and_stay_as_they_were() -> None:
    tensors, buffer = made(), HostBuffer()
    wanted = {name: raw(tensor) for name, tensor in tensors.items()}
    places = []
    for _ in range(3):
        staged = stage(items(tensors), buffer)
        for tensor in tensors.values():
            tensor.zero_()
        for one in staged.items:
            (piece,) = one.pieces or (None,)
            assert piece is None or raw(piece.tensor) == wanted[one.key]
        places.append(staged.items[0].pieces[0].tensor.data_ptr())
        tensors = made()
    assert len(set(places)) == 1
    assert buffer.bytes == staged.bytes == stage(items(tensors)).bytes


@pytest.mark.parametrize("limit", [0, 1500, 6000])
def test_a_limit_bounds_the_memory_and_leaves_the_rest_as_views(limit: int) -> None:
    tensors, buffer = made(), HostBuffer(limit)
    staged = stage(items(tensors), buffer)
    assert buffer.bytes <= limit < staged.bytes
    pieces = [piece for one in staged.items for piece in one.pieces]
    held = [tensor for tensor in tensors.values() if tensor.numel()]
    for number, (piece, tensor) in enumerate(zip(pieces, held, strict=True)):
        is_view = piece.tensor.data_ptr() == tensor.data_ptr()
        assert is_view != (number in staged.copied)
    assert bool(staged.copied) == (limit > 0)


def background(folder: Path, tensors: dict[str, Tensor], buffer: HostBuffer) -> BackgroundSave:
    return BackgroundSave(items(tensors), folder, {"iteration": 1}, WORLD, buffer)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("limit", [None, 3000, 0])
def test_what_changes_after_the_begin_is_not_saved(tmp_path: Path, limit: int | None) -> None:
    expected = save.save(items(made()), tmp_path / "plain", {}, WORLD)
    tensors = made()
    under_way = background(tmp_path / "beside", tensors, HostBuffer(limit))
    under_way.settle()
    for tensor in tensors.values():
        tensor.zero_()
    while not under_way.written(CPU):
        time.sleep(0.01)
    assert not (tmp_path / "beside").exists()
    found = under_way.finish()
    assert found is not None and expected is not None and found.hash == expected.hash
    plain, beside = (tmp_path / name / "rank00000.bin" for name in ("plain", "beside"))
    assert plain.read_bytes() == beside.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["beside", "plain"]


@pytest.mark.parametrize("limit", [None, 0])
def test_a_write_that_fails_beside_training_fails_the_save_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    save.save(items(made()), tmp_path / "good", {}, WORLD)

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    under_way = background(tmp_path / "bad", made(), HostBuffer(limit))
    while not under_way.written(CPU):
        time.sleep(0.01)
    with pytest.raises(SaveError, match="No space left"):
        under_way.finish()
    assert os.listdir(tmp_path) == ["good"]
    with Checkpoint(tmp_path / "good") as checkpoint:
        assert checkpoint.damages() == []


class Gate:
    """Holds every write until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._opened, self._write = threading.Event(), os.pwrite
        patch.setattr(os, "pwrite", self)

    def __call__(self, descriptor: int, data: memoryview, offset: int) -> int:
        assert self._opened.wait(60)
        return self._write(descriptor, data, offset)

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    held = Gate(monkeypatch)
    yield held
    held.open()


def test_what_does_not_fit_the_memory_is_written_before_it_may_change(
    tmp_path: Path, gate: Gate
) -> None:
    under_way = background(tmp_path / "one", made(), HostBuffer(0))
    waiting = threading.Thread(target=under_way.settle)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    gate.open()
    waiting.join(60)
    assert not waiting.is_alive() and under_way.finish() is not None


def unfinished(folder: Path) -> Path:
    """Return the one thing in a folder: a save of ``one`` that has not ended."""
    (found,) = folder.iterdir()
    assert re.fullmatch(r"one\.[0-9a-f]{8}\.partial", found.name)
    return found


def test_nothing_is_published_while_a_thread_writes(tmp_path: Path, gate: Gate) -> None:
    under_way = background(tmp_path / "one", made(), HostBuffer())
    under_way.settle()  # copies are made, none is written
    assert not under_way.written(CPU)
    assert unfinished(tmp_path).is_dir()
    gate.open()
    assert under_way.finish() is not None
    assert os.listdir(tmp_path) == ["one"]


def test_a_save_that_is_given_up_is_no_checkpoint(tmp_path: Path, gate: Gate) -> None:
    tensors = {"large": torch.zeros(8 * format.CHUNK, dtype=torch.uint8)}
    under_way = background(tmp_path / "one", tensors, HostBuffer())
    threading.Timer(0.1, gate.open).start()
    under_way.abandon()
    assert under_way.written(CPU)
    assert "rank00000.done" not in os.listdir(unfinished(tmp_path))


def test_a_save_is_rescued_without_a_word_to_other_ranks(tmp_path: Path) -> None:
    index = background(tmp_path / "one", made(), HostBuffer()).rescue(0.0)
    assert index is not None and os.listdir(tmp_path) == ["one"]
    with Checkpoint(tmp_path / "one") as checkpoint:
        assert checkpoint.damages() == []


def test_a_rescue_without_all_ranks_parts_publishes_nothing(tmp_path: Path) -> None:
    under_way = background(tmp_path / "one", made(), HostBuffer())
    under_way.written(CPU)
    under_way._join()
    os.unlink(unfinished(tmp_path) / part.mark(0))
    with pytest.raises(SaveError, match="no part has come within 0 s from rank 0"):
        under_way.rescue(0.1)
    assert unfinished(tmp_path).is_dir()


@pytest.mark.skipif(
    not priority.settable(), reason="only Linux on a known processor sets those of threads"
)
def test_priorities_are_those_of_the_writing_threads_alone() -> None:
    found: list[tuple[int, int]] = []

    def look() -> None:
        priority.lower_thread(10, 3)
        thread = threading.get_native_id()
        get = {251: 252, 30: 31}[priority._SET_IO_PRIORITY[os.uname().machine]]
        classes = ctypes.CDLL(None).syscall(get, 1, thread) >> 13
        found.append((os.getpriority(os.PRIO_PROCESS, thread), classes))

    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [(10, 3)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    assert priority.refusal(19, 3) is None


@pytest.mark.parametrize(
    ("name", "value"), [("async_save_host_gib", -1.0), ("async_ckpt_cpu_priority", 20)]
)
def test_settings_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')}"):
        SpeedConfig(**{name: value})


def test_staging_alone_does_not_keep_the_state(tmp_path: Path) -> None:
    assert staging.stage(items(made())).copied == frozenset()
