"""Token files: layout of the bytes, round trips, and every way a pair can be damaged."""

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.indexed import (
    IndexedDataset,
    IndexedDatasetBuilder,
    best_dtype,
    read_index,
    write_index,
)
from megatron.core.utils import UserError

FIXTURES = Path(__file__).resolve().parent.parent / "data" / "mcore_data"


def build(prefix: Path, documents: list[list[list[int]]], dtype: str = "uint16") -> Path:
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for sequences in documents:
            flat = [token for sequence in sequences for token in sequence]
            builder.add_document(flat, [len(sequence) for sequence in sequences])
        builder.finalize()
    return prefix


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return build(tmp_path / "small", [[[1, 2, 3]], [[4], [5, 6]], [[7, 8, 9, 10]]])


def test_the_bytes_are_the_documented_layout(small: Path) -> None:
    assert small.with_suffix(".bin").read_bytes() == struct.pack("<10H", *range(1, 11))
    expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 4, 4)
    expected += struct.pack("<4i", 3, 1, 2, 4) + struct.pack("<4q", 0, 6, 8, 12)
    expected += struct.pack("<4q", 0, 1, 3, 4)
    assert small.with_suffix(".idx").read_bytes() == expected


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_sets_of_megatron_core_are_rewritten_byte_for_byte(name: str, tmp_path: Path) -> None:
    data = IndexedDataset(FIXTURES / name)
    bounds = data.document_indices
    with IndexedDatasetBuilder(tmp_path / "copy", data.dtype) as builder:
        for first, last in zip(bounds, bounds[1:], strict=False):
            parts = [data.get(i) for i in range(first, last)]
            builder.add_document(np.concatenate(parts), [len(part) for part in parts])
        builder.finalize()
    with IndexedDatasetBuilder(tmp_path / "joined", data.dtype) as builder:
        builder.add_index(FIXTURES / name)
        builder.finalize()
    for ending in (".bin", ".idx"):
        original = (FIXTURES / f"{name}{ending}").read_bytes()
        assert (tmp_path / f"copy{ending}").read_bytes() == original
        assert (tmp_path / f"joined{ending}").read_bytes() == original


