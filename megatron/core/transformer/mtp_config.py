"""Multi-token prediction: how far ahead, and how much it weighs."""

from megatron.core.config import Config, check_at_least, option


class MTPConfig(Config):
    """Layers after the last one that each predict one token further ahead."""

    mtp_num_layers: int | None = option(None)
    """Layers of multi-token prediction (DeepSeek-AI, 2024), of which each predicts one token
    further ahead; their losses are added to the main one."""

    mtp_loss_scaling_factor: float = option(0.1)
    """Weight of the mean of their losses."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "mtp_num_layers", "mtp_loss_scaling_factor")

    @property
    def depths(self) -> int:
        """Return the number of layers; 0 without multi-token prediction."""
        return self.mtp_num_layers or 0

    @property
    def loss_weights(self) -> dict[str, float]:
        """Return the weight of each depth's loss, by the name that logs have for it."""
        depths = self.depths
        return {
            f"mtp_{depth} loss": self.mtp_loss_scaling_factor / depths
            for depth in range(1, depths + 1)
        }
