"""Which activations wait for their backward in host memory."""

from typing import Literal

from megatron.core.config import Config, check_at_least, option
from megatron.core.utils import UserError

EXPERT_MODULES = ("expert_fc1", "moe_act")
"""Modules that only a mixture of experts has."""


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
