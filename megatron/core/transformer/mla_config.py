"""Multi-latent attention: ranks of the latents, head sizes, and rotary scaling of its own."""

from collections.abc import Mapping
from typing import Any, Literal

from megatron.core.config import Config, check_above, check_at_least, option
from megatron.core.utils import UserError


class MLAConfig(Config):
    """Queries, keys and values from low-rank latents (DeepSeek-AI, 2024)."""

    multi_latent_attention: bool = option(False)
    """Make keys and values from one low-rank latent per token, beside a rotary key that all heads
    share."""

    q_lora_rank: int | None = option(None)
    """Rank of the queries' latent; queries come straight from the hidden state when absent."""

    kv_lora_rank: int = option(32)
    """Rank of the latent of keys and values."""

    qk_head_dim: int = option(128)
    """Channels of a query or key head that carry no position."""

    qk_pos_emb_head_dim: int = option(64)
    """Channels of a query or key head that rotate."""

    v_head_dim: int = option(128)
    """Channels of a value head."""

    rope_type: Literal["rope", "yarn"] = option(
        derived="yarn with --multi-latent-attention, else rope"
    )
    """Frequencies of the rotary channels: plain, or scaled by YaRN."""

    rotary_scaling_factor: float = option(1.0)
    """How many times the context is extended by YaRN; the attention's scale grows with it."""

    original_max_position_embeddings: int = option(4096)
    """Context before that extension."""

    beta_fast: float = option(32.0)
    """Rotations per context above which a frequency is left alone."""

    beta_slow: float = option(1.0)
    """Rotations per context below which a frequency is interpolated."""

    mscale: float = option(1.0)
    """Strength of YaRN's attention temperature on the rotary channels."""

    mscale_all_dim: float = option(0.0)
    """Strength of that temperature on all channels, as part of the attention's scale."""

    @classmethod
    def derive(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return Megatron's kind of frequencies for either kind of attention."""
        return {"rope_type": "yarn" if values["multi_latent_attention"] else "rope"}

    def __post_init__(self) -> None:
        check_at_least(self, 1, "q_lora_rank", "kv_lora_rank", "qk_head_dim", "v_head_dim")
        check_at_least(self, 1, "rotary_scaling_factor", "original_max_position_embeddings")
        check_at_least(self, 2, "qk_pos_emb_head_dim")
        check_above(self, 0, "beta_fast", "beta_slow")
        if not self.beta_fast > self.beta_slow:
            raise UserError(
                f"--beta-fast ({self.beta_fast}) must be above --beta-slow ({self.beta_slow})"
            )
        if self.rope_type == "yarn" and not self.multi_latent_attention:
            raise UserError(
                "--rope-type yarn is for --multi-latent-attention; other attention takes "
                "--position-embedding-type yarn and the flags that begin with --yarn"
            )

    @property
    def query_size(self) -> int:
        """Return the channels of a query or key head."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def down_size(self) -> int:
        """Return the channels of the latent of keys and values, with the rotary key beside it."""
        return self.kv_lora_rank + self.qk_pos_emb_head_dim
