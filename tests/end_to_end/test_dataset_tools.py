"""tools/merge_datasets.py and tools/inspect_dataset.py."""

import json
import struct
from pathlib import Path

import pytest

from megatron.core.datasets.indexed import IndexedDataset, IndexedDatasetBuilder
from megatron.core.utils import UserError
from tools import inspect_dataset, merge_datasets


def build(prefix: Path, documents: list[list[int]], fingerprint: str = "", dtype="uint16") -> Path:
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add_document(document)
        builder.finalize()
    if fingerprint:
        note = {"tokenizer": {"type": "T", "fingerprint": fingerprint, "vocab_size": 300}}
        note |= {"append_eod": True, "documents": len(documents), "tokens": 7}
        Path(f"{prefix}.json").write_text(json.dumps(note))
    return prefix


def sequences_of(prefix: Path) -> list[list[int]]:
    data = IndexedDataset(prefix)
    return [data.get(i).tolist() for i in range(len(data))]


def merge(*words: object) -> int:
    return merge_datasets.main([str(word) for word in words])


def inspect(*words: object) -> int:
    return inspect_dataset.main([str(word) for word in words])


def test_idx_01_merging_keeps_documents_and_boundaries(tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    build(parts / "b", [[6], [7, 8]], "f")
    build(parts / "a", [[1, 2], [3], [4, 5]], "f")
    merge("--input", parts, "--output-prefix", tmp_path / "all")
    assert sequences_of(tmp_path / "all") == [[1, 2], [3], [4, 5], [6], [7, 8]]
    assert IndexedDataset(tmp_path / "all").document_indices.tolist() == [0, 1, 2, 3, 4, 5]
    note = json.loads((tmp_path / "all.json").read_text())
    assert note["tokenizer"]["fingerprint"] == "f"
    assert note["documents"] == 5
    merge("--datasets", parts / "b.bin", parts / "a", "--output-prefix", tmp_path / "two")
    assert sequences_of(tmp_path / "two") == [[6], [7, 8], [1, 2], [3], [4, 5]]


def test_what_does_not_belong_together_is_not_merged(tmp_path: Path) -> None:
    build(tmp_path / "a", [[1]], "f")
    build(tmp_path / "b", [[2]], "g")
    build(tmp_path / "wide", [[3]], dtype="int32")
    build(tmp_path / "plain", [[4]])
    out = ["--output-prefix", tmp_path / "all"]
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"a was made with T .*/b with T .*--mix-tokenizers"):
        merge("--input", tmp_path / "a", tmp_path / "b", *out)
    with pytest.raises(UserError, match="uint16 tokens but .*wide.idx int32"):
        merge("--input", tmp_path / "a", tmp_path / "wide", *out)
    with pytest.raises(UserError, match="is one of the inputs"):
        merge("--input", tmp_path / "a", tmp_path / "all", *out)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no .bin/.idx pair"):
        merge("--input", tmp_path / "empty", *out)
    (tmp_path / "empty").rmdir()
    assert sorted(tmp_path.iterdir()) == before
    merge("--input", tmp_path / "a", tmp_path / "b", *out, "--mix-tokenizers")
    assert not (tmp_path / "all.json").exists()
    merge("--input", tmp_path / "a", tmp_path / "plain", *out)
    assert sequences_of(tmp_path / "all") == [[1], [4]]
    assert not (tmp_path / "all.json").exists()


def test_pairs_whose_tokenizers_differ_in_sentinels_are_merged(tmp_path: Path) -> None:
    """No text is encoded to sentinels: a note without them holds for all parts."""
    notes = {
        "old": {"fingerprint": "plain"},
        "few": {"fingerprint": "few", "without_sentinels": "plain"},
        "many": {"fingerprint": "many", "without_sentinels": "plain"},
        "other": {"fingerprint": "else", "without_sentinels": "else"},
    }
    for name, note in notes.items():
        build(tmp_path / name, [[1]], note["fingerprint"])
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer": note}))
    out = ["--output-prefix", tmp_path / "all"]
    merge("--input", tmp_path / "old", tmp_path / "few", tmp_path / "many", *out)
    note = json.loads((tmp_path / "all.json").read_text())
    assert note["tokenizer"]["without_sentinels"] == "plain"
    assert note["documents"] == 3
    with pytest.raises(UserError, match="--mix-tokenizers"):
        merge("--input", tmp_path / "few", tmp_path / "other", *out)


