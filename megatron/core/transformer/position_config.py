"""How a token's position reaches the model, as a user says it; plain Python."""

from collections.abc import Mapping
from typing import Any, Literal

from megatron.core.config import Config, check_above, check_at_least, option
from megatron.core.transformer.layer_pattern import parse_pattern
from megatron.core.utils import UserError


class PositionConfig(Config):
    """How a token's position reaches the model."""

    position_embedding_type: Literal[
        "learned_absolute", "rope", "yarn", "alibi", "relative", "none"
    ] = option("learned_absolute")
    """Learned vectors, rotary (plain or YaRN-scaled), linear attention biases, learned attention
    biases by distance as T5's (relative; of an encoder and a decoder), or nothing."""

    max_position_embeddings: int = option(derived="--seq-length")
    """Longest position: rows of the learned table, and what rotary scaling starts from."""

    rotary_base: int = option(10000)
    """Base of the rotary frequencies."""

    rotary_percent: float = option(1.0)
    """Share of each head's channels that rotate; the leading ones."""

    rotary_interleaved: bool = option(False)
    """Pair even and odd channels instead of the two halves."""

    rotary_seq_len_interpolation_factor: int | None = option(None)
    """Divide positions by this factor."""

    use_rope_scaling: bool = option(False)
    """Rescale frequencies as Llama 3.x does."""

    rope_scaling_factor: float = option(8.0)
    """Factor of that rescaling."""

    yarn_rotary_scaling_factor: float = option(1.0)
    """How many times the context is extended by YaRN."""

    yarn_original_max_position_embeddings: int = option(derived="--max-position-embeddings")
    """Context before YaRN's extension."""

    yarn_beta_fast: float = option(32.0)
    """Rotations per context above which a frequency is left alone."""

    yarn_beta_slow: float = option(1.0)
    """Rotations per context below which a frequency is interpolated."""

    yarn_mscale: float = option(1.0)
    """Strength of YaRN's attention temperature."""

    yarn_mscale_all_dim: float = option(0.0)
    """Second term of that temperature."""

    yarn_correction_range_round_to_int: bool = option(True)
    """Round the ends of YaRN's ramp to whole channels."""

    no_rope_freq: int | tuple[int, ...] | None = option(None, parse=parse_pattern)
    """Layers without rotary positions: every N-th, or a pattern with 1 for such a layer."""

    relative_attention_num_buckets: int = option(32)
    """Ranges of distances that have a learned bias each, with relative positions."""

    relative_attention_max_distance: int = option(128)
    """Distance from which on all share one bias, with relative positions."""

    @classmethod
    def derive(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Let positions reach as far as the sequence."""
        lengths = values.get("seq_length"), values.get("decoder_seq_length")
        longest = max((length for length in lengths if length is not None), default=None)
        longest = values.get("max_position_embeddings") or longest
        return {
            "max_position_embeddings": longest,
            "yarn_original_max_position_embeddings": longest,
        }

    def __post_init__(self) -> None:
        if not 0.0 < self.rotary_percent <= 1.0:
            raise UserError(f"--rotary-percent ({self.rotary_percent}) must lie in (0, 1]")
        check_above(self, 0, "rope_scaling_factor", "yarn_beta_fast", "yarn_beta_slow")
        check_at_least(self, 1, "rotary_seq_len_interpolation_factor", "yarn_rotary_scaling_factor")
        check_at_least(self, 1, "max_position_embeddings", "yarn_original_max_position_embeddings")
        if self.position_embedding_type == "yarn" and not self.yarn_beta_fast > self.yarn_beta_slow:
            raise UserError(
                f"--yarn-beta-fast ({self.yarn_beta_fast}) must be above --yarn-beta-slow "
                f"({self.yarn_beta_slow})"
            )
        self._check_relative()
        # YaRN divides by the logarithm of the base.
        check_above(self, 1 if self.position_embedding_type == "yarn" else 0, "rotary_base")

    def _check_relative(self) -> None:
        buckets, distance = (
            self.relative_attention_num_buckets,
            self.relative_attention_max_distance,
        )
        check_at_least(self, 4, "relative_attention_num_buckets")
        if buckets % 2:
            raise UserError(
                f"--relative-attention-num-buckets ({buckets}) must be even: an encoder has half "
                f"of them for each direction; give {buckets + 1}"
            )
        if distance <= buckets // 2:
            raise UserError(
                f"--relative-attention-max-distance ({distance}) must be above half of "
                f"--relative-attention-num-buckets ({buckets}), whose first half is of one "
                "distance each"
            )

    @property
    def is_rotary(self) -> bool:
        """Queries and keys are rotated."""
        return self.position_embedding_type in ("rope", "yarn")

    def rotated_channels(self, head_size: int) -> int:
        """Return how many channels of a head rotate."""
        return int(head_size * self.rotary_percent)

    def layer_rotates(self, layer: int) -> bool:
        """Return whether layer ``layer`` (from 0) rotates its queries and keys."""
        if self.no_rope_freq is None or not self.is_rotary:
            return self.is_rotary
        if isinstance(self.no_rope_freq, int):
            return (layer + 1) % self.no_rope_freq != 0
        return self.no_rope_freq[layer] == 0
