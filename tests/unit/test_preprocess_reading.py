"""Blocks and records: no cut changes a record, and every bad one has its place and reason."""

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.preprocess.encode import Encoder
from megatron.core.datasets.preprocess.reading import Block, lines_before, read_blocks
from megatron.core.datasets.preprocess.records import Parser, Problem, Record
from megatron.core.datasets.preprocess.sentences import simple_splitter
from megatron.core.datasets.preprocess.sources import find_sources, share, whole
from megatron.core.datasets.preprocess.workers import encode_blocks
from megatron.core.utils import UserError


def blocks_of(path: Path, block_bytes: int = 16, limit: int = 1000, txt: str = "file", **kwargs):
    source = find_sources([str(path)], **kwargs)
    span = whole(source)[0]
    return list(
        read_blocks(span, txt_documents=txt, keys=("text",), limit=limit, block_bytes=block_bytes)
    )


def items_of(path: Path, block_bytes: int = 16, limit: int = 1000, txt: str = "file"):
    parser = Parser(("text",), limit)
    return [
        item for block in blocks_of(path, block_bytes, limit, txt) for item in parser.parse(block)
    ]


def texts_of(path: Path, **kwargs) -> list[tuple[int, str]]:
    items = items_of(path, **kwargs)
    assert all(isinstance(item, Record) for item in items), items
    return [(item.line, item.values[0]) for item in items]


def one(line: bytes, keys: tuple[str, ...] = ("text",), limit: int = 1000) -> Record | Problem:
    (item,) = Parser(keys, limit).parse(Block("corpus.jsonl", "jsonl", line))
    return item


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))),
    block_bytes=st.integers(1, 64),
    newline=st.sampled_from(["\n", "\r\n"]),
    ends=st.booleans(),
)
def test_every_record_survives_any_cut(texts, block_bytes, newline, ends, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("cut") / "c.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    content = newline.join(lines) + (newline if ends else "")
    path.write_bytes(content.encode())
    expected = list(enumerate(texts, 1))
    assert texts_of(path, block_bytes=block_bytes, limit=10_000) == expected


def test_packed_files_give_the_same_records(tmp_path: Path) -> None:
    data = b"".join(b'{"text": "number %d"}\n' % i for i in range(50))
    half = len(data) // 2
    packed = {
        "c.jsonl.gz": gzip.compress(data[:half]) + gzip.compress(data[half:]),
        "c.jsonl.bz2": bz2.compress(data),
        "c.json.xz": lzma.compress(data),
        # Two frames in one file, as parallel compressors write.
        "c.jsonl.zst": zstandard.compress(data[:half]) + zstandard.compress(data[half:]),
    }
    for name, content in packed.items():
        path = tmp_path / name
        path.write_bytes(content)
        expected = [(i + 1, f"number {i}") for i in range(50)]
        assert texts_of(path, block_bytes=100) == expected, name
        path.write_bytes(content[: len(content) - 4])
        with pytest.raises(UserError, match=rf"{name} is cut off or damaged"):
            items_of(path)


def test_blank_lines_and_a_byte_order_mark_are_no_records(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n  \r\n{"text": "b"}\n\n')
    assert texts_of(path) == [(1, "a"), (4, "b")]


def test_plain_text_by_file_paragraph_and_line(tmp_path: Path) -> None:
    path = tmp_path / "c.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\r\n\r\nthree\n\n   \n\nfour\n")
    whole_text = "one\ntwo\n\n\nthree\n\n   \n\nfour\n"
    assert texts_of(path) == [(1, whole_text)]
    for size in (1, 3, 7, 1000):
        paragraphs = texts_of(path, block_bytes=size, txt="paragraphs")
        assert paragraphs == [(1, "one\ntwo"), (5, "three"), (9, "four")]
        lines = texts_of(path, block_bytes=size, txt="lines")
        assert lines == [(1, "one"), (2, "two"), (5, "three"), (9, "four")]


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 10_000])
@pytest.mark.parametrize("txt", ["lines", "paragraphs"])
def test_a_long_record_is_dropped_and_the_next_is_whole(tmp_path, block_bytes, txt) -> None:
    path = tmp_path / "c.txt"
    gap = "\n" if txt == "lines" else "\n\n"
    path.write_text(gap.join(["first", "x" * 500, "second", "y" * 101, "z" * 100]))
    items = items_of(path, block_bytes=block_bytes, limit=100, txt=txt)
    step = len(gap)
    assert [(type(item), item.line) for item in items] == [
        (Record, 1),
        (Problem, 1 + step),
        (Record, 1 + 2 * step),
        (Problem, 1 + 3 * step),
        (Record, 1 + 4 * step),
    ]
    assert items[1].kind == "too-long"
    assert items[2].values == ("second",)


def test_a_long_record_never_lies_in_memory_whole(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"text": "' + b"x" * 100_000 + b'"}\n')
    blocks = blocks_of(path, block_bytes=100, limit=1000)
    assert [block.too_long for block in blocks] == [True] or blocks[0].too_long
    assert max(len(block.data) for block in blocks) <= 1100


