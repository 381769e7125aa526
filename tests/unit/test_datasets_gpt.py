"""Samples: labels, masks, positions and document bounds, against plain per-token references."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.gpt import GPTDataset, SampleOptions, make_sample
from megatron.core.datasets.indexed import IndexedDatasetBuilder
from megatron.core.datasets.samples import build_sample_index, plan_samples
from megatron.core.datasets.source import FileSource, MockSource
from megatron.core.utils import UserError


def write(prefix: Path, documents: list[list[int]], dtype: Any = np.uint16) -> str:
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for tokens in documents:
            builder.add_document(tokens)
        builder.finalize()
    return str(prefix)


def dataset(prefix: str, options: SampleOptions, *, mmap: bool = True, **plan: Any) -> GPTDataset:
    source = FileSource(prefix, mmap=mmap)
    lengths = source.sequence_lengths
    planned = plan_samples(
        int(lengths.sum()), options.seq_length, plan.pop("asked", None), extra=options.extra, **plan
    )
    index = build_sample_index(lengths, (0, len(lengths)), planned, 7)
    return GPTDataset(source, planned, index, options)


def naive(tokens: list[int], eod: int) -> tuple[list[int], list[int]]:
    """Return (positions, bounds): count again after every end of document."""
    positions, bounds, count = [], [0], 0
    for place, token in enumerate(tokens):
        positions.append(count)
        count += 1
        if token == eod:
            count = 0
            bounds.append(place + 1)
    if bounds[-1] != len(tokens):
        bounds.append(len(tokens))
    return positions, bounds


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=65, max_size=65))
def test_ds_12_positions_and_bounds_equal_a_naive_count(text: list[int]) -> None:
    options = SampleOptions(
        seq_length=64, vocab_size=4, eod=0, reset_position_ids=True, reset_attention_mask=True
    )
    sample = make_sample(np.array(text), options)
    positions, bounds = naive(text[:-1], 0)
    assert sample["position_ids"].tolist() == positions
    assert sample["cu_seqlens"].tolist() == bounds
    assert sample["cu_seqlens"].dtype == np.int32


def test_ds_12_work_follows_tokens_not_documents() -> None:
    """However many documents a sample is made of, Python executes the same instructions."""
    length = 8192
    options = SampleOptions(
        seq_length=length, vocab_size=9, eod=0, reset_position_ids=True, reset_attention_mask=True
    )
    counts = []
    for documents in (8, 1024):
        text = np.array(([1] * (length // documents - 1) + [0]) * documents + [1])
        assert len(make_sample(text, options)["cu_seqlens"]) == documents + 1
        counts.append(instructions(lambda text=text: make_sample(text, options)))
    assert counts[0] == counts[1]


def instructions(work: Callable[[], object]) -> int:
    """Return the number of Python's instructions that ``work`` takes; in C they are one each."""
    count = 0

    def see(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return see

    before = sys.gettrace()
    sys.settrace(see)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_ds_11_padding_is_masked_by_position() -> None:
    """End of document doubles as padding: real ends keep their loss, the padded tail has none."""
    options = SampleOptions(seq_length=7, vocab_size=10, eod=0)
    sample = make_sample(np.array([5, 0, 6, 0]), options)
    assert sample["tokens"].tolist() == [5, 0, 6, 0, 0, 0, 0]
    assert sample["labels"].tolist() == [0, 6, 0, 0, 0, 0, 0]
    # Predicting the 0 after 5, the 6, and the 0 after 6 counts; nothing follows the last token.
    assert sample["loss_mask"].tolist() == [1, 1, 1, 0, 0, 0, 0]


def test_ds_11_ends_lose_their_loss_only_when_asked() -> None:
    options = SampleOptions(seq_length=7, vocab_size=10, eod=0, eod_mask_loss=True)
    sample = make_sample(np.array([5, 0, 6, 0]), options)
    assert sample["loss_mask"].tolist() == [1, 0, 1, 0, 0, 0, 0]


def test_a_padding_token_in_the_data_counts_for_nothing() -> None:
    options = SampleOptions(seq_length=4, vocab_size=10, eod=0, pad=9)
    sample = make_sample(np.array([5, 9, 6, 9, 9]), options)
    assert sample["tokens"].tolist() == [5, 0, 6, 0]
    assert sample["labels"].tolist() == [0, 6, 0, 0]
    assert sample["loss_mask"].tolist() == [0, 1, 0, 0]


def test_a_padded_tail_is_no_document() -> None:
    options = SampleOptions(
        seq_length=6, vocab_size=10, eod=0, reset_attention_mask=True, reset_position_ids=True
    )
    sample = make_sample(np.array([5, 0, 6]), options)
    assert sample["cu_seqlens"].tolist() == [0, 2, 6]
    assert sample["position_ids"].tolist() == [0, 1, 0, 1, 2, 3]


def test_resets_need_an_end_of_document() -> None:
    for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        with pytest.raises(UserError, match=name.replace("_", "-")):
            SampleOptions(seq_length=4, vocab_size=10, **{name: True})


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("mmap", [True, False])
def test_samples_tile_the_shuffled_stream(tmp_path: Path, extra: int, mmap: bool) -> None:
    random = np.random.default_rng(1)
    rows = [random.integers(0, 500, size).tolist() for size in random.integers(0, 40, 60)]
    options = SampleOptions(seq_length=16, vocab_size=500, extra=extra)
    data = dataset(write(tmp_path / "x", rows), options, mmap=mmap, asked=150, keep_partial=True)
    stream = [token for row in data.index.document for token in rows[row]]
    texts: dict[int, list[int]] = {}
    for i in range(len(data)):
        texts[int(data.index.shuffle[i])] = data.text(i).tolist()
    for piece in range(len(data)):
        assert texts[piece] == stream[16 * piece : 16 * piece + 16 + extra]
    sample = data[0]
    assert {name: str(value.dtype) for name, value in sample.items()} == {
        "tokens": "int64",
        "labels": "int64",
        "loss_mask": "float32",
        "position_ids": "int64",
    }


def test_mock_rows_are_counted_from_one(tmp_path: Path) -> None:
    source = MockSource(100, 7)
    rows = [5, 11, 3]
    whole = []
    for row in rows:
        length = int(source.sequence_lengths[row])
        whole += [(k % 100) for k in range(1, length)] + [7]
    last = int(source.sequence_lengths[3])
    got = source.join(np.array(rows), 2, last - 4)
    assert got.tolist() == whole[2 : len(whole) - 4]


@pytest.mark.parametrize("bad", [1000, -3])
def test_a_token_above_the_vocabulary_is_named(tmp_path: Path, bad: int) -> None:
    rows = [[1] * 10, [2] * 10, [3, 4, bad, 5] + [6] * 6]
    data = dataset(
        write(tmp_path / "corpus", rows, np.int32), SampleOptions(seq_length=28, vocab_size=1000)
    )
    with pytest.raises(UserError) as caught:
        data[0]
    message = str(caught.value)
    for part in (str(tmp_path / "corpus"), "sequence 2", f"token {bad}", "1000"):
        assert part in message
