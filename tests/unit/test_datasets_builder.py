"""Data sets from flags: caches, blends, validation sets, and what a user can get wrong."""

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.blended import BlendedDataset
from megatron.core.datasets.builder import Built, Sizes, build_datasets
from megatron.core.datasets.cache import BuildPolicy
from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.indexed import IndexedDatasetBuilder
from megatron.core.datasets.plan import describe, positions
from megatron.core.datasets.preprocess.report import describe_tokenizer
from megatron.core.datasets.token_info import TokenInfo
from megatron.core.tokenizers.byte_level import ByteLevelTokenizer
from megatron.core.utils import Say, UserError, silent

ROOT = Path(__file__).resolve().parents[2]
INFO = TokenInfo(vocab_size=1000, eod=0, identifiers={"class": "Tok"})


def corpus(prefix: Path, documents: int, length: int = 20, token: int = 1) -> str:
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(documents):
            builder.add_document([token] * (length - 1) + [0])
        builder.finalize()
    return str(prefix)


def build(
    sizes: Sizes, *, policy: BuildPolicy | None = None, say: Say = silent, **flags: Any
) -> Built:
    info = flags.pop("info", INFO)
    config = DataConfig.resolve(seq_length=16, **flags)
    return build_datasets(config, sizes, info, 5, policy, say=say)


@pytest.fixture
def a(tmp_path: Path) -> str:
    return corpus(tmp_path / "a", 100, token=1)


@pytest.fixture
def b(tmp_path: Path) -> str:
    return corpus(tmp_path / "b", 40, token=2)


# Caches


def test_ds_17_prepared_index_files_are_found_again(a: str, b: str) -> None:
    """What one process prepares, a run in many processes finds, without touching it."""
    flags = {"data_path": ("1", a, "2", b), "split": "90,5,5"}
    prepared = build((50, 4, 4), data_cache_path=a + "-cache", **flags)
    assert set(prepared.files.values()) == {"built"} and len(prepared.files) == 9
    times = {path: path.stat().st_mtime_ns for path in Path(a + "-cache").iterdir()}
    for may_build in (True, False):
        policy = BuildPolicy(build=may_build, timeout=0)
        again = build((50, 4, 4), data_cache_path=a + "-cache", policy=policy, **flags)
        assert set(again.files.values()) == {"hit"} and set(again.files) == set(prepared.files)
    assert {p: p.stat().st_mtime_ns for p in Path(a + "-cache").iterdir()} == times


def test_ds_16_the_key_is_the_same_in_every_process(a: str) -> None:
    program = (
        "import sys; from megatron.core.datasets.builder import build_datasets\n"
        "from megatron.core.datasets.config import DataConfig\n"
        "from megatron.core.datasets.token_info import TokenInfo\n"
        "info = TokenInfo(vocab_size=1000, eod=0, identifiers={'class': 'Tok', 'more': {'x': 1}})\n"
        "config = DataConfig.resolve(seq_length=16, data_path=(sys.argv[1],), split='9,1')\n"
        "print(*build_datasets(config, (50, 4, 0), info, 5).files)"
    )
    keys = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program, a],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        keys.add(done.stdout)
    assert len(keys) == 1 and "GPTDataset-train" in keys.pop()


def test_ds_09_each_place_builds_its_own_and_they_match(a: str, tmp_path: Path) -> None:
    """Two nodes whose caches are not shared: one process of each builds, the same bytes."""
    folders = [tmp_path / "node0", tmp_path / "node1"]
    for folder in folders:
        build((50, 4, 4), data_path=(a,), split="90,5,5", data_cache_path=str(folder))
    files = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert files[0] == files[1] and len(files[0]) == 15
    for name in files[0]:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_ds_09_a_process_that_may_not_build_waits_for_the_files(a: str, tmp_path: Path) -> None:
    flags = {"data_path": (a,), "split": "90,5,5", "data_cache_path": str(tmp_path / "cache")}
    made: list[Built] = []
    said: list[str] = []

    def wait() -> None:
        policy = BuildPolicy(build=False, timeout=30, poll=0.01, report_every=0.05)
        made.append(build((50, 4, 4), policy=policy, say=said.append, **flags))

    waiting = threading.Thread(target=wait)
    waiting.start()
    for _ in range(1000):
        if said:
            break
        time.sleep(0.01)
    assert not made and "document_index" in said[0] and said[0].startswith("waiting for ")
    said.clear()
    built = build((50, 4, 4), say=said.append, **flags)
    assert sum(line.startswith("building index files ") for line in said) == 3
    waiting.join(timeout=30)
    assert made[0].files == dict.fromkeys(built.files, "hit")
    assert made[0].train is not None and built.train is not None
    np.testing.assert_array_equal(made[0].train[3]["tokens"], built.train[3]["tokens"])


