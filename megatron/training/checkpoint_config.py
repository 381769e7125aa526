"""Checkpoints: what is saved and loaded, where and when."""

from typing import Literal

from megatron.core.config import Config, check_at_least, option
from megatron.core.dist_checkpointing.config import SpeedConfig
from megatron.core.dist_checkpointing.strictness import Strictness
from megatron.core.utils import UserError
from megatron.training.recovery_config import RecoveryConfig


class CheckpointConfig(Config):
    """What is saved and loaded, where and when."""

    save: str | None = option(None, metavar="DIR")
    """Folder for checkpoints."""

    save_interval: int | None = option(None, aliases=("--persistent-save-interval",))
    """Iterations between checkpoints; one is always written at the end when --save is given."""

    save_retain_interval: int | None = option(None)
    """Keep older checkpoints only where this number divides the iteration (and the newest)."""

    save_keep_last: int | None = option(None)
    """Keep the newest N checkpoints, and those that --save-retain-interval keeps."""

    save_optim: bool = option(True)
    """Store the optimizer's state."""

    save_rng: bool = option(True)
    """Store the state of the random generators."""

    load: str | None = option(None, metavar="DIR")
    """Folder to continue from; absent or empty, training starts from scratch with a warning."""

    ckpt_step: int | None = option(None)
    """Load this iteration instead of the newest: of --load, or of --pretrained-checkpoint when only
    that is given."""

    override_ckpt_iteration: int | None = option(None)
    """Count on from this iteration, whatever the checkpoint says; samples go on as stored."""

    load_optim: bool = option(True)
    """Restore the optimizer's state."""

    load_rng: bool = option(True)
    """Restore the state of the random generators."""

    finetune: bool = option(False)
    """Load weights only and start at iteration 0."""

    pretrained_checkpoint: str | None = option(None, metavar="DIR")
    """Weights to start from when --load holds no checkpoint."""

    moe_use_upcycling: bool = option(False)
    """Make the experts of a new run of a dense checkpoint, that of --load or
    --pretrained-checkpoint; outputs are equal at the start."""

    moe_upcycling_granularity: int = option(1)
    """With --moe-use-upcycling: slices of a dense MLP, each of which is an expert of its own."""

    exit_on_missing_checkpoint: bool = option(False)
    """Stop instead of starting from scratch when --load holds no checkpoint."""

    verify_integrity: bool = option(True)
    """Compare every checksum of a checkpoint before it is loaded; off reads its bytes once."""

    dist_ckpt_strictness: Strictness = option("raise_all")
    """What to do when checkpoint and run do not hold the same tensors."""

    exit_on_failed_save: bool = option(False)
    """Stop when a checkpoint cannot be written, instead of training on without it."""

    speed: SpeedConfig = SpeedConfig.resolve()

    use_checkpoint_args: bool = option(False)
    """Take the model's architecture from the checkpoint."""

    use_mp_args_from_checkpoint_args: bool = option(False)
    """Under --use-checkpoint-args, take the sizes of tensor and pipeline parallelism too."""

    load_main_params_from_ckpt: bool = option(False)
    """Make fp32 masters of the loaded weights instead of loading those that were stored."""

    ckpt_format: Literal["torch", "torch_dist", "torch_dcp", "fsdp_dtensor"] | None = option(None)
    """Accepted from scripts: checkpoints are saved in one format of this program's own, and any
    format is recognised on load."""

    ckpt_convert_format: Literal["torch", "torch_dist"] | None = option(None)
    """Write the checkpoint of --load in this format of Megatron-LM and exit; torch_dist only."""

    ckpt_convert_save: str | None = option(None, metavar="DIR")
    """Folder for what --ckpt-convert-format writes, in a folder named after the format."""

    use_tokenizer_model_from_checkpoint_args: bool = option(
        True, aliases={"--disable-use-tokenizer-model-from-checkpoint-args": False}
    )
    """Under --use-checkpoint-args, take the tokenizer too, unless the command line names one."""

    recovery: RecoveryConfig = RecoveryConfig.resolve()

    def __post_init__(self) -> None:
        check_at_least(self, 1, "save_interval", "save_retain_interval", "save_keep_last")
        check_at_least(self, 0, "override_ckpt_iteration")
        check_at_least(self, 1, "moe_upcycling_granularity")
        self._check_conversion()

    def _check_conversion(self) -> None:
        if self.ckpt_convert_format is None:
            return
        if self.ckpt_convert_format == "torch":
            raise UserError(
                "--ckpt-convert-format torch: files for each rank of one layout are not written; "
                "give torch_dist, which Megatron-LM reads on any layout"
            )
        if self.load is None or self.ckpt_convert_save is None:
            raise UserError(
                f"--ckpt-convert-format {self.ckpt_convert_format} needs --load DIR (what to "
                "convert) and --ckpt-convert-save DIR (where to)"
            )

    @property
    def pretrained_step(self) -> int | None:
        """Return the iteration to take of --pretrained-checkpoint; None for the newest."""
        return None if self.load else self.ckpt_step
