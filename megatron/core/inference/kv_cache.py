"""Keys and values of tokens already read, so that each new token costs one position.

Row j of a sample holds position j. Prompts of different lengths are padded on the right: what
padding wrote is overwritten when the sample's own tokens reach that position, and no query sees
beyond its own position before that.

Shapes: T positions, S new tokens, B batch, g query groups, D channels of a head, which may be
others for values than for keys.
"""

import torch
from torch import Tensor


class StaticCache:
    """Room for ``length`` positions of ``batch`` samples in every layer."""

    def __init__(self, length: int, batch: int) -> None:
        self.length, self.batch = length, batch
        self.positions_BS: Tensor | None = None
        """Where the next tokens go; None for whole prompts from position 0."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._used = 0

    def place(self, positions_BS: Tensor | None) -> None:
        """Say where the tokens of the next forward stand."""
        self.positions_BS = positions_BS
        if positions_BS is not None:
            self._used = max(self._used, int(positions_BS.max()) + 1)
            assert self._used <= self.length, f"position {self._used - 1} of {self.length}"

    def append(self, layer: int, k_SBgD: Tensor, v_SBgD: Tensor) -> tuple[Tensor, Tensor]:
        """Keep new keys and values of a layer and return all up to the last position in use."""
        if layer not in self._layers:
            self._layers[layer] = (self._room(k_SBgD), self._room(v_SBgD))
        keys, values = self._layers[layer]
        if self.positions_BS is None:
            count = k_SBgD.shape[0]
            assert count <= self.length, f"prompt of {count} tokens in {self.length} positions"
            keys[:count], values[:count] = k_SBgD, v_SBgD
            self._used = max(self._used, count)
            return k_SBgD, v_SBgD
        rows_SB = self.positions_BS.t()
        samples = torch.arange(self.batch, device=rows_SB.device).expand_as(rows_SB)
        keys[rows_SB, samples], values[rows_SB, samples] = k_SBgD, v_SBgD
        return keys[: self._used], values[: self._used]

    def _room(self, like_SBgD: Tensor) -> Tensor:
        # Zeros, not garbage: a NaN under the mask would still poison the product with it.
        return like_SBgD.new_zeros(self.length, self.batch, *like_SBgD.shape[2:])