def test_ds_09_waiting_in_vain_says_for_what(a: str) -> None:
    policy = BuildPolicy(build=False, timeout=0.05, poll=0.01)
    with pytest.raises(UserError, match=r"GPTDataset_indices.*document_index") as caught:
        build((50, 4, 4), policy=policy, data_path=(a,), split="90,5,5")
    assert "--index-build-timeout" in str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "empty", "foreign", "other shape"])
def test_a_damaged_file_is_built_again(a: str, damage: str) -> None:
    first = build((50, 0, 0), data_path=(a,), split="1")
    path = Path(next(iter(first.files)) + "-sample_index.npy")
    sound = path.read_bytes()
    if damage == "other shape":
        np.save(path, np.zeros((3, 2), np.int32))
    else:
        path.write_bytes({"cut": sound[:-9], "empty": b"", "foreign": b"hello"}[damage])
    again = build((50, 0, 0), data_path=(a,), split="1")
    assert set(again.files.values()) == {"built"} and path.read_bytes() == sound


@pytest.mark.parametrize("foreign", [False, True])
def test_another_corpus_under_the_same_name_is_noticed(a: str, foreign: bool) -> None:
    """The key holds the path, not the content; with Megatron-core's cache nothing else is known."""
    first = build((50, 0, 0), data_path=(a,), split="1")
    stem = next(iter(first.files))
    if foreign:
        Path(stem + "-inputs.json").unlink()
        assert set(build((50, 0, 0), data_path=(a,), split="1").files.values()) == {"hit"}
    with IndexedDatasetBuilder(a, np.uint16) as builder:
        for i in range(100):
            builder.add_document([3] * (20 + (i % 2) * 2 - 1))
        builder.finalize()
    again = build((50, 0, 0), data_path=(a,), split="1")
    assert set(again.files.values()) == {"built"}
    assert again.train is not None and set(again.train[0]["tokens"]) == {3}


