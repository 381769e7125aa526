"""Which dtype weights, gradients and losses are held in; names are strings, so no torch here."""

from megatron.core.config import Config, option
from megatron.core.utils import UserError


class PrecisionConfig(Config):
    """Number formats of a run."""

    bf16: bool = option(False)
    """Hold weights and activations in bfloat16, with fp32 masters and fp32 gradients."""

    fp64: bool = option(False)
    """Run the whole stack in float64, to compare layouts to the last digit."""

    def __post_init__(self) -> None:
        if self.bf16 and self.fp64:
            raise UserError("--bf16 and --fp64 exclude each other; drop one of them")

    @property
    def params_dtype(self) -> str:
        """Return the dtype of weights and activations."""
        return "bfloat16" if self.bf16 else "float64" if self.fp64 else "float32"

    @property
    def accumulation_dtype(self) -> str:
        """Return the dtype of sums: losses, norms, gradients; at least fp32."""
        return "float64" if self.fp64 else "float32"
