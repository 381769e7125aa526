"""The data tools from the command line: text in, token files out, and nothing half-done."""

import gzip
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from megatron.core.datasets.indexed import IndexedDataset
from megatron.core.utils import UserError
from tests.end_to_end.preprocess_tool import (
    BYTES,
    EOD,
    hugging_face,
    pair_bytes,
    report_of,
    run,
    texts_of,
    tokens_of,
    tree,
    word_tokenizer,
    write_lines,
)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    records = [{"text": f"document {i} " + "word " * (i % 50), "id": i} for i in range(3000)]
    write_lines(folder / "a.jsonl", records[:1000])
    (folder / "b.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps(r) + "\n" for r in records[1000:1200]).encode())
    )
    write_lines(folder / "c.json", records[1200:], ending="\r\n")
    return folder


def test_documents_come_out_as_they_went_in(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "set"
    assert (
        run("--input", corpus, "--output-prefix", out, *BYTES, "--append-eod", "--workers", 2) == 0
    )
    expected = [f"document {i} " + "word " * (i % 50) for i in range(3000)]
    assert texts_of(Path(f"{out}_text_document")) == expected
    assert all(
        ids[-1] == EOD and EOD not in ids[:-1] for ids in tokens_of(Path(f"{out}_text_document"))
    )
    report = report_of(out)
    assert report["records"] == {"read": 3000, "kept": 3000}
    total = sum(len(text) + 1 for text in expected)
    assert report["keys"] == {"text": {"documents": 3000, "sequences": 3000, "tokens": total}}
    names = sorted(path.name for path in out.parent.iterdir())
    assert names == ["set_report.json"] + [f"set_text_document.{e}" for e in ("bin", "idx", "json")]


def test_any_workers_and_partitions_give_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    flags = ["--input", corpus, *BYTES, "--append-eod", "--output-prefix"]
    run(*flags, tmp_path / "w1", "--workers", 1)
    expected = pair_bytes(tmp_path / "w1_text_document")
    for workers, partitions in ((2, 1), (3, 2), (2, 3), (1, 7)):
        prefix = tmp_path / f"w{workers}p{partitions}"
        run(*flags, prefix, "--workers", workers, "--partitions", partitions)
        assert pair_bytes(Path(f"{prefix}_text_document")) == expected
        assert not Path(f"{prefix}_partitions").exists()
        assert report_of(prefix)["records"] == {"read": 3000, "kept": 3000}


def test_pre_03_two_keys_give_two_pairs(tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "c.jsonl",
        [{"title": f"t{i}", "body": f"body {i}"} for i in range(5)] + [{"title": "", "body": "x"}],
    )
    out = tmp_path / "set"
    run("--input", source, "--output-prefix", out, *BYTES, "--json-keys", "title", "body")
    assert texts_of(Path(f"{out}_title_document")) == [f"t{i}" for i in range(5)]
    assert texts_of(Path(f"{out}_body_document")) == [f"body {i}" for i in range(5)] + ["x"]
    # A key that is empty in one record keeps a document there, so that the two stay aligned.
    title, body = (IndexedDataset(f"{out}_{key}_document") for key in ("title", "body"))
    assert title.document_indices.tolist() == [0, 1, 2, 3, 4, 5, 5]
    assert body.document_indices.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_pre_04_a_missing_key_is_named_by_line(tmp_path: Path) -> None:
    records = [{"text": "a"}, {"text": "b"}, {"title": "c"}, {"text": "d"}, {"text": "e"}]
    source = write_lines(tmp_path / "c.jsonl", records)
    before = tree(tmp_path)
    flags = ["--input", source, "--output-prefix", tmp_path / "set", *BYTES, "--workers", 2]
    with pytest.raises(UserError, match=r"c\.jsonl, line 3: the key 'text' is missing"):
        run(*flags)
    assert tree(tmp_path) == before
    assert run(*flags, "--on-error", "skip") == 0
    assert texts_of(tmp_path / "set_text_document") == ["a", "b", "d", "e"]
    skipped = report_of(tmp_path / "set")["skipped"]
    assert skipped["missing-key"]["count"] == 1
    assert "line 3" in skipped["missing-key"]["first"][0]


def test_a_bad_line_deep_inside_a_share_has_its_true_number(tmp_path: Path) -> None:
    records = [{"text": "x" * 50} for _ in range(1000)]
    records[777] = {"other": 1}
    source = write_lines(tmp_path / "c.jsonl", records)
    flags = ["--input", source, "--output-prefix", tmp_path / "set", *BYTES, "--partitions", 3]
    for index in (0, 1):
        run(*flags, "--partition-index", index)
    with pytest.raises(UserError, match=r"c\.jsonl, line 778:"):
        run(*flags, "--partition-index", 2)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["--workers", 0], "--workers"),
        (["--partitions", 0], "--partitions"),
        (["--partitions", 2, "--partition-index", 2], "--partition-index"),
        (["--partition-index", 1], "--partition-index"),
        (["--merge-partitions"], "--merge-partitions"),
        (["--json-keys", "text", "text"], "twice"),
        (["--json-keys", "a/b"], "file name"),
        (["--keep-newlines"], "--split-sentences"),
        (["--tokenizer-type", "NoSuchTokenizer"], "NoSuchTokenizer"),
        (["--output-prefix", "{folder}/"], "is a folder"),
        (["--input", "{folder}/nothing*.jsonl"], "no such file"),
        (["--log-intervall", 3], "log-interval"),
        (["--vocab-size", 100], "100"),
        (["--on-error", "ignore"], "on-error"),
    ],
)
def test_pre_06_flags_are_checked_before_anything_is_written(tmp_path, extra, says) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "a"}])
    before = tree(tmp_path)
    words = [str(word).replace("{folder}", str(tmp_path)) for word in extra]
    with pytest.raises(UserError, match=says):
        run("--input", source, "--output-prefix", tmp_path / "sub" / "set", *BYTES, *words)
    assert tree(tmp_path) == before
    assert not (tmp_path / "sub").exists()