def test_a_pair_is_described(tmp_path: Path, capsys) -> None:
    build(tmp_path / "a", [[1, 2, 3], [4]], "f")
    assert inspect(tmp_path / "a", "--verify") == 0
    out = capsys.readouterr().out
    assert "tokens        4 (4), uint16" in out
    assert "documents     2" in out
    assert "lengths       1 to 3, median 2, mean 2.0" in out
    assert "T, 300 ids" in out
    assert "sound, largest id 4" in out


def test_documents_are_printed_as_ids_or_text(tmp_path: Path, capsys) -> None:
    build(tmp_path / "a", [list(b"hello"), list(b"bye") + [256]])
    inspect(tmp_path / "a", "--documents", 0, "--max-tokens", 2)
    out = capsys.readouterr().out
    assert "--- document 0: 1 sequences, 5 tokens\n104 101\n... (3 tokens more" in out
    inspect(tmp_path / "a", "--documents", -1, "--tokenizer-type", "ByteLevelTokenizer")
    assert "--- document 1: 1 sequences, 4 tokens\nbye<eod>\n" in capsys.readouterr().out
    with pytest.raises(UserError, match="has 2 documents"):
        inspect(tmp_path / "a", "--documents", 2)


def test_idx_07_a_wrong_last_boundary_is_reported_and_mended(tmp_path: Path, capsys) -> None:
    prefix = build(tmp_path / "a", [[1, 2], [3], [4, 5]])
    path = tmp_path / "a.idx"
    sound = path.read_bytes()
    path.write_bytes(sound[:-8] + struct.pack("<q", 7))
    with pytest.raises(UserError, match=r"a\.idx: the last document boundary is 7.* 3 sequences"):
        inspect(prefix, "--verify")
    assert "DAMAGED" in capsys.readouterr().out
    inspect(prefix, "--repair", "--verify")
    assert "the last was 7, now 3" in capsys.readouterr().out
    assert path.read_bytes() == sound
    assert (tmp_path / "a.idx.orig").read_bytes()[-8:] == struct.pack("<q", 7)
    inspect(prefix, "--repair")
    assert "nothing to mend" in capsys.readouterr().out


def test_boundaries_that_a_merge_forgot_are_mended(tmp_path: Path) -> None:
    """Lengths of five documents with the boundaries of three: the rest is one document each."""
    prefix = build(tmp_path / "a", [[1], [2], [3], [4], [5]])
    path = tmp_path / "a.idx"
    sound = path.read_bytes()
    cut = bytearray(sound[:-16])
    cut[26:34] = struct.pack("<Q", 4)
    path.write_bytes(bytes(cut))
    inspect(prefix, "--repair")
    assert path.read_bytes() == sound


def test_wrong_offsets_are_mended(tmp_path: Path) -> None:
    prefix = build(tmp_path / "a", [[1, 2], [3], [4, 5]])
    path = tmp_path / "a.idx"
    sound = path.read_bytes()
    offsets = 34 + 3 * 4
    path.write_bytes(sound[: offsets + 8] + struct.pack("<q", -4) + sound[offsets + 16 :])
    with pytest.raises(UserError, match="1 byte offsets .* first of sequence 1: -4, not 4"):
        inspect(prefix, "--verify")
    inspect(prefix, "--repair")
    assert path.read_bytes() == sound


def test_a_cut_token_file_loses_its_last_sequence_only(tmp_path: Path) -> None:
    prefix = build(tmp_path / "a", [[1, 2], [3], [4, 5]])
    (tmp_path / "a.bin").write_bytes((tmp_path / "a.bin").read_bytes()[:-2])
    with pytest.raises(UserError, match="8 bytes, but"):
        inspect(prefix, "--verify")
    inspect(prefix, "--repair", "--verify")
    assert sequences_of(prefix) == [[1, 2], [3]]


def test_ids_outside_the_vocabulary_are_found(tmp_path: Path) -> None:
    prefix = build(tmp_path / "a", [[1, 2], [3, 300], [4]], "f")
    with pytest.raises(UserError, match="token id 300 in sequence 1 .* vocabulary of 300"):
        inspect(prefix, "--verify")


def test_what_cannot_be_mended_is_refused(tmp_path: Path) -> None:
    prefix = build(tmp_path / "a", [[1, 2], [3]])
    (tmp_path / "a.bin").write_bytes(bytes(100))
    with pytest.raises(UserError, match="build the pair again"):
        inspect(prefix, "--repair")
    (tmp_path / "a.bin").unlink()
    with pytest.raises(UserError, match="does not exist"):
        inspect(prefix, "--repair")
