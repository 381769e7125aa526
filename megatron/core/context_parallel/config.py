"""What a user chooses about context parallelism; plain Python."""

from megatron.core.config import Config, option
from megatron.core.context_parallel.checks import KINDS, layer_kinds
from megatron.core.utils import UserError


class ContextParallelConfig(Config):
    """How the attention of a sequence that is cut over ranks communicates."""

    cp_comm_type: tuple[str, ...] = option(("p2p",), metavar="KIND")
    """p2p (ring), all_gather, a2a (heads for positions) or a2a+p2p; one for all layers or one for
    each."""

    hierarchical_context_parallel_sizes: tuple[int, ...] | None = option(None, metavar="SIZE")
    """Ranks of an all-to-all and of a ring, for a2a+p2p; their product is the context-parallel
    size."""

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.cp_comm_type if kind not in KINDS]
        if unknown or not self.cp_comm_type:
            raise UserError(
                f"--cp-comm-type {' '.join(unknown) or 'without a value'}: choose from "
                f"{', '.join(KINDS)}"
            )

    def kinds(self, num_layers: int) -> tuple[str, ...]:
        """Return the kind of each layer.

        Raises:
            UserError: the number of kinds is neither one nor that of the layers.
        """
        return layer_kinds(self.cp_comm_type, num_layers)
