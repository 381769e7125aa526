"""Shares of a corpus: the split string and the range of rows each split takes.

``969,30,1`` gives the first 96.9% of a corpus to training, the next 3% to validation and the rest
to testing. Only the numbers relative to their sum count; missing ones are zero. Plain Python,
because the flags are checked before numpy is loaded.
"""

import math
from typing import Literal, get_args

from megatron.core.utils import UserError

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

Share = tuple[float, float]
"""Range of a corpus as fractions of its rows: start, end."""


def parse_split(text: str) -> list[float]:
    """Return the three shares of a split string, normalised to sum to one.

    Raises:
        UserError: a field is no non-negative number, there are more than three, or all are zero.
    """
    # Scripts quote it twice, as in ARGS+=("--split '99,1,0'").
    fields = [field.strip() for field in text.strip("'\" ").split(",")]
    if len(fields) > len(SPLITS):
        raise UserError(
            f"--split {text!r} has {len(fields)} fields; it takes at most three: train,valid,test"
        )
    numbers = []
    for position, field in enumerate(fields):
        number = _number(field)
        if number is None or not math.isfinite(number) or number < 0:
            raise UserError(
                f"--split {text!r}: field {position + 1} ({field!r}, the {SPLITS[position]} share) "
                "must be a number of at least 0, as in --split 969,30,1"
            )
        numbers.append(number)
    numbers += [0.0] * (len(SPLITS) - len(numbers))
    total = sum(numbers)
    if total == 0:
        raise UserError(
            f"--split {text!r}: all fields are 0, so no split would get any data; "
            "give at least one a share, as in --split 969,30,1"
        )
    return [number / total for number in numbers]


def _number(field: str) -> float | None:
    try:
        return None if "_" in field else float(field)
    except ValueError:
        return None


def split_matrix(text: str) -> list[Share | None]:
    """Return each split's (start, end) fractions; None where a share is zero."""
    bounds: list[float] = [0]
    for share in parse_split(text):
        bounds.append(bounds[-1] + share)
    return [
        (start, end) if start < end else None
        for start, end in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def rows_of(share: Share, count: int) -> tuple[int, int]:
    """Return the half-open range of rows that a share takes of ``count`` rows."""
    start, end = share
    return round(start * count), round(end * count)
