"""Samples for next-token prediction, cut from a stream of documents.

A sample is ``seq_length + 1`` tokens: inputs are all but the last, labels all but the first. Where
documents must not see each other, the sample carries ``cu_seqlens``: the bounds of its documents as
cumulative lengths, from 0 to ``seq_length``, from which attention derives what it may look at. No
dense mask exists anywhere, and everything is one vectorised pass over the tokens.

A sample that reaches past the end of the data (only where a short last sample is kept) is padded;
padding is masked by its position, so an end-of-document token that happens to share the padding id
keeps its loss.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.samples import SampleIndex, SamplePlan
from megatron.core.datasets.source import TokenSource
from megatron.core.utils import UserError

Sample = dict[str, npt.NDArray[Any]]

Place = tuple[int, int, int]
"""A row of a corpus, the first of its tokens that is taken and the one after the last."""


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """How tokens become a sample."""

    seq_length: int
    vocab_size: int
    """Ids in use: a token from here on is an error."""
    eod: int | None = None
    """End-of-document token."""
    pad: int | None = None
    """Padding token that the data itself may hold; None when it doubles as another token."""
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    extra: int = 1
    """Tokens read beyond the sample, for the labels: 1, or 0 to shift within the sample."""

    def __post_init__(self) -> None:
        if self.eod is None:
            for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
                if getattr(self, name):
                    raise UserError(
                        f"--{name.replace('_', '-')} looks for end-of-document tokens, but the "
                        "tokenizer has none"
                    )


class GPTDataset:
    """Sample ``i`` of one split of one corpus.

    Items are dicts of arrays: tokens, labels and position_ids (int64), loss_mask (float32), each
    ``[seq_length]``, and cu_seqlens (int32) with ``reset_attention_mask``.
    """

    def __init__(
        self,
        source: TokenSource,
        plan: SamplePlan,
        index: SampleIndex,
        options: SampleOptions,
        description: dict[str, Any] | None = None,
    ) -> None:
        self.source = source
        self.plan = plan
        self.index = index
        self.options = options
        self.description = description or {}
        """What the split is made from, in Megatron-core's form; part of a blend's cache key."""

    def __len__(self) -> int:
        return self.plan.num_samples

    @property
    def samples_per_epoch(self) -> float:
        """Samples in one pass over the tokens."""
        return self.plan.samples_per_epoch

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)} of {self.source.name}")
        text = self.text(i)
        check_ids(text, self.options.vocab_size, self.source, self.places(i))
        return self.sample(i, text)

    def sample(self, i: int, text: npt.NDArray[np.int64]) -> Sample:
        """Return sample ``i``, whose tokens in the corpus are ``text``."""
        return make_sample(text, self.options)

    def text(self, i: int) -> npt.NDArray[np.int64]:
        """Return the raw tokens of sample ``i``, the extra one included, without padding."""
        place = int(self.index.shuffle[i])
        (first_row, first), (last_row, last) = self.index.sample[place : place + 2].tolist()
        rows = self.index.document[first_row : last_row + 1]
        return self.source.join(rows, first, last + self.options.extra)

    def places(self, i: int) -> Iterator[Place]:
        """Yield what sample ``i`` reads, the extra token included, row by row."""
        place = int(self.index.shuffle[i])
        (first_row, first), (last_row, last) = self.index.sample[place : place + 2].tolist()
        for position in range(first_row, last_row + 1):
            row = int(self.index.document[position])
            start = first if position == first_row else 0
            end = int(self.source.sequence_lengths[row])
            yield row, start, last + self.options.extra if position == last_row else end


def check_ids(
    text: npt.NDArray[np.int64], vocab_size: int, source: TokenSource, places: Iterable[Place]
) -> None:
    """Refuse a token that the vocabulary does not hold, and say where it stands.

    Args:
        text: the tokens of a sample.
        vocab_size: ids in use.
        source: the corpus.
        places: where the tokens stand, in order.

    Raises:
        UserError: there is one.
    """
    if not text.size or int(text.view(np.uint64).max()) < vocab_size:
        return
    bad = int(np.flatnonzero((text < 0) | (text >= vocab_size))[0])
    rows = (row for row, start, end in places for _ in range(start, end))
    raise UserError(
        f"{source.name}: {source.row_name} {next(islice(rows, bad, None))} holds token "
        f"{text[bad]}, but the tokenizer's vocabulary has {vocab_size} ids: the corpus was made "
        "with another tokenizer; run tools/preprocess_data.py again, or give the tokenizer it was "
        "made with"
    )


def make_sample(text: npt.NDArray[np.int64], options: SampleOptions, fill: int = 0) -> Sample:
    """Return the sample made of ``text``; if shorter than a sample, it is padded with ``fill``."""
    length = options.seq_length
    real = len(text)
    assert 0 < real <= length + options.extra, f"{real} tokens for a sample of {length}"
    padded = np.full(length + 1, fill, dtype=np.int64)
    padded[:real] = text
    tokens, labels = padded[:-1].copy(), padded[1:].copy()
    mask = np.ones(length, dtype=np.float32)
    mask[max(0, real - 1) :] = 0  # the last real token has no successor
    is_end = tokens == options.eod if options.eod is not None else None
    if is_end is not None and real < length:
        is_end[real:] = False  # padding may look like an end of document
    if options.eod_mask_loss:
        assert is_end is not None
        mask[is_end] = 0
    if options.pad is not None:
        mask[labels == options.pad] = 0
        tokens[tokens == options.pad] = 0
        labels[labels == options.pad] = 0
    sample: Sample = {"tokens": tokens, "labels": labels, "loss_mask": mask}
    positions = np.arange(length, dtype=np.int64)
    if options.reset_position_ids or options.reset_attention_mask:
        assert is_end is not None
        bounds = document_bounds(is_end)
        if options.reset_position_ids:
            positions -= np.repeat(bounds[:-1], np.diff(bounds))
        if options.reset_attention_mask:
            sample["cu_seqlens"] = bounds
    sample["position_ids"] = positions
    return sample


def document_bounds(is_end: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """Return the bounds of the documents, from 0 to the length; each ends with its end token."""
    inner = np.flatnonzero(is_end[:-1]) + 1
    bounds = np.empty(len(inner) + 2, dtype=np.int32)
    bounds[0] = 0
    bounds[1:-1] = inner
    bounds[-1] = len(is_end)
    return bounds
