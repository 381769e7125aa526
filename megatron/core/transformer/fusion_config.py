"""Which operations run fused, where there is a fused version of them.

Where there is none, as on the CPU, the separate one runs. Both compute the same function, to
rounding; masks of dropout alone are drawn by other generators (`core.kernels.dropout`).
"""

from typing import Literal

from megatron.core.config import Config, option


class FusionConfig(Config):
    """Fused operations."""

    masked_softmax_fusion: bool = option(True)
    """With --attention-backend unfused: scale, mask and softmax in one kernel."""

    bias_swiglu_fusion: bool = option(True)
    """Gated activations, and the bias before them, in one kernel."""

    bias_dropout_fusion: bool = option(True)
    """The bias at a block's end, dropout and the sum with the residual stream in one kernel."""

    rope_fusion: bool = option(True)
    """Rotate queries and keys in one kernel, or in place."""

    persist_layer_norm: bool = option(True)
    """Norms whose programs hold whole rows in registers, instead of torch's own."""

    cross_entropy_loss_fusion: bool = option(False)
    """Cross entropy in one kernel each way, without an fp32 copy of the logits."""

    cross_entropy_fusion_impl: Literal["native", "te"] = option("native")
    """With --cross-entropy-loss-fusion: this project's kernel, or Transformer Engine's."""
