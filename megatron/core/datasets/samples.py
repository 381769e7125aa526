"""Which tokens make up sample ``i``: three index arrays, equal to Megatron-core's.

The rows (sequences) of a split are repeated for as many epochs as the samples asked for need,
shuffled, and laid end to end as one long stream of tokens; the stream is cut every ``seq_length``
tokens, and the pieces are shuffled again:

    document index [E x rows]   shuffled rows, repeated per epoch
    sample index   [N + 1, 2]   (position in the document index, offset) where each sample starts
    shuffle index  [N]          sample ``i`` of the data set is piece ``shuffle[i]`` of the stream

A sample reads ``extra`` tokens past its end, where the next one starts again: labels are tokens
shifted by one, so GPT takes one extra. When the last epoch would be used for less than 80%, it is
shuffled by itself and comes last, so that every row is seen E-1 times before any is seen E times.

One legacy ``RandomState(seed)`` does both shuffles, the document index first. Megatron-core finds
the cuts by walking the documents; here the running sum of lengths is searched for all cuts at once
(or walked by the optional compiled helper): same array, no Python loop.
"""

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.core.utils import UserError


def _compiled() -> ModuleType | None:
    try:
        return importlib.import_module("megatron.core.datasets.index_helpers")
    except ModuleNotFoundError:  # not compiled: numpy does the same; a broken one is an error
        return None


HELPERS = _compiled()
"""The compiled helper, or None where it was not built."""

INT32_MAX = 2**31 - 1
MOST_ENTRIES = 2**40
"""Of one array: terabytes."""
SEPARATE_BELOW = 0.80
"""The last epoch stands alone when less than this share of it is used."""


@dataclass(frozen=True)
class SamplePlan:
    """How many epochs and samples a split gives; all of it follows from token counts."""

    tokens_per_epoch: int
    seq_length: int
    num_epochs: int
    num_samples: int
    """Length of the data set: whole epochs, so at least what was asked for."""
    separate_from: int | None
    """First sample of a last epoch that is shuffled by itself, or None."""
    extra: int
    keep_partial: bool

    @property
    def samples_per_epoch(self) -> float:
        """Samples in one pass over the tokens."""
        return self.tokens_per_epoch / self.seq_length