@pytest.mark.parametrize(
    ("line", "kind", "says"),
    [
        (b'{"text": "a"', "invalid-json", "delimiter"),
        (b"[", "invalid-json", "jq -c"),
        (b"not json", "invalid-json", "column 1"),
        (b"[" * 100_000, "too-long", "max-record-bytes"),
        (b'{"text": "a\xa3b"}', "invalid-utf8", "0xA3 at byte 12"),
        (b'{"text": "\\ud800"}', "invalid-utf8", "surrogate"),
        (b'{"title": "a", "id": 3}', "missing-key", "'text' is missing .*'title', 'id'"),
        (b"{}", "missing-key", "keys there: none"),
        (b'{"text": 3}', "wrong-type", "a number, not a string"),
        (b'{"text": null}', "wrong-type", "null"),
        (b'{"text": {"a": 1}}', "wrong-type", "an object"),
        (b'{"text": ["a", 3]}', "wrong-type", "lists a number"),
        (b'["a"]', "wrong-type", "a list, not an object.*jq"),
        (b'"a"', "wrong-type", "a string, not an object"),
        (b'{"text": "a\\u0000b"}', "nul-byte", "NUL"),
    ],
)
def test_what_is_wrong_is_said(line: bytes, kind: str, says: str) -> None:
    item = one(line)
    assert isinstance(item, Problem)
    assert item.kind == kind
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(item.text())
    assert item.text().startswith("corpus.jsonl, line 1: ")


def test_deep_nesting_is_a_bad_record_not_a_crash() -> None:
    item = one(b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", limit=10**6)
    assert isinstance(item, Problem)


def test_a_whole_surrogate_pair_is_text() -> None:
    assert one(b'{"text": "\\ud83d\\ude00"}').values == ("\U0001f600",)


def test_utf16_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes('{"text": "a"}\n'.encode("utf-16"))
    first = items_of(path)[0]
    assert "UTF-16" in first.detail


def test_a_file_that_ends_inside_a_line_says_so(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"text": "whole"}\n{"text": "cu')
    whole_record, cut = items_of(path)
    assert whole_record.values == ("whole",)
    assert (cut.line, cut.kind) == (2, "invalid-json")
    assert "ends in the middle of this line" in cut.detail


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(0, 30), max_size=8), min_size=1, max_size=3),
    count=st.integers(1, 9),
)
def test_shares_joined_are_the_input(lengths, count, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("shares")
    paths = []
    for number, sizes in enumerate(lengths):
        path = folder / f"{number}.jsonl"
        path.write_text(
            "".join(json.dumps({"text": f"{i}" * n}) + "\n" for i, n in enumerate(sizes))
        )
        paths.append(str(path))
    sources = find_sources(paths)

    def read(spans) -> list[tuple[str, int, str]]:
        parser = Parser(("text",), 1000)
        found = []
        for span in spans:
            before = lines_before(span)
            for block in read_blocks(
                span, txt_documents="file", keys=("text",), limit=1000, block_bytes=10
            ):
                for item in parser.parse(block):
                    found.append((item_path(block), item.line + before, item.values[0]))
        return found

    def item_path(block: Block) -> str:
        return block.path

    joined = [item for i in range(count) for item in read(share(sources, i, count))]
    assert joined == read(whole(sources))


def test_packed_files_belong_to_one_share(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n'))
    sources = find_sources([str(tmp_path)])
    spans = [span for i in range(7) for span in share(sources, i, 7)]
    assert spans == whole(sources)


def test_inputs_are_found_in_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.txt", "c.parquet", "d.json.gz", "e.md", ".f.jsonl", "deep/g.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    found = find_sources([str(tmp_path)])
    assert [Path(s.path).name for s in found] == [
        "a.txt",
        "b.jsonl",
        "c.parquet",
        "d.json.gz",
        "g.jsonl",
    ]
    assert [s.format for s in found] == ["txt", "jsonl", "parquet", "jsonl", "jsonl"]
    by_glob = find_sources([str(tmp_path / "*.jsonl"), str(tmp_path / "e.md")])
    assert [(Path(s.path).name, s.format) for s in by_glob] == [
        ("b.jsonl", "jsonl"),
        ("e.md", "jsonl"),
    ]
    with pytest.raises(UserError, match="twice"):
        find_sources([str(tmp_path / "b.jsonl"), str(tmp_path)])
    with pytest.raises(UserError, match="no such file"):
        find_sources([str(tmp_path / "missing.jsonl")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no file"):
        find_sources([str(tmp_path / "empty")])


def test_sentences() -> None:
    text = 'Dr. Who met J. Smith at 3.5 p.m. today. "Really?" Yes!  It was e.g. fine.\n\nnew part'
    expected = [
        "Dr. Who met J. Smith at 3.5 p.m. today.",
        '"Really?"',
        "Yes!",
        "It was e.g. fine.",
        "new part",
    ]
    assert simple_splitter(keep_newlines=False)(text) == expected
    assert simple_splitter(False)("今日は。元気？はい") == ["今日は。", "元気？", "はい"]
    assert simple_splitter(False)("  \n ") == []


@given(st.text(st.sampled_from("aB .!?\n\"'。")))
def test_sentences_that_keep_newlines_are_the_text(text: str) -> None:
    assert "".join(simple_splitter(keep_newlines=True)(text)) == text


@pytest.mark.parametrize("workers", [1, 2])
def test_few_blocks_are_under_way(workers: int) -> None:
    """However slowly results are taken, reading stays a few blocks ahead, and order is kept."""
    read = []

    def blocks():
        for i in range(100):
            read.append(i)
            yield Block("c.jsonl", "jsonl", b'{"text": "%d"}\n' % i, first_line=i + 1)

    encoder = Encoder(Numbers(), Parser(("text",), 1000))
    stream = encode_blocks(encoder, blocks(), workers)
    for i, (block, encoded) in enumerate(stream):
        assert len(read) <= i + 2 * workers + 3
        assert (block.first_line, block.data) == (i + 1, b"")
        assert encoded.documents[0].tokens.tolist() == [i]
    assert len(read) == 100


class Numbers:
    """A tokenizer whose text is one id."""

    kind, vocab_size, eod = "Numbers", 100, None

    def encode_batch(self, texts, num_threads=1):
        return [[int(text)] for text in texts]

    def fingerprint(self) -> str:
        return "numbers"

    def without_sentinels(self) -> str:
        return "numbers"
