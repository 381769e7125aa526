"""What an optimizer and its schedules are told; nothing here imports torch."""

from typing import Literal

from megatron.core.config import (
    Config,
    check_above,
    check_at_least,
    check_at_most,
    flag_of,
    option,
)
from megatron.core.optimizer.overrides import Override, read_override
from megatron.core.utils import UserError

MOST_STEPS = 100
"""Newton-Schulz iterations that still make sense."""


class OptimizerConfig(Config):
    """The update rule and what is done to the gradient before it."""

    optimizer: Literal["adam", "sgd", "muon", "lion"] = option("adam")
    """Update rule; muon is for matrices and leaves the rest to --muon-scalar-optimizer."""

    weight_decay: float = option(0.01)
    """Decay coefficient of matrices and embeddings; biases and norms are not decayed."""

    apply_wd_to_qk_layernorm: bool = option(False)
    """Decay the gains of the query and key norms too."""

    decoupled_weight_decay: bool = option(True)
    """Shrink weights beside Adam's step (AdamW); off, add the decay to the gradient (L2)."""

    decoupled_lr: float | None = option(None)
    """Peak learning rate of embedding and output head; that of all others when absent."""

    decoupled_min_lr: float | None = option(None)
    """Learning rate of embedding and output head at the end of the decay; --min-lr when absent."""

    optimizer_cpu_offload: bool = option(False)
    """Keep masters and states in host memory, and update them there."""

    optimizer_offload_fraction: float = option(1.0)
    """Share of each buffer's masters and states that --optimizer-cpu-offload keeps on the host."""

    overlap_cpu_optimizer_d2h_h2d: bool = option(False)
    """Let copies of gradients and weights run beside updates on the host."""

    pin_cpu_grads: bool = option(True)
    """Gradients on the host are in pinned memory."""

    pin_cpu_params: bool = option(True)
    """Weights travel from pinned memory of the host to the device."""

    clip_grad: float = option(1.0)
    """Largest global gradient norm; a larger gradient is scaled down to it, 0 turns this off."""

    adam_beta1: float = option(0.9)
    """Decay of Adam's first moment."""

    adam_beta2: float = option(0.999)
    """Decay of Adam's second moment."""

    adam_eps: float = option(1e-8)
    """Term that keeps Adam's denominator above zero."""

    sgd_momentum: float = option(0.9)
    """Momentum of SGD."""

    lion_beta1: float = option(0.95)
    """Weight of Lion's momentum in the sign that it steps by."""

    lion_beta2: float = option(0.98)
    """Decay of Lion's momentum."""

    muon_momentum: float = option(0.9)
    """Decay of Muon's momentum."""

    muon_nesterov: bool = option(False)
    """Look ahead by the momentum (Nesterov) before an update is made orthogonal."""

    muon_split_qkv: bool = option(True, aliases={"--muon-no-split-qkv": False})
    """Make queries, keys and values orthogonal each on its own, not as one matrix."""

    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = option("spectral")
    """Factor of an orthogonal update [M, N]: sqrt(max(M, N)), sqrt(M / N), sqrt(max(1, M / N))."""

    muon_extra_scale_factor: float = option(1.0)
    """Factor of orthogonal updates beside that; 0.2 with spectral makes them as large as Adam's."""

    muon_coefficient_type: Literal["quintic", "simple", "polar_express", "cans", "aol"] = option(
        "quintic"
    )
    """Coefficients of the Newton-Schulz iterations."""

    muon_num_ns_steps: int = option(5)
    """Newton-Schulz iterations."""

    muon_fp32_matmul_prec: Literal["medium", "high"] = option("medium")
    """Precision of the products in them: medium is bfloat16, high is fp32."""

    muon_tp_mode: Literal["blockwise", "duplicated", "distributed"] = option("duplicated")
    """How a matrix that is cut over tensor-parallel ranks is made orthogonal: each its part by
    itself (blockwise), all of it on each rank, or all of it together."""

    muon_scalar_optimizer: Literal["adam", "lion"] = option("adam")
    """Update rule of embeddings, head, biases and norms beside Muon."""

    param_group_overrides: tuple[str, ...] = option(())
    """Settings of parameters by name: PATTERN:lr_mult=0.5,wd_mult=0,optimizer=adam. The first
    pattern that a name matches holds; * stands for any text."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "weight_decay", "clip_grad", "decoupled_lr", "decoupled_min_lr")
        # Weights that never get a gradient would otherwise become 0 / 0.
        check_above(self, 0, "adam_eps", "muon_extra_scale_factor")
        check_at_least(self, 1, "muon_num_ns_steps")
        if not 0 <= self.optimizer_offload_fraction <= 1:
            raise UserError(
                f"--optimizer-offload-fraction ({self.optimizer_offload_fraction}) must be from 0 "
                "to 1"
            )
        if self.optimizer_cpu_offload and self.optimizer == "muon":
            raise UserError(
                "--optimizer-cpu-offload does not go with --optimizer muon, whose products are for "
                "the device; drop it (--use-distributed-optimizer shares states out), or use adam"
            )
        check_at_most(self, MOST_STEPS, "muon_num_ns_steps")
        momenta = ("adam_beta1", "adam_beta2", "sgd_momentum", "lion_beta1", "lion_beta2")
        for name in (*momenta, "muon_momentum"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                flag = flag_of(OptimizerConfig, name)
                raise UserError(f"{flag} ({value}) must be at least 0 and below 1")
        for text in self.param_group_overrides:
            override = read_override(text)
            if override.rule is not None and override.rule not in self.rules:
                raise UserError(
                    f"--param-group-overrides {text}: --optimizer {self.optimizer} has the rules "
                    f"{' and '.join(self.rules)}, not {override.rule}"
                )

    @property
    def offloaded_fraction(self) -> float:
        """Return the share of masters and states that is on the host."""
        return self.optimizer_offload_fraction if self.optimizer_cpu_offload else 0.0

    @property
    def rules(self) -> tuple[str, ...]:
        """Return the update rules of a run: that of matrices first, where they have their own."""
        if self.optimizer == "muon":
            return ("muon", self.muon_scalar_optimizer)
        return (self.optimizer,)

    @property
    def overrides(self) -> tuple[Override, ...]:
        """Return the settings of parameters by name."""
        return tuple(map(read_override, self.param_group_overrides))


class ScheduleConfig(Config):
    """Learning rate and weight decay over the run.

    With --train-iters lengths are given in iterations, with --train-samples in samples; they hold
    as it was given while the batch size ramps up.
    """

    lr: float | None = option(None)
    """Peak learning rate."""

    min_lr: float = option(0.0)
    """Learning rate at the end of the decay and after it."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = option(
        "linear"
    )
    """How the rate falls from its peak."""

    lr_decay_iters: int | None = option(None)
    """Iteration at which the decay ends; the run's last when absent."""

    lr_decay_samples: int | None = option(None)
    """Sample at which the decay ends; the run's last when absent."""

    lr_warmup_fraction: float | None = option(None)
    """Length of the warm-up as a fraction of the decay's."""

    lr_warmup_iters: int = option(0)
    """Length of the warm-up in iterations."""

    lr_warmup_samples: int = option(0)
    """Length of the warm-up in samples."""

    lr_warmup_init: float = option(0.0)
    """Learning rate that the warm-up starts from."""

    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = option(
        "exponential"
    )
    """How the rate falls at the end of a WSD schedule."""

    lr_wsd_decay_iters: int | None = option(None)
    """Length of that fall in iterations."""

    lr_wsd_decay_samples: int | None = option(None)
    """Length of that fall in samples."""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = option("constant")
    """How weight decay goes from --start-weight-decay to --end-weight-decay over the run."""

    start_weight_decay: float | None = option(None)
    """Weight decay at the start; absent with the constant style."""

    end_weight_decay: float | None = option(None)
    """Weight decay at the end; absent with the constant style."""

    override_opt_param_scheduler: bool = option(
        False,
        flag="--override-opt_param-scheduler",
        aliases=("--override-opt-param-scheduler",),
    )
    """Take the schedule from the flags although the checkpoint holds another one."""

    use_checkpoint_opt_param_scheduler: bool = option(
        False,
        flag="--use-checkpoint-opt_param-scheduler",
        aliases=("--use-checkpoint-opt-param-scheduler",),
    )
    """Take the schedule from the checkpoint although the flags give another one."""

    def __post_init__(self) -> None:
        self._check_rates()
        self._check_lengths()
        self._check_weight_decay()
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            raise UserError(
                "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude "
                "each other; drop one"
            )

    def _check_rates(self) -> None:
        check_at_least(self, 0, "min_lr")
        if self.lr is None:
            return
        if not self.lr >= self.min_lr:
            raise UserError(f"--lr ({self.lr}) must be at least --min-lr ({self.min_lr})")
        if not 0 <= self.lr_warmup_init <= self.lr:
            raise UserError(
                f"--lr-warmup-init ({self.lr_warmup_init}) must be from 0 to --lr ({self.lr})"
            )

    def _check_lengths(self) -> None:
        check_at_least(self, 1, "lr_decay_iters", "lr_decay_samples")
        check_at_least(self, 0, "lr_warmup_iters", "lr_warmup_samples")
        if self.lr_warmup_fraction is not None:
            if not 0 <= self.lr_warmup_fraction < 1:
                raise UserError(
                    f"--lr-warmup-fraction ({self.lr_warmup_fraction}) must be at least 0 and "
                    "below 1"
                )
            for name in ("lr_warmup_iters", "lr_warmup_samples"):
                if getattr(self, name):
                    flag = flag_of(ScheduleConfig, name)
                    raise UserError(
                        f"--lr-warmup-fraction ({self.lr_warmup_fraction}) and {flag} "
                        f"({getattr(self, name)}) both give the warm-up; drop one"
                    )

    def _check_weight_decay(self) -> None:
        start, end = self.start_weight_decay, self.end_weight_decay
        if self.weight_decay_incr_style == "constant":
            if start is not None or end is not None:
                raise UserError(
                    "--start-weight-decay and --end-weight-decay need "
                    "--weight-decay-incr-style linear or cosine; a constant one is --weight-decay"
                )
        elif start is None or end is None:
            raise UserError(
                f"--weight-decay-incr-style {self.weight_decay_incr_style} needs both "
                f"--start-weight-decay ({start}) and --end-weight-decay ({end})"
            )
        elif not 0 <= start <= end:
            raise UserError(
                f"--start-weight-decay ({start}) must be from 0 to --end-weight-decay ({end})"
            )
