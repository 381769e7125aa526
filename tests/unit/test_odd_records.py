"""Files in the place of those that checkpoints are found and guarded by: none is waited for."""

import json
import os
import time
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import catalog, format, lease, local, writer
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.dist_checkpointing.lease import Lease
from tests.unit.checkpoint_files import WORLD, planned, write

NESTED = "[" * 100_000


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_is_no_record_of_a_run(tmp_path: Path, kind: str) -> None:
    path = tmp_path / writer.RECORD
    if kind == "link":
        path.symlink_to("/nonexistent/record")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(OSError, match="writer.json"):
        Lease(tmp_path)


@pytest.mark.parametrize(
    "change", [{"pid": float("inf")}, {"since": 1e300}, {"since": float("nan")}, {"host": None}]
)
def test_a_record_with_impossible_values_names_nobody(change: dict[str, object]) -> None:
    whole = json.loads(writer.this_process().text)
    assert writer.parse(json.dumps(whole)) == writer.this_process().__class__(**whole)
    found = writer.parse(json.dumps({**whole, **change}))
    assert found is None or str(found)
    assert writer.parse(NESTED) is None


def test_a_record_from_the_future_is_watched_no_longer_than_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "STALE", 0.5)
    (tmp_path / writer.RECORD).write_text("{}")
    later = time.time() + 3600
    os.utime(tmp_path / writer.RECORD, (later, later))
    lines: list[str] = []
    Lease(tmp_path, say=lines.append).release()
    assert any("looking for up to 0 s" in line for line in lines)


@pytest.mark.parametrize("text", [NESTED, "\udcff"])
def test_an_index_that_cannot_be_parsed_is_ignored_by_name(tmp_path: Path, text: str) -> None:
    write(tmp_path / "iter_0000010", planned(), {"iteration": 10})
    path = tmp_path / "iter_0000020" / format.INDEX
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    held = catalog.scan(tmp_path)
    assert [found.name for found in held.complete] == [10]
    assert str(path) in held.ignored[path.parent]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0b", "a\udc80"])
def test_names_that_no_file_has_are_refused(name: str) -> None:
    text = format.Index(files={name: 1}).text()
    with pytest.raises(CheckpointError, match="outside of its folder"):
        format.parse_index(text, "here")


def test_an_index_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "iter_0000010").mkdir()
    os.mkfifo(tmp_path / "iter_0000010" / format.INDEX)
    assert "is no file" in catalog.scan(tmp_path).ignored[tmp_path / "iter_0000010"]


@pytest.mark.parametrize("text", ["9" * 5000, "²"])
def test_a_tracker_that_is_no_number_that_could_be_one(tmp_path: Path, text: str) -> None:
    (tmp_path / catalog.TRACKER).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match="instead of an iteration"):
        catalog.read_tracker(tmp_path)


@pytest.mark.parametrize("data", [b"\xff", NESTED.encode()])
def test_a_part_that_is_no_text_is_as_if_it_were_not_there(tmp_path: Path, data: bytes) -> None:
    folder = tmp_path / "iter_0000002-0123456789ab"
    folder.mkdir()
    (folder / "rank00000.json").write_bytes(data)
    found, ignored = local.find_local(tmp_path, WORLD)
    assert found is None and "the part of rank 0" in ignored[folder.name]
