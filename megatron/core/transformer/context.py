"""What travels with the activations of one forward pass, beside them.

One `Context` is made per microbatch by the model and read by every block: positions, documents,
caches, and the key of the dropout masks. Blocks take ``(x_SBH, context)`` and give ``y_SBH``.

Shapes: S positions of this rank, B batch, H hidden size, T keys so far, g query groups, D head
size, f rotated channels.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron.core.kernels.attention import Packing
from megatron.core.rng import DropoutKey
from megatron.core.transformer.moe.balance import Balance


class KeyValueCache(Protocol):
    """What attention needs of a cache while text is generated."""

    def append(self, layer: int, k_SBgD: Tensor, v_SBgD: Tensor) -> tuple[Tensor, Tensor]:
        """Keep new keys and values of a layer, and return all of them, ``[T, B, g, D]``.

        Keys of sample b stand at their positions: the one of position j at row j.
        """
        ...


@dataclass(frozen=True)
class Context:
    """The surroundings of one forward pass."""

    rotary: tuple[Tensor, Tensor] | None = None
    """Cosines and sines, ``[S, f]`` or ``[S, B, f]``."""
    packing: Packing | None = None
    """Documents that attend only within themselves."""
    dropout: DropoutKey | None = None
    """None switches dropout off, as in evaluation."""
    cache: KeyValueCache | None = None
    query_positions_BS: Tensor | None = None
    """Where the queries stand among the cached keys."""
    balance: Balance | None = None
    """Where layers with experts leave their auxiliary losses; None where these do not count."""
    valid_SB: Tensor | None = None
    """Tokens that count in the auxiliary losses of routers, bool, of the positions that this
    context-parallel rank holds; None for all."""
    tokens_SB: Tensor | None = None
    """Token ids, int64, of the same positions: routers of the first layers may go by them."""
    valid_BT: Tensor | None = None
    """Positions of whole samples that self-attention may look at, bool, also on a rank that holds
    a part of them; None for all. The others are padding. Of an encoder with a decoder, which is
    told the same (`Encoded`); padding of an encoder alone is a document of its own (`packing`)."""
    bias_1nST: Tensor | None = None
    """What self-attention adds to its scores, of this rank's heads and queries, and all keys."""
    encoded: "Encoded | None" = None
    """What cross-attention looks at."""


@dataclass(frozen=True)
class Encoded:
    """An encoder's output, as a decoder sees it."""

    x_TBH: Tensor
    """Of the positions that this rank holds."""
    valid_BT: Tensor | None = None
    """Those of whole samples that are no padding, as `Context.valid_BT`."""
    kept: dict[int, Tensor] | None = None
    """While text is generated: by layer, what cross-attention has made of it."""
