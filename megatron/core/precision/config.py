"""Which dtype weights, gradients and states are held in; names are strings, so no torch here.

    --bf16, --fp16    weights and activations in half, masters and gradients in fp32
    neither           fp32 throughout
    --fp64            float64 throughout, to compare layouts to the last digit

fp16 has 5 bits of exponent: gradients below 6e-8 vanish and above 65504 overflow, so its backward
starts from a loss times a scale (`loss_scaler`). bf16 has fp32's range and needs none.
"""

from collections.abc import Mapping
from typing import Any, Literal

from megatron.core.config import Config, check_above, check_at_least, flag_of, option
from megatron.core.utils import UserError

NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""torch's names of the formats that flags name."""


class PrecisionConfig(Config):
    """Number formats of a run."""

    bf16: bool = option(False)
    """Hold weights and activations in bfloat16, with fp32 masters and fp32 gradients."""

    fp16: bool = option(False)
    """Hold weights and activations in float16, with fp32 masters and gradients and a loss scale."""

    fp64: bool = option(False)
    """Run the whole stack in float64, to compare layouts to the last digit."""

    loss_scale: float | None = option(None)
    """Multiply the loss that backward starts from by this; absent or 0, --fp16 adapts its scale."""

    initial_loss_scale: float = option(2.0**32)
    """Loss scale that --fp16 starts from; one that is too large falls in a few iterations."""

    min_loss_scale: float = option(1.0)
    """Loss scale below which --fp16 does not go."""

    loss_scale_window: float = option(1000)
    """Iterations without an overflow after which the loss scale doubles; a whole number."""

    hysteresis: int = option(2)
    """Overflows after which the loss scale is halved; counted anew when it doubles."""

    accumulate_allreduce_grads_in_fp32: bool = option(
        derived="on, unless --grad-reduce-in-bf16 or --main-grads-dtype bf16 says otherwise"
    )
    """Sum gradients over microbatches and replicas in fp32; off, in the dtype of the weights."""

    grad_reduce_in_bf16: bool = option(False)
    """Sum gradients over replicas in bfloat16; needs --bf16."""

    use_precision_aware_optimizer: bool = option(False)
    """Let the dtypes of masters, gradients and Adam's moments be chosen."""

    main_grads_dtype: Literal["fp32", "bf16"] = option("fp32")
    """Dtype of the gradients that the optimizer reads."""

    main_params_dtype: Literal["fp32", "fp16"] = option("fp32")
    """Dtype of the masters of half-precision weights."""

    exp_avg_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = option("fp32")
    """Dtype of Adam's first moment; fp16 has a scale for every 64 numbers."""

    exp_avg_sq_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = option("fp32")
    """Dtype of Adam's second moment; fp16 has a scale for every 64 numbers."""

    @classmethod
    def derive(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Gradients are summed in fp32 unless another flag asks for less."""
        coarse = values["grad_reduce_in_bf16"] and values["bf16"]
        fp32 = not coarse and values["main_grads_dtype"] == "fp32"
        return {"accumulate_allreduce_grads_in_fp32": fp32}

    def __post_init__(self) -> None:
        asked = [name for name in ("bf16", "fp16", "fp64") if getattr(self, name)]
        if len(asked) > 1:
            first, second = (f"--{name}" for name in asked[:2])
            raise UserError(f"{first} and {second} exclude each other; drop one of them")
        self._check_loss_scale()
        self._check_optimizer_dtypes()

    def _check_loss_scale(self) -> None:
        check_at_least(self, 0, "loss_scale")
        check_above(self, 0, "min_loss_scale")
        check_at_least(self, 1, "hysteresis", "loss_scale_window")
        if self.loss_scale_window != int(self.loss_scale_window):
            raise UserError(
                f"--loss-scale-window ({self.loss_scale_window}) counts iterations and must be a "
                "whole number"
            )
        if not self.initial_loss_scale >= self.min_loss_scale:
            raise UserError(
                f"--initial-loss-scale ({self.initial_loss_scale:g}) must be at least "
                f"--min-loss-scale ({self.min_loss_scale:g})"
            )

    def _check_optimizer_dtypes(self) -> None:
        chosen = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
        for name in chosen:
            value, said = getattr(self, name), flag_of(PrecisionConfig, name)
            if value == "fp32":
                continue
            if not self.use_precision_aware_optimizer:
                raise UserError(
                    f"{said} {value} needs --use-precision-aware-optimizer; give that too, or "
                    f"leave {said} out"
                )
            if value == "fp8":
                # A step changes a moment by less than half of the last of so few bits.
                raise UserError(
                    f"{said} fp8 is not built: its 4 bits would round the steps of a moment away, "
                    f"which takes another way of rounding; use {said} bf16 or fp16"
                )
            if self.fp64:
                raise UserError(f"{said} {value} contradicts --fp64; drop one of them")
        if self.main_grads_dtype == "bf16" and not self.bf16:
            raise UserError("--main-grads-dtype bf16 needs --bf16; add it or use fp32")
        if self.main_grads_dtype == "bf16" and self.accumulate_allreduce_grads_in_fp32:
            raise UserError(
                "--main-grads-dtype bf16 contradicts --accumulate-allreduce-grads-in-fp32; drop "
                "one of them"
            )
        if self.main_params_dtype == "fp16" and not self.bf16:
            why = "its weights are fp16 already" if self.fp16 else "fp32 weights have no masters"
            raise UserError(f"--main-params-dtype fp16 needs --bf16 ({why}); use fp32")

    @property
    def params_dtype(self) -> str:
        """Return the dtype of weights and activations."""
        if self.fp16:
            return "float16"
        return "bfloat16" if self.bf16 else self.accumulation_dtype

    @property
    def accumulation_dtype(self) -> str:
        """Return the dtype of sums such as losses and norms; at least fp32."""
        return "float64" if self.fp64 else "float32"

    @property
    def grad_dtype(self) -> str:
        """Return the dtype in which gradients are accumulated over microbatches."""
        if self.accumulate_allreduce_grads_in_fp32:
            return self.accumulation_dtype
        return self.params_dtype

    @property
    def reduce_dtype(self) -> str:
        """Return the dtype in which gradients are summed over replicas."""
        if self.grad_reduce_in_bf16 and self.bf16:
            return "bfloat16"
        return self.grad_dtype

    @property
    def main_dtype(self) -> str:
        """Return the dtype of the weights that are updated: of masters, where there are."""
        return NAMES[self.main_params_dtype] if self.bf16 else self.accumulation_dtype

    @property
    def state_dtypes(self) -> dict[str, str]:
        """Return the dtypes of Adam's moments by the name of the moment."""
        if self.fp64:
            return {"exp_avg": "float64", "exp_avg_sq": "float64"}
        return {"exp_avg": NAMES[self.exp_avg_dtype], "exp_avg_sq": NAMES[self.exp_avg_sq_dtype]}

    @property
    def is_scale_dynamic(self) -> bool:
        """Return whether the loss scale follows the overflows."""
        return self.fp16 and not self.loss_scale