def test_pre_06_workers_need_not_divide_by_partitions(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": t} for t in "abcdefg"])
    flags = ["--input", source, "--output-prefix", tmp_path / "set", *BYTES]
    run(*flags, "--workers", 3, "--partitions", 2)
    assert texts_of(tmp_path / "set_text_document") == list("abcdefg")


def test_the_output_may_not_be_an_input(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "set_text_document.json", [{"text": "a"}])
    with pytest.raises(UserError, match="would overwrite the input"):
        run("--input", source, "--output-prefix", tmp_path / "set", *BYTES)


def test_pre_08_eod_without_an_end_token_is_refused_up_front(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "red blue"}])
    model = word_tokenizer(tmp_path / "tokenizer.json", special=[])
    before = tree(tmp_path)
    flags = ["--input", source, "--output-prefix", tmp_path / "set", *hugging_face(model)]
    with pytest.raises(UserError, match="--append-eod.*HuggingFaceTokenizer.*no end-of-document"):
        run(*flags, "--append-eod")
    assert tree(tmp_path) == before
    run(*flags)
    assert tokens_of(tmp_path / "set_text_document") == [[1, 3]]


def test_pre_09_exactly_one_end_token(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "red blue"}, {"text": "green"}])
    model = word_tokenizer(tmp_path / "tokenizer.json", special=["</s>"], closing="</s>")
    flags = ["--input", source, "--output-prefix", tmp_path / "set", *hugging_face(model)]
    run(*flags, "--append-eod")
    assert tokens_of(tmp_path / "set_text_document") == [[1, 3, 4], [2, 4]]
    run(*flags)
    assert tokens_of(tmp_path / "set_text_document") == [[1, 3], [2]]


def test_pre_10_bad_bytes_and_a_cut_line_are_named(tmp_path: Path) -> None:
    lines = [b'{"text": "one"}', b'{"text": "tw\xa3"}', b'{"text": "three"}', b'{"text": "fo']
    source = tmp_path / "c.jsonl"
    source.write_bytes(b"\n".join(lines))
    before = tree(tmp_path)
    flags = ["--input", source, "--output-prefix", tmp_path / "set", *BYTES, "--workers", 2]
    with pytest.raises(UserError, match=r"c\.jsonl, line 2: not valid UTF-8"):
        run(*flags)
    assert tree(tmp_path) == before
    run(*flags, "--on-error", "skip")
    assert texts_of(tmp_path / "set_text_document") == ["one", "three"]
    skipped = report_of(tmp_path / "set")["skipped"]
    assert {kind: entry["count"] for kind, entry in skipped.items()} == {
        "invalid-utf8": 1,
        "invalid-json": 1,
    }


