"""Which activations are made again in backward instead of being kept."""

from collections.abc import Sequence
from typing import Literal

from megatron.core.config import Config, check_at_least, option
from megatron.core.utils import UserError

EXPERT_MODULES = ("moe", "moe_act", "shared_experts")
"""Modules that only a mixture of experts has."""


class RecomputeConfig(Config):
    """Recomputation: operations in exchange for memory."""

    recompute_granularity: Literal["full", "selective"] | None = option(None)
    """Keep the inputs of whole layers only, or leave out what --recompute-modules names."""

    recompute_activations: bool = option(False)
    """The same as --recompute-granularity selective."""

    recompute_method: Literal["uniform", "block"] | None = option(None)
    """With full: all layers of a stage in units of --recompute-num-layers, or the first
    --recompute-num-layers of each stage, one by one."""

    recompute_num_layers: int | None = option(None)
    """Layers of a unit, or layers of a stage that are recomputed; of a virtual stage where a rank
    has several."""

    recompute_modules: (
        tuple[
            Literal[
                "core_attn",
                "layernorm",
                "mla_up_proj",
                "mlp",
                "moe",
                "moe_act",
                "shared_experts",
            ],
            ...,
        ]
        | None
    ) = option(None)
    """With selective: the parts of a layer that are recomputed; core_attn when absent. Of layernorm
    and mla_up_proj the outputs are made again too; moe has shared_experts in it."""

    distribute_saved_activations: bool = option(False)
    """With full: keep a share of each unit's input on every tensor-parallel rank."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "recompute_num_layers")
        if self.recompute_activations and self.recompute_granularity == "full":
            raise UserError(
                "--recompute-activations asks for --recompute-granularity selective, not full; "
                "drop one"
            )
        if self.granularity == "full":
            self._check_full()
        elif self.granularity == "selective":
            self._check_selective()
        if self.distribute_saved_activations and self.granularity != "full":
            raise UserError(
                "--distribute-saved-activations shares the inputs of whole layers; give "
                "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1, "
                "or drop it"
            )

    def _check_full(self) -> None:
        if self.recompute_method is None:
            raise UserError(
                "--recompute-granularity full needs --recompute-method: uniform for all layers, or "
                "block for some of each stage"
            )
        if self.recompute_num_layers is None:
            raise UserError(
                "--recompute-granularity full needs --recompute-num-layers: the layers of a unit "
                "(uniform), or of a stage (block); try --recompute-num-layers 1"
            )
        if self.recompute_method == "uniform" and self.recompute_num_layers == 0:
            raise UserError(
                "--recompute-num-layers (0): a unit has at least 1 layer; with --recompute-method "
                "block 0 recomputes none"
            )

    def _check_selective(self) -> None:
        for flag, value in (
            ("--recompute-method", self.recompute_method),
            ("--recompute-num-layers", self.recompute_num_layers),
        ):
            if value is not None:
                raise UserError(
                    f"{flag} ({value}) is for whole layers, --recompute-granularity selective for "
                    "parts of every layer; drop it, or use --recompute-granularity full"
                )

    @property
    def granularity(self) -> Literal["full", "selective"] | None:
        """Return what is recomputed: whole layers, parts of each, or nothing."""
        return "selective" if self.recompute_activations else self.recompute_granularity

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the parts of every layer that are recomputed."""
        if self.granularity != "selective":
            return ()
        given = ("core_attn",) if self.recompute_modules is None else self.recompute_modules
        # What is made again with all of its block is not made a third time.
        return tuple(name for name in given if name != "shared_experts" or "moe" not in given)

    @property
    def covers_prediction_ahead(self) -> bool:
        """Return whether layers of multi-token prediction are recomputed whole, each as a unit."""
        return self.granularity == "full" and self.recompute_method == "uniform"

    def units(self, layers: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the layers of a stage that are recomputed as a whole, by unit, in order."""
        count = self.recompute_num_layers
        if self.granularity != "full" or count is None:
            return []
        if self.recompute_method == "block":
            return [(layer,) for layer in layers[:count]]
        return [tuple(layers[i : i + count]) for i in range(0, len(layers), count)]