@pytest.mark.parametrize("mapped", [True, False])
def test_reading(small: Path, mapped: bool) -> None:
    data = IndexedDataset(small, mmap=mapped)
    assert len(data) == 4
    assert data.num_documents == 3
    assert data.num_tokens == 10
    assert data.dtype == np.uint16
    assert [data[i].tolist() for i in range(4)] == [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
    assert data[-1].tolist() == [7, 8, 9, 10]
    assert data.get(3, offset=1).tolist() == [8, 9, 10]
    assert data.get(3, offset=1, length=2).tolist() == [8, 9]
    assert data.get(0, offset=3).tolist() == []
    again = pickle.loads(pickle.dumps(data))
    assert again.get(2).tolist() == [5, 6]
    with pytest.raises(IndexError):
        data.get(4)


def test_a_view_outlives_its_dataset(small: Path) -> None:
    view = IndexedDataset(small).get(3)
    assert view.tolist() == [7, 8, 9, 10]


@settings(max_examples=40, deadline=None)
@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 65535), max_size=5), max_size=3), min_size=1, max_size=8
    ),
    cut=st.integers(0, 8),
)
def test_adding_in_bulk_equals_adding_one_by_one(documents, cut, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("bulk")
    build(folder / "single", documents)
    with IndexedDatasetBuilder(folder / "bulk", "uint16") as builder:
        for group in (documents[:cut], documents[cut:]):
            sequences = [sequence for document in group for sequence in document]
            builder.add_documents(
                np.array([t for s in sequences for t in s], np.uint16),
                [len(s) for s in sequences],
                [len(d) for d in group],
            )
        builder.finalize()
    for ending in (".bin", ".idx"):
        assert (folder / f"bulk{ending}").read_bytes() == (folder / f"single{ending}").read_bytes()


def test_idx_01_joined_sets_keep_every_document(tmp_path: Path) -> None:
    build(tmp_path / "x", [[[1, 2]], [[3]], [[4], [5]]])
    build(tmp_path / "y", [[[6]], [[7, 8]]])
    with IndexedDatasetBuilder(tmp_path / "xy", "uint16") as builder:
        builder.add_index(tmp_path / "x")
        builder.add_index(tmp_path / "y")
        builder.finalize()
    data = IndexedDataset(tmp_path / "xy")
    assert data.document_indices.tolist() == [0, 1, 2, 4, 5, 6]
    assert [data[i].tolist() for i in range(6)] == [[1, 2], [3], [4], [5], [6], [7, 8]]


def test_joining_other_token_types_is_refused(tmp_path: Path) -> None:
    build(tmp_path / "wide", [[[1]]], "int32")
    with IndexedDatasetBuilder(tmp_path / "out", "uint16") as builder:
        with pytest.raises(UserError, match="wide.bin holds int32"):
            builder.add_index(tmp_path / "wide")


def test_idx_02_offsets_pass_32_bits(tmp_path: Path) -> None:
    lengths = np.full(3_000, 2_000_000, np.int32)
    write_index(tmp_path / "big.idx", np.dtype("int32"), lengths, np.arange(3_001))
    index = read_index(tmp_path / "big")
    assert index.sequence_pointers.dtype == np.int64
    assert index.sequence_pointers[-1] == 2_999 * 2_000_000 * 4
    assert (np.diff(index.sequence_pointers) == 8_000_000).all()
    assert index.bin_bytes == 24_000_000_000


def test_offsets_are_right_across_blocks(tmp_path: Path) -> None:
    lengths = np.arange((1 << 20) + 5) % 7
    write_index(tmp_path / "long.idx", np.dtype("uint16"), lengths, [0, len(lengths)])
    pointers = read_index(tmp_path / "long").sequence_pointers
    assert (pointers == 2 * (np.cumsum(lengths) - lengths)).all()


@pytest.mark.parametrize(
    ("vocab_size", "code", "width"), [(65_530, 8, 2), (65_536, 8, 2), (65_537, 4, 4)]
)
def test_idx_04_two_bytes_exactly_when_ids_fit(tmp_path, vocab_size, code, width) -> None:
    largest = min(vocab_size - 1, 65_535)
    with IndexedDatasetBuilder(tmp_path / "d", best_dtype(vocab_size), vocab_size) as builder:
        builder.add_document([0, largest])
        builder.finalize()
    assert (tmp_path / "d.idx").read_bytes()[17] == code
    assert (tmp_path / "d.bin").stat().st_size == 2 * width
    assert IndexedDataset(tmp_path / "d").get(0).tolist() == [0, largest]


@pytest.mark.parametrize(
    ("dtype", "vocab_size", "bad"),
    [("uint16", None, 70_000), ("uint16", None, -1), ("int32", 100, 100), ("int32", 100, -5)],
)
def test_idx_06_an_id_outside_is_refused_by_document(tmp_path, dtype, vocab_size, bad) -> None:
    with IndexedDatasetBuilder(tmp_path / "d", dtype, vocab_size) as builder:
        builder.add_document([1, 2])
        with pytest.raises(UserError, match=rf"document 2 has token id {bad}\b"):
            builder.add_documents([3, 4, bad, 5], [1, 1, 2], [1, 2])
    assert list(tmp_path.iterdir()) == []


def test_idx_07_last_boundary_names_file_and_numbers(small: Path) -> None:
    path = small.with_suffix(".idx")
    path.write_bytes(path.read_bytes()[:-8] + struct.pack("<q", 3))
    with pytest.raises(UserError, match=r"small\.idx: the last document boundary is 3.* 4 seq"):
        IndexedDataset(small)


def test_nothing_is_visible_before_the_end(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "deep" / "d", "uint16") as builder:
        builder.add_document([1])
        builder.seal()
        assert not list(tmp_path.glob("deep/d*"))
        builder.publish()
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["d.bin", "d.idx"]


def test_a_failed_build_keeps_the_old_pair(small: Path) -> None:
    with pytest.raises(RuntimeError), IndexedDatasetBuilder(small, "uint16") as builder:
        builder.add_document([99])
        raise RuntimeError
    assert IndexedDataset(small).get(0).tolist() == [1, 2, 3]
    assert len(list(small.parent.iterdir())) == 2


def test_two_builders_of_one_prefix_do_not_mix(tmp_path: Path) -> None:
    first = IndexedDatasetBuilder(tmp_path / "d", "uint16")
    second = IndexedDatasetBuilder(tmp_path / "d", "uint16")
    first.add_document([1])
    second.add_document([2, 2])
    first.finalize()
    second.finalize()
    assert IndexedDataset(tmp_path / "d").get(0).tolist() == [2, 2]


def spoil(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        changed = {
            "empty": b"",
            "foreign": b"\x93NUMPY" + data,
            "short header": data[:20],
            "cut": data[:-3],
            "longer": data + b"\0\0",
            "version": data[:9] + struct.pack("<Q", 2) + data[17:],
            "type": data[:17] + b"\x09" + data[18:],
        }
        path.write_bytes(changed[how])


@pytest.mark.parametrize(
    ("ending", "how", "says"),
    [
        (".idx", "missing", "does not exist, but .*small.bin does"),
        (".idx", "empty", "is empty"),
        (".idx", "foreign", "not a token index"),
        (".idx", "short header", "cut off: 20 bytes"),
        (".idx", "cut", "cut off or damaged"),
        (".idx", "longer", "cut off or damaged"),
        (".idx", "version", "version 2"),
        (".idx", "type", "type code 9"),
        (".bin", "missing", "does not exist, but its index"),
        (".bin", "empty", "has 0 bytes, but .* describes 20"),
        (".bin", "cut", "has 17 bytes, but .* describes 20"),
        (".bin", "longer", "has 22 bytes, but .* describes 20"),
    ],
)
def test_damage_is_named_by_file(small: Path, ending: str, how: str, says: str) -> None:
    spoil(small.with_suffix(ending), how)
    with pytest.raises(UserError, match=says) as caught:
        IndexedDataset(small)
    assert f"small{ending}" in str(caught.value)


def test_a_set_without_sequences_is_refused(tmp_path: Path) -> None:
    build(tmp_path / "none", [])
    with pytest.raises(UserError, match=r"none\.idx describes an empty data set"):
        IndexedDataset(tmp_path / "none")


def test_modes_of_multimodal_sets_are_skipped(small: Path) -> None:
    path = small.with_suffix(".idx")
    path.write_bytes(path.read_bytes() + bytes(4))
    assert IndexedDataset(small).index.has_modes
    assert IndexedDataset(small).get(1).tolist() == [4]
