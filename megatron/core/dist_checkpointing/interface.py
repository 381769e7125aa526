"""What loading, resharding and tools ask of an open checkpoint, whichever its format.

Tensors by our keys, facts in our words, any box of any tensor in bounded memory. A format is a way
to make a `Reader`.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.plan import Piece
from megatron.core.progress import Told, untold
from megatron.core.sharding import Box


class TensorFacts(Protocol):
    """What is known of a stored tensor before it is read."""

    @property
    def dtype(self) -> str:
        """Return the name of the stored dtype, such as ``bfloat16``."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the logical shape."""
        ...

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the stored dtype as torch's."""
        ...

    @property
    def padded_to(self) -> int:
        """Return the multiple to which the rows are padded; 1: no row is padding."""
        ...


class Reader(Protocol):
    """An open checkpoint of any format."""

    @property
    def folder(self) -> Path:
        """Return where it lies."""
        ...

    @property
    def format(self) -> str:
        """Return the name of its format."""
        ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return what the run said about itself, in the words of our own checkpoints."""
        ...

    @property
    def files(self) -> Mapping[str, int]:
        """Return size in bytes by name, of the files that hold tensors."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorFacts]:
        """Return the stored tensors by our keys."""
        ...

    @property
    def hash(self) -> str:
        """Return what names the content."""
        ...

    def read(self, key: str, box: Box | None = None) -> Tensor:
        """Return a tensor, or one box of it, in the stored dtype."""
        ...

    def fill(self, key: str, piece: Piece) -> None:
        """Read one box of a tensor into a view, converting to its dtype; from any thread."""
        ...

    def damages(self, files: Iterable[str] | None = None, told: Told = untold) -> list[str]:
        """Return what is known not to be as it was written (in ``files``, or in all)."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...