def test_a_cache_that_cannot_be_written_names_the_flag(a: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--data-cache-path"):
        build((50, 0, 0), data_path=(a,), split="1", data_cache_path=str(tmp_path / "file" / "x"))


# Blends


def test_a_blend_keeps_its_shares_at_every_moment(a: str, b: str) -> None:
    blend = build((400, 0, 0), data_path=("3", a, "1", b), split="1").train
    assert isinstance(blend, BlendedDataset) and len(blend) == 400
    tokens = [int(blend[i]["tokens"].max()) for i in range(400)]
    for n in (1, 10, 100, 400):
        assert abs(tokens[:n].count(1) - 0.75 * n) <= 1
    assert blend.consumed(200) == [tokens[:200].count(1), tokens[:200].count(2)]


def test_a_blend_without_weights_follows_the_sizes(a: str, b: str) -> None:
    whole = build((None, 0, 0), data_path=(a, b), split="1").train
    assert isinstance(whole, BlendedDataset)
    sizes = [len(member) for member in whole.members]
    assert sizes == [124, 49] and whole.consumed(len(whole)) == sizes
    part = build((90, 0, 0), data_path=(a, b), split="1").train
    assert isinstance(part, BlendedDataset) and len(part) == 90
    assert part.consumed(90) == pytest.approx([90 * 124 / 173, 90 * 49 / 173], abs=1)
    capped = build((1000, 0, 0), data_path=(a, b), split="1").train
    assert capped is not None and len(capped) == 173


def test_threads_build_what_one_thread_builds(a: str, b: str) -> None:
    one = build((60, 0, 0), data_path=("1", a, "1", b), split="1")
    many = build((60, 0, 0), data_path=("1", a, "1", b), split="1", num_dataset_builder_threads=4)
    assert one.train is not None and many.train is not None
    for i in range(60):
        np.testing.assert_array_equal(one.train[i]["tokens"], many.train[i]["tokens"])


# Validation


def test_full_validation_is_one_pass(a: str) -> None:
    built = build((50, 1000, 0), data_path=(a,), split="50,50", full_validation=True)
    assert len(built.valid[0]) == (50 * 20 - 1) // 16


def test_several_validation_sets_are_kept_apart(a: str, b: str) -> None:
    flags = {"train_data_path": (a,), "valid_data_path": ("1", a, "9", b)}
    built = build((50, 8, 0), multiple_validation_sets=True, **flags)
    assert built.valid_names == ["a", "b"]
    assert [set(v[0]["labels"]) - {0} for v in built.valid] == [{1}, {2}]
    whole = build((50, 8, 0), multiple_validation_sets=True, full_validation=True, **flags)
    assert [len(v) for v in whole.valid] == [124, 49]
    with pytest.raises(UserError, match="valid blend has weights"):
        build((50, 8, 0), full_validation=True, **flags)


def test_equal_names_of_validation_sets_are_told_apart(tmp_path: Path) -> None:
    paths = [corpus(tmp_path / folder / "text", 10) for folder in ("x", "y")]
    built = build(
        (9, 2, 0),
        train_data_path=paths[:1],
        valid_data_path=tuple(paths),
        multiple_validation_sets=True,
    )
    assert built.valid_names == paths


# What can be wrong with the data


def test_an_empty_split_matters_only_when_samples_are_asked(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "c", 120)
    flags = {"data_path": (prefix,), "split": "949,50,1"}
    built = build((50, 4, 0), **flags)
    assert built.test is None and len(built.valid) == 1
    with pytest.raises(UserError) as caught:
        build((50, 4, 4), **flags)
    for part in ("test split", prefix, "0 of 120", "949,50,1", "4 samples"):
        assert part in str(caught.value)


def test_a_share_of_zero_is_not_asked_for(a: str) -> None:
    with pytest.raises(UserError, match=r"'1,0,1' gives valid nothing, but 4 samples"):
        build((50, 4, 0), data_path=(a,), split="1,0,1")
    assert build((50, 0, 4), data_path=(a,), split="1,0,1").valid == []
    with pytest.raises(UserError, match="--valid-data-path"):
        build((50, 4, 0), train_data_path=(a,))


def test_a_corpus_shorter_than_a_sample_is_refused(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "short", 1, length=16)
    with pytest.raises(UserError) as caught:
        build((50, 0, 0), data_path=(prefix,), split="1")
    for part in (prefix, "16 tokens", "takes 17", "--seq-length 16"):
        assert part in str(caught.value)
    assert "--eval-iters" not in str(caught.value)


def test_a_test_split_shorter_than_a_sample_names_the_ways_out(tmp_path: Path, a: str) -> None:
    tiny = corpus(tmp_path / "tiny", 1, length=16)
    with pytest.raises(UserError, match="lower --seq-length, add data or .* --eval-iters 0"):
        build((50, 0, 4), train_data_path=(a,), test_data_path=(tiny,))
    short = corpus(tmp_path / "short", 10, length=10)
    with pytest.raises(UserError, match=r"larger share by --split \(90,0,10\) .* --eval-iters 0"):
        build((50, 0, None), data_path=(short,), split="90,0,10")


def test_a_split_shorter_than_a_sample_repeats_with_a_warning(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "short", 10, length=10)
    said: list[str] = []
    built = build((50, 3, 0), data_path=(prefix,), split="90,10", say=said.append)
    assert any("WARNING" in line and "has 10 tokens, a sample takes 17" in line for line in said)
    assert len(built.valid[0][2]["tokens"]) == 16


def test_a_corpus_too_small_for_a_blend_by_size_is_left_out(a: str, tmp_path: Path) -> None:
    tiny = corpus(tmp_path / "tiny", 1, length=5)
    said: list[str] = []
    built = build((40, 0, 0), data_path=(tiny, a), split="1", say=said.append)
    assert built.train is not None and len(built.train) == 40
    assert any(f"WARNING: {tiny} gives no train sample" in line for line in said)


def test_damaged_and_missing_files_are_named(a: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.idx does not exist"):
        build((50, 0, 0), data_path=(str(tmp_path / "nowhere"),), split="1")
    cut = Path(a + ".bin")
    cut.write_bytes(cut.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"a\.bin has 3990 bytes, .* describes 4000"):
        build((50, 0, 0), data_path=(a,), split="1")
    Path(a + ".idx").write_bytes(b"PK\3\4 something else entirely, and long enough")
    with pytest.raises(UserError, match="not a token index"):
        build((50, 0, 0), data_path=(a,), split="1")


def test_tok_04_another_tokenizer_is_refused(a: str) -> None:
    report = {"tokenizer": {"type": "GPT2BPETokenizer", "fingerprint": "f00", "vocab_size": 50257}}
    Path(a + ".json").write_text(json.dumps(report))
    mine = TokenInfo(vocab_size=1000, eod=0, fingerprint="f00")
    assert build((50, 0, 0), data_path=(a,), split="1", info=mine).train is not None
    other = TokenInfo(vocab_size=1000, eod=0, fingerprint="ba2")
    with pytest.raises(UserError) as caught:
        build((50, 0, 0), data_path=(a,), split="1", info=other)
    for part in (a, "GPT2BPETokenizer", "50257", "f00", "ba2", "--ignore-tokenizer-mismatch"):
        assert part in str(caught.value)
    flags = {"data_path": (a,), "split": "1", "ignore_tokenizer_mismatch": True}
    assert build((50, 0, 0), info=other, **flags).train is not None


def test_a_corpus_does_not_depend_on_how_many_sentinels_are_added(a: str) -> None:
    """Sentinels come after the vocabulary, and no text is encoded to them."""

    def allows(note: dict[str, Any], run: ByteLevelTokenizer) -> bool:
        Path(a + ".json").write_text(json.dumps({"tokenizer": note}))
        try:
            build((50, 0, 0), data_path=(a,), split="1", info=TokenInfo.of(run))
        except UserError as error:
            assert "another tokenizer" in str(error)
            return False
        return True

    names = ("<eod>", "<pad>")
    counts = (0, 1, 100)
    for made, used in itertools.product(counts, counts):
        note = describe_tokenizer(ByteLevelTokenizer(names, made))
        assert allows(note, ByteLevelTokenizer(names, used)), (made, used)
        assert not allows(note, ByteLevelTokenizer(("<eod>",), used)), (made, used)
        # Older notes have one fingerprint, with sentinels: it is known if there were none.
        del note["without_sentinels"]
        assert allows(note, ByteLevelTokenizer(names, used)) == (made in (0, used))


# The plan


def test_the_plan_agrees_with_what_is_built(a: str, b: str) -> None:
    config = DataConfig.resolve(seq_length=16, data_path=("3", a, "1", b), split="80,20")
    sizes: Sizes = (400, 8, 0)
    rows = describe(config, sizes)
    built = build_datasets(config, sizes, INFO, 5)
    assert isinstance(built.train, BlendedDataset)
    train = [row for row in rows if row.split == "train"]
    assert [row.samples for row in train] == built.train.consumed(400) == [300, 100]
    assert [row.tokens_per_epoch for row in train] == [1600, 640]
    assert [row.epochs for row in train] == [300 * 16 / 1600, 100 * 16 / 640]
    assert sum(row.share for row in train) == 1
    assert "300 samples" in train[0].line() and a in train[0].line()


def test_the_plan_of_single_sources_and_mock_data(a: str, b: str) -> None:
    config = DataConfig.resolve(seq_length=16, data_path=(a, b), split="1")
    rows = describe(config, (None, 0, 0))
    assert [row.samples for row in rows] == [124, 49]
    mock = DataConfig.resolve(seq_length=16, mock_data=True)
    assert describe(mock, (10, 0, 0))[0].sequences == 33_333


def test_the_plan_of_splits_with_corpora_of_their_own(a: str, b: str) -> None:
    flags = {"train_data_path": (a,), "valid_data_path": ("1", a, "1", b), "test_data_path": (b,)}
    config = DataConfig.resolve(seq_length=16, **flags)
    rows = describe(config, (200, 50, None))
    assert [(row.split, row.source, row.samples) for row in rows] == [
        ("train", a, 200),
        ("valid", a, 25),
        ("valid", b, 25),
        ("test", b, 49),  # 799 tokens that have a successor
    ]
    alone = DataConfig.resolve(seq_length=16, multiple_validation_sets=True, **flags)
    assert [row.samples for row in describe(alone, (0, 7, 0))] == [7, 7]


def test_the_plan_tells_what_it_can_without_a_file(a: str, tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    weighted = DataConfig.resolve(seq_length=16, data_path=("3", a, "1", gone), split="1")
    here, absent = describe(weighted, (400, 0, 0))
    assert (here.samples, here.epochs, here.absent) == (300, 2.4, False)
    assert (absent.samples, absent.epochs, absent.absent) == (100, None, True)
    assert "absent" in absent.line() and gone in absent.line() and "25.00%" in absent.line()
    by_size = DataConfig.resolve(seq_length=16, data_path=(a, gone), split="1")
    assert [row.samples for row in describe(by_size, (400, 0, 0))] == [None, None]
    assert all("? epochs" in row.line() for row in describe(by_size, (400, 0, 0)))


def test_the_position_in_the_data_counts_passes(a: str, b: str) -> None:
    built = build((400, 0, 0), data_path=("3", a, "1", b), split="80,20")
    assert built.train is not None
    where = positions(built.train, 200)
    assert [(p.source, p.samples) for p in where] == [(a, 150), (b, 50)]
    assert [p.epoch for p in where] == [1.5, 1.25]
