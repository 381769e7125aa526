"""Texts put together again from what span corruption made of them."""

from collections.abc import Sequence

import numpy as np

from megatron.core.datasets.span_corruption import Tokens


def restored(encoder: Tokens, target: Tokens, sentinels: Sequence[int]) -> Tokens:
    """Return the text that `corrupted` made two rows of; sentinels stand in no text."""
    marks = np.flatnonzero(np.isin(target, sentinels))
    spans = dict(zip(target[marks].tolist(), np.split(target, marks)[1:], strict=True))
    parts = [spans[i][1:] if i in spans else [i] for i in encoder.tolist()]
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])
