"""Do index arrays from disk belong to this corpus and this plan?"""

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.cache import Arrays
from megatron.core.datasets.samples import SamplePlan, expected_dtypes

PROBES = 4096
"""Rows whose lengths mark the content of a corpus."""


def content_mark(
    lengths: npt.NDArray[Any], rows: tuple[int, int], plan: SamplePlan
) -> dict[str, Any]:
    """Return what tells a corpus from another under the same path, in a moment's time."""
    return {
        **lengths_mark(lengths, rows),
        "extra_tokens": plan.extra,
        "keep_partial": plan.keep_partial,
    }


def lengths_mark(lengths: npt.NDArray[Any], rows: tuple[int, int]) -> dict[str, Any]:
    """Return what tells rows from others: their number, tokens, and the lengths of some."""
    mine = lengths[rows[0] : rows[1]]
    return {
        "rows": list(rows),
        "tokens_per_epoch": int(mine.sum(dtype=np.int64)),
        "lengths_crc32": probed_crc32(mine),
    }


def probed_crc32(numbers: npt.NDArray[Any]) -> int:
    """Return a checksum of `PROBES` or a few more of the numbers."""
    step = max(1, len(numbers) // PROBES)
    return zlib.crc32(np.ascontiguousarray(numbers[::step], dtype="<i4").tobytes())


def check_arrays(
    arrays: Arrays,
    lengths: npt.NDArray[Any],
    rows: tuple[int, int],
    plan: SamplePlan,
    trusted: bool = False,
) -> str | None:
    """Return why index arrays from disk cannot belong to this plan, or None.

    Shapes and types must be the plan's. Unless the content is ``trusted`` to be this corpus',
    every row must be the split's and the last cut must lie where the lengths say.
    """
    count = rows[1] - rows[0]
    shapes = {
        "document_index": (count * plan.num_epochs,),
        "sample_index": (plan.num_samples + 1, 2),
        "shuffle_index": (plan.num_samples,),
    }
    dtypes = expected_dtypes(plan, count)
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            return f"{name} has shape {arrays[name].shape}, not {shape}"
        if name != "sample_index" and arrays[name].dtype != dtypes[name]:
            return f"{name} has type {arrays[name].dtype}, not {dtypes[name]}"
    position, offset = (int(value) for value in arrays["sample_index"][-1])
    document = arrays["document_index"]
    if trusted:
        return None
    if not 0 <= position < len(document):
        return f"sample_index ends at position {position} of {len(document)}"
    if document.min() < rows[0] or document.max() >= rows[1]:
        return f"document_index leaves rows {rows[0]} to {rows[1]}"
    reached = int(lengths[document[:position]].sum(dtype=np.int64)) + offset
    end = plan.num_samples * plan.seq_length
    if plan.keep_partial:
        end = min(end, plan.num_epochs * plan.tokens_per_epoch - plan.extra)
    if plan.num_samples and reached != end:
        return f"the last sample ends at token {reached}, not {end}"
    return None
