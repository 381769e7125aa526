"""Which activations wait for their backward in host memory."""

from typing import Literal

from megatron.core.config import Config, as_words, check_at_least, option
from megatron.core.transformer.recompute_config import RecomputeConfig
from megatron.core.utils import UserError

EXPERT_MODULES = ("expert_fc1", "moe_act")
"""Modules that only a mixture of experts has."""

_MADE_AGAIN = (
    ("core_attn", "core_attn"),
    ("core_attn", "mla_up_proj"),
    ("qkv_linear", "layernorm"),
    ("moe_act", "moe_act"),
    ("moe_act", "moe"),
    ("expert_fc1", "moe"),
)
"""Parts of a layer, each with a part whose recomputation takes the same activations."""


class OffloadConfig(Config):
    """Activation offload: transfers in exchange for memory of the device."""

    cpu_offloading_num_layers: int = option(0)
    """First layers of the model whose activations wait in host memory."""

    fine_grained_activation_offloading: bool = option(False)
    """Let the parts of every layer that --offload-modules names wait in host memory."""

    offload_modules: tuple[
        Literal[
            "attn_norm",
            "qkv_linear",
            "core_attn",
            "attn_proj",
            "mlp_norm",
            "expert_fc1",
            "moe_act",
            "layer_input",
        ],
        ...,
    ] = option(())
    """Parts of a layer whose activations are moved; layer_input is the one thing that full
    recomputation keeps."""

    min_offloaded_tensor_size: int = option(2**20)
    """Elements below which an activation stays on the device."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "cpu_offloading_num_layers", "min_offloaded_tensor_size")
        if not self.fine_grained_activation_offloading:
            return
        if self.cpu_offloading_num_layers:
            raise UserError(
                f"--cpu-offloading-num-layers ({self.cpu_offloading_num_layers}) moves whole "
                "layers, --fine-grained-activation-offloading parts of every layer; drop one"
            )
        if not self.offload_modules:
            raise UserError(
                "--fine-grained-activation-offloading needs --offload-modules, such as "
                "--offload-modules core_attn attn_proj"
            )
        if "attn_proj" in self.offload_modules and "core_attn" not in self.offload_modules:
            raise UserError(
                "--offload-modules attn_proj: its input is the output of core_attn, whose backward "
                "reads it too, so that it would stay on the device; add core_attn"
            )

    @property
    def is_on(self) -> bool:
        """Return whether anything is moved."""
        return self.cpu_offloading_num_layers > 0 or self.fine_grained_activation_offloading

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the parts of every layer that are moved."""
        return self.offload_modules if self.fine_grained_activation_offloading else ()


def check_offload(offload: OffloadConfig, recompute: RecomputeConfig, num_layers: int) -> None:
    """Refuse what cannot be moved: activations that are not kept, and those of every layer.

    Raises:
        UserError: the first that there is.
    """
    moved, modules = offload.cpu_offloading_num_layers, offload.modules
    if moved and moved >= num_layers:
        raise UserError(
            f"--cpu-offloading-num-layers ({moved}) must be less than --num-layers ({num_layers}): "
            "backward begins with the last layers, which need not move"
        )
    if moved and recompute.granularity is not None:
        raise UserError(
            f"--cpu-offloading-num-layers ({moved}) and --recompute-granularity "
            f"{recompute.granularity} exclude each other; drop one, or move parts of layers with "
            "--fine-grained-activation-offloading"
        )
    if recompute.granularity == "full":
        others = [module for module in modules if module != "layer_input"]
        if others:
            raise UserError(
                f"--offload-modules {as_words(others)}: with --recompute-granularity full a layer "
                "keeps its input alone; give --offload-modules layer_input, or "
                "--recompute-granularity selective"
            )
    elif "layer_input" in modules:
        raise UserError(
            "--offload-modules layer_input is what --recompute-granularity full keeps; without "
            "that name parts of a layer, such as attn_norm core_attn attn_proj mlp_norm"
        )
    for module, remade in _MADE_AGAIN:
        if module in modules and remade in recompute.modules:
            raise UserError(
                f"--offload-modules {module} and --recompute-modules {remade} take the same "
                "activations; drop one"
            )
