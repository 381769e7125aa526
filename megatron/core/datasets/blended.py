"""Several data sets mixed in given shares; sample ``i`` is a pure function of the blend."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.bert import BertDataset
from megatron.core.datasets.gpt import GPTDataset, Sample
from megatron.core.datasets.t5 import T5Dataset

Member = GPTDataset | T5Dataset | BertDataset

DatasetIndex = tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]


class BlendedDataset:
    """Sample ``i`` comes from member ``index[0][i]``, whose sample ``index[1][i]`` it is."""

    def __init__(
        self,
        members: Sequence[Member],
        weights: list[float] | list[int],
        index: DatasetIndex,
        description: dict[str, Any] | None = None,
    ) -> None:
        self.members = members
        self.weights = weights
        self.index = index
        self.description = description or {}

    def __len__(self) -> int:
        return len(self.index[0])

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)} of a blend")
        return self.members[int(self.index[0][i])][int(self.index[1][i])]

    def consumed(self, samples: int) -> list[int]:
        """Return how many of the first ``samples`` came from each member."""
        counts = np.zeros(len(self.members), dtype=np.int64)
        block = 1 << 24
        samples = min(samples, len(self))
        for start in range(0, samples, block):
            part = self.index[0][start : min(start + block, samples)]
            counts += np.bincount(part, minlength=len(self.members))
        return counts.tolist()  # type: ignore[no-any-return]


Dataset = Member | BlendedDataset