def plan_samples(
    tokens_per_epoch: int,
    seq_length: int,
    asked: int | None,
    *,
    extra: int = 1,
    keep_partial: bool = False,
) -> SamplePlan:
    """Return the plan that yields at least ``asked`` samples, or one epoch when None.

    Args:
        tokens_per_epoch: tokens in the split; at least one.
        seq_length: tokens per sample.
        asked: samples wanted.
        extra: tokens that a sample reads beyond its length, which the next sample reads again.
        keep_partial: end with a sample that may be shorter than ``seq_length``.
    """
    assert tokens_per_epoch > 0, "an empty split has no samples"
    epochs = 1 if asked is None else max(1, -(-(asked * seq_length + extra) // tokens_per_epoch))
    usable = epochs * tokens_per_epoch - extra
    count = max(0, -(-usable // seq_length) if keep_partial else usable // seq_length)
    separate = None
    if epochs > 1:
        assert asked is not None
        before = ((epochs - 1) * tokens_per_epoch - extra) // seq_length
        per_epoch = (tokens_per_epoch - extra) // seq_length
        if asked - before < int(SEPARATE_BELOW * per_epoch):
            separate = before
    return SamplePlan(tokens_per_epoch, seq_length, epochs, count, separate, extra, keep_partial)


class SampleIndex(NamedTuple):
    """The three arrays; see the module's docstring."""

    document: npt.NDArray[Any]
    sample: npt.NDArray[Any]
    shuffle: npt.NDArray[Any]


def build_sample_index(
    lengths: npt.NDArray[Any], rows: tuple[int, int], plan: SamplePlan, seed: int
) -> SampleIndex:
    """Return the index arrays of one split.

    Args:
        lengths: tokens of every row of the corpus.
        rows: half-open range of the split's rows.
        plan: epochs and samples, made for these rows.
        seed: seed of both shuffles.

    Raises:
        UserError: so many samples are asked for that the arrays do not fit into memory.
    """
    random = np.random.RandomState(seed)
    try:
        if max(plan.num_samples, (rows[1] - rows[0]) * plan.num_epochs) > MOST_ENTRIES:
            raise MemoryError
        document = document_index(rows, plan, random)
        sample = sample_index(lengths, document, plan)
        return SampleIndex(document, sample, shuffle_index(plan, random))
    except MemoryError:
        raise UserError(
            f"the order of {plan.num_samples:,} samples (of the run's length, or of its "
            "evaluations) does not fit into memory; lower --train-iters or --train-samples, or "
            "--eval-iters, or --global-batch-size"
        ) from None


def document_index(
    rows: tuple[int, int], plan: SamplePlan, random: np.random.RandomState
) -> npt.NDArray[np.int32]:
    """Return the rows in reading order, once per epoch."""
    start, end = rows
    assert end <= INT32_MAX, f"row {end} does not fit 32 bits"
    one = np.arange(start, end, dtype=np.int32)
    if plan.separate_from is None:
        index = np.tile(one, plan.num_epochs)
        random.shuffle(index)
        return index
    index = np.tile(one, plan.num_epochs - 1)
    random.shuffle(index)
    random.shuffle(one)
    return np.concatenate((index, one))


def sample_index(
    lengths: npt.NDArray[Any],
    document: npt.NDArray[np.int32],
    plan: SamplePlan,
    helpers: ModuleType | None = HELPERS,
) -> npt.NDArray[Any]:
    """Return where each sample starts, and after the last one where the next would.

    Sample ``i`` starts at stream token ``i * seq_length``. Its place is found through the token
    ``extra - 1`` further on, the last one that sample ``i - 1`` reads: that token exists, so it
    never lies in an empty document, and ``extra - 1`` is taken off the offset again. Without an
    extra token the place may thus be the very end of a document.
    """
    is_long = int(lengths.max()) > INT32_MAX
    wide = len(document) > INT32_MAX or is_long
    dtype = np.int64 if wide else np.int32
    if helpers is not None and not is_long:
        index: npt.NDArray[Any] = helpers.sample_index(
            np.ascontiguousarray(lengths, dtype=np.int32),
            document,
            plan.seq_length,
            plan.num_samples,
            plan.extra,
        )
        return index if wide else index.astype(np.int32)
    ends = np.cumsum(lengths[document], dtype=np.int64)
    last_tokens = np.arange(1, plan.num_samples + 1, dtype=np.int64)
    last_tokens *= plan.seq_length
    last_tokens += plan.extra - 1
    index = np.zeros((plan.num_samples + 1, 2), dtype=dtype)
    position = np.searchsorted(ends, last_tokens, side="right")
    beyond = position == len(ends)  # only the last sample, when it is kept although short
    position[beyond] -= 1
    index[1:, 0] = position
    # Offset = (last token + 1 - extra) - start of its document, without an array of starts.
    last_tokens += 1 - plan.extra
    last_tokens[beyond] = ends[-1] - plan.extra
    last_tokens -= ends[position]
    last_tokens += lengths[document[position]]
    index[1:, 1] = last_tokens
    return index


def shuffle_index(plan: SamplePlan, random: np.random.RandomState) -> npt.NDArray[Any]:
    """Return the order of the samples; a separate last epoch stays last."""
    dtype = np.uint32 if plan.num_samples < 2**32 - 2 else np.int64
    index = np.arange(plan.num_samples, dtype=dtype)
    if plan.separate_from is None:
        random.shuffle(index)
    else:
        random.shuffle(index[: plan.separate_from])
        random.shuffle(index[plan.separate_from :])
    return index


def expected_dtypes(plan: SamplePlan, rows: int) -> dict[str, np.dtype[Any]]:
    """Return the type of each array of a plan over ``rows`` rows."""
    wide = rows * plan.num_epochs > INT32_MAX
    return {
        "document_index": np.dtype(np.int32),
        "sample_index": np.dtype(np.int64 if wide else np.int32),
        "shuffle_index": np.dtype(np.uint32 if plan.num_samples < 2**32 - 2 else np.int64),
    }
