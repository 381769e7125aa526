"""What a user chooses about context parallelism; plain Python."""

from megatron.core.config import Config, option
from megatron.core.context_parallel.checks import KINDS, check_sizes
from megatron.core.utils import UserError, nearest


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
            hint = nearest(unknown[0], KINDS, 1) if unknown else []
            raise UserError(
                f"--cp-comm-type {' '.join(unknown) or 'without a value'}: choose from "
                f"{', '.join(KINDS)}" + (f" (did you mean {hint[0]}?)" if hint else "")
            )

    def inner_size(self, cp: int) -> int:
        """Return how many of ``cp`` ranks an all-to-all joins in a two-level scheme, or 1.

        Raises:
            UserError: the sizes of the two levels do not make ``cp``.
        """
        if cp == 1 or "a2a+p2p" not in self.cp_comm_type:
            return 1
        return check_sizes(self.hierarchical_context_parallel_sizes, cp)[0]

    def kinds(self, num_layers: int) -> tuple[str, ...]:
        """Return the kind of each layer.

        Raises:
            UserError: the number of kinds is neither one nor that of the layers.
        """
        kinds = self.cp_comm_type
        if len(kinds) not in (1, num_layers):
            raise UserError(
                f"--cp-comm-type has {len(kinds)} values; give one for all layers or one for each "
                f"of --num-layers ({num_layers})"
            )
        return kinds if len(kinds) == num_layers else kinds * num_layers
