"""What a mixture of experts is made of; how tokens choose experts is the router's config."""

from collections.abc import Mapping
from typing import Any, Literal

from megatron.core.config import Config, as_words, check_at_least, option
from megatron.core.transformer.layer_pattern import parse_pattern
from megatron.core.utils import UserError


class MoEConfig(Config):
    """Layers whose channel block is a set of experts, of which each token visits a few."""

    num_experts: int | None = option(None)
    """Experts of a layer (Shazeer et al., 2017; Fedus et al., 2022); absent, no layer has any."""

    moe_layer_freq: int | tuple[int, ...] = option(1, parse=parse_pattern)
    """Layers with experts: every N-th from the first, or a pattern such as ([0]*3+[1]*58) with 1
    for such a layer."""

    moe_ffn_hidden_size: int = option(derived="--ffn-hidden-size")
    """Width of an expert's inner layer."""

    moe_latent_size: int | None = option(None)
    """Width in which tokens travel to routed experts and are worked on, between two projections
    (NVIDIA, 2025); absent, it is the model's. Router and shared experts see the whole width."""

    moe_shared_expert_intermediate_size: int | None = option(None)
    """Width of the experts that every token visits, together; absent, there are none."""

    moe_shared_expert_gate: bool = option(False)
    """Scale what the shared experts add to a token by a sigmoid of the token."""

    moe_shared_expert_overlap: bool = option(False)
    """Let shared experts compute while the tokens travel (alltoall only)."""

    moe_token_dispatcher_type: Literal["allgather", "alltoall", "alltoall_seq", "flex"] = option(
        "allgather"
    )
    """How tokens reach their experts: all to every rank, or each to the ranks of its experts
    (alltoall; alltoall_seq is the same here; flex by a package)."""

    moe_flex_dispatcher_backend: Literal["deepep"] = option("deepep")
    """The package of --moe-token-dispatcher-type flex."""

    moe_flex_dispatcher_num_sms: int | None = option(None)
    """Multiprocessors that the package takes; absent, its own choice."""

    moe_grouped_gemm: bool = option(False)
    """Multiply all experts of a rank in one call, where the device has one; else one by one."""

    moe_permute_fusion: bool = option(False)
    """Sort tokens by expert, and join their outputs with their weights, in one kernel each; its
    backward keeps less."""

    @classmethod
    def derive(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Let an expert be as wide as the MLP of a dense layer."""
        return {"moe_ffn_hidden_size": values["ffn_hidden_size"]}

    def __post_init__(self) -> None:
        check_at_least(self, 1, "num_experts", "moe_ffn_hidden_size")
        check_at_least(self, 1, "moe_shared_expert_intermediate_size", "moe_latent_size")
        check_at_least(self, 1, "moe_flex_dispatcher_num_sms")
        if self.moe_shared_expert_gate and self.moe_shared_expert_intermediate_size is None:
            raise UserError(
                "--moe-shared-expert-gate scales shared experts; give their width by "
                "--moe-shared-expert-intermediate-size, or drop it"
            )
        if self.moe_shared_expert_overlap:
            self._check_overlap()

    def _check_overlap(self) -> None:
        if self.moe_shared_expert_intermediate_size is None:
            raise UserError(
                "--moe-shared-expert-overlap lets shared experts compute while tokens travel; give "
                "their width by --moe-shared-expert-intermediate-size, or drop it"
            )
        if not self.exchanges:
            raise UserError(
                "--moe-shared-expert-overlap needs tokens that travel by all-to-all, which "
                f"--moe-token-dispatcher-type {self.moe_token_dispatcher_type} does not; choose "
                "--moe-token-dispatcher-type alltoall, or drop it"
            )

    @property
    def exchanges(self) -> bool:
        """Return whether tokens travel by all-to-all, where they travel."""
        return self.moe_token_dispatcher_type in ("alltoall", "alltoall_seq")

    def check_layers(self, num_layers: int) -> None:
        """Refuse a pattern that does not fit ``num_layers``.

        Raises:
            UserError: it names another number of layers, holds other numbers than 0 and 1, or
                leaves no layer for the experts of a model that has some.
        """
        freq = self.moe_layer_freq
        if isinstance(freq, int):
            check_at_least(self, 1, "moe_layer_freq")
        elif len(freq) != num_layers:
            raise UserError(
                f"--moe-layer-freq names {len(freq)} layers, --num-layers is {num_layers}"
            )
        elif not set(freq) <= {0, 1}:
            raise UserError(f"--moe-layer-freq ({as_words(freq)}): a pattern holds 0 and 1 only")
        elif self.num_experts is not None and not any(freq):
            raise UserError(
                f"--moe-layer-freq ({as_words(freq)}) leaves no layer for --num-experts "
                f"({self.num_experts}); give 1 to a layer, or leave --num-experts out for a dense "
                "model"
            )

    def layer_has_experts(self, layer: int) -> bool:
        """Return whether layer ``layer`` (from 0) is one with experts."""
        if self.num_experts is None:
            return False
        if isinstance(self.moe_layer_freq, int):
            return layer % self.moe_layer_freq == 0
        return self.moe_layer_freq[layer] == 1