def test_pre_12_many_distinct_words_do_not_change_ids(tmp_path: Path) -> None:
    """The library's word cache is bounded: words met before and after it is full encode alike."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), 7)) for _ in range(30_000)]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(words[:2000], trainer)
    bpe.save(str(tmp_path / "tokenizer.json"))
    texts = [" ".join(words[i : i + 100]) for i in range(0, len(words), 100)]
    source = write_lines(tmp_path / "c.jsonl", [{"text": text} for text in [*texts, *texts[:3]]])
    flags = hugging_face(tmp_path / "tokenizer.json")
    run("--input", source, "--output-prefix", tmp_path / "set", *flags)
    uncached = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    uncached.model._clear_cache()
    found = tokens_of(tmp_path / "set_text_document")
    for i in (0, 150, 299, 300, 302):
        uncached.model._clear_cache()
        assert found[i] == uncached.encode([*texts, *texts[:3]][i]).ids


def test_pre_13_no_record_kept_is_an_error_with_counts(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": ""}, {"text": ""}])
    before = tree(tmp_path)
    for partitions in (1, 2):
        flags = ["--output-prefix", tmp_path / "set", *BYTES, "--partitions", partitions]
        with pytest.raises(UserError, match=r"2 records read, 0 kept, 2 dropped \(2 empty\)"):
            run("--input", source, *flags)
        assert not list(tmp_path.glob("set_text*"))
    assert {k: v for k, v in tree(tmp_path).items() if "partitions" not in k} == before


def test_pre_13_a_key_that_is_always_empty_is_an_error(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "a", "title": ""}])
    with pytest.raises(UserError, match="'title'.* empty in every record"):
        run(
            "--input",
            source,
            "--output-prefix",
            tmp_path / "s",
            *BYTES,
            "--json-keys",
            "text",
            "title",
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.jsonl"]


def test_empty_texts_are_skipped_and_counted(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "a"}, {"text": ""}, {"text": "b"}])
    run("--input", source, "--output-prefix", tmp_path / "set", *BYTES, "--append-eod")
    assert tokens_of(tmp_path / "set_text_document") == [[97, EOD], [98, EOD]]
    empty = report_of(tmp_path / "set")["skipped"]["empty"]
    assert empty == {"count": 1, "first": [f"{source}, line 2: the text is empty"]}


def test_ten_places_of_each_kind_are_kept_and_all_counted(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "a"}] + [{"no": 1}, {"text": 2}] * 40)
    flags = ["--input", source, "--output-prefix", tmp_path / "set", *BYTES, "--on-error", "skip"]
    run(*flags, "--partitions", 3)
    skipped = report_of(tmp_path / "set")["skipped"]
    for first_line, kind in ((2, "missing-key"), (3, "wrong-type")):
        assert skipped[kind]["count"] == 40
        places = [f"{source}, line {line}:" for line in range(first_line, first_line + 20, 2)]
        found = skipped[kind]["first"]
        assert [f.startswith(p) for f, p in zip(found, places, strict=True)] == [True] * 10


def test_a_text_that_the_tokenizer_refuses_is_named(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "1 2"}, {"text": "one"}, {"text": "3"}])
    flags = ["--input", source, "--output-prefix", tmp_path / "set"]
    flags += ["--tokenizer-type", "NullTokenizer", "--vocab-size", 10]
    with pytest.raises(UserError, match=r"line 2: .*'one'"):
        run(*flags)
    run(*flags, "--on-error", "skip", "--append-eod")
    assert tokens_of(tmp_path / "set_text_document") == [[1, 2, 10], [3, 10]]


def test_tok_02_added_tokens_count_and_are_recorded(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "red extra3"}])
    model = word_tokenizer(tmp_path / "tokenizer.json", special=["</s>"], added=4)
    run("--input", source, "--output-prefix", tmp_path / "set", *hugging_face(model))
    assert tokens_of(tmp_path / "set_text_document") == [[1, 8]]
    note = json.loads((tmp_path / "set_text_document.json").read_text())
    assert note["tokenizer"]["vocab_size"] == 9
    assert note["tokenizer"]["type"] == "HuggingFaceTokenizer"
    assert (
        note["tokenizer"]["fingerprint"] == report_of(tmp_path / "set")["tokenizer"]["fingerprint"]
    )


def test_idx_04_the_tool_takes_two_bytes_when_ids_fit(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "0 65535"}])
    for size, dtype in ((65_535, np.uint16), (65_536, np.int32)):  # and one end-of-document id
        flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", size]
        run("--input", source, "--output-prefix", tmp_path / "set", *flags)
        data = IndexedDataset(tmp_path / "set_text_document")
        assert data.dtype == dtype
        assert data.get(0).tolist() == [0, 65_535]


def test_sentences_become_sequences(tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "c.jsonl", [{"text": "One. Two!\nThree"}, {"text": ["given", "", "as list"]}]
    )
    flags = ["--input", source, "--output-prefix", tmp_path / "set", *BYTES, "--split-sentences"]
    run(*flags, "--append-eod")
    prefix = tmp_path / "set_text_sentence"
    assert texts_of(prefix) == ["One.", "Two!", "Three", "given", "as list"]
    assert IndexedDataset(prefix).document_indices.tolist() == [0, 3, 5]
    assert [ids[-1] == EOD for ids in tokens_of(prefix)] == [False, False, True, False, True]
    run(*flags, "--keep-newlines")
    assert texts_of(prefix)[:3] == ["One. ", "Two!\n", "Three"]


def test_parquet_text_and_packed_inputs_mix(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"id": [1, 2, 3], "text": ["from", "parquet", None]})
    parquet.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "b.txt").write_text("one file")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"packed"))
    flags = ["--input", tmp_path, "--output-prefix", tmp_path / "out" / "set", *BYTES]
    with pytest.raises(UserError, match=r"a\.parquet, row 3: the key 'text' is missing"):
        run(*flags)
    run(*flags, "--on-error", "skip", "--workers", 2)
    assert texts_of(tmp_path / "out" / "set_text_document") == [
        "from",
        "parquet",
        "one file",
        "packed",
    ]
    with pytest.raises(UserError, match=r"no column 'body'; its columns are 'id', 'text'"):
        run(*flags, "--json-keys", "body", "--input", tmp_path / "a.parquet")


def test_shares_on_many_machines_then_a_merge(corpus: Path, tmp_path: Path) -> None:
    flags = ["--input", corpus, *BYTES, "--append-eod", "--output-prefix"]
    run(*flags, tmp_path / "whole")
    shared = [*flags, tmp_path / "set", "--partitions", 3]
    run(*shared, "--partition-index", 2)
    run(*shared, "--partition-index", 0)
    with pytest.raises(UserError, match="of 3 shares .* 1 are missing"):
        run(*shared, "--merge-partitions")
    assert not list(tmp_path.glob("set_text*"))
    run(*shared, "--partition-index", 1)
    with pytest.raises(UserError, match="made with other flags"):
        run(*[word for word in shared if word != "--append-eod"], "--merge-partitions")
    run(*shared, "--merge-partitions")
    expected = pair_bytes(tmp_path / "whole_text_document")
    assert pair_bytes(tmp_path / "set_text_document") == expected
    assert not (tmp_path / "set_partitions").exists()


def test_a_finished_share_is_not_encoded_again(tmp_path: Path, capsys) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": t} for t in "abcd"])
    flags = ["--input", source, "--output-prefix", tmp_path / "set", *BYTES, "--partitions", 2]
    run(*flags, "--partition-index", 1)
    made = tmp_path / "set_partitions" / "00001-of-00002_text_document.bin"
    stamp = made.stat().st_ino
    run(*flags, "--partition-index", 1)
    assert "complete already" in capsys.readouterr().out
    assert made.stat().st_ino == stamp
    run(*flags, "--partition-index", 1, "--append-eod")
    assert made.stat().st_ino != stamp


def test_ray_runs_every_share(tmp_path: Path, monkeypatch) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": t} for t in "abcde"])
    flags = ["--input", source, "--output-prefix", tmp_path / "set", *BYTES, "--launcher", "ray"]
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match="needs the package ray"):
        run(*flags)
    started = []

    def remote(**options):
        def decorate(function):
            def start(index):
                started.append((index, options["num_cpus"]))
                function(index)

            return types.SimpleNamespace(remote=start)

        return decorate

    fake = types.SimpleNamespace(
        is_initialized=lambda: False, init=lambda **_: None, remote=remote, get=lambda tasks: tasks
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    run(*flags, "--partitions", 3, "--workers", 1)
    assert started == [(0, 1), (1, 1), (2, 1)]
    assert texts_of(tmp_path / "set_text_document") == list("abcde")


def test_numbers_of_workers_are_measured_without_output(corpus, tmp_path, capsys) -> None:
    flags = ["--input", corpus, "--output-prefix", tmp_path / "set", *BYTES]
    flags += ["--find-optimal-num-workers", "--workers-to-check", 1, 2, "--max-documents", 500]
    run(*flags)
    assert "fastest: --workers" in capsys.readouterr().out
    assert not list(tmp_path.glob("set*"))
