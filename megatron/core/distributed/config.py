"""What a user chooses about data parallelism; plain Python."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from megatron.core.config import Config, check_at_least, option
from megatron.core.utils import UserError

Strategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
"""What replicas share out among themselves; they hold the rest alike."""
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


def shares_gradients(strategy: Strategy) -> bool:
    """Return whether each replica keeps its share of the gradients only."""
    return strategy in ("optim_grads", "optim_grads_params")


def shares_weights(strategy: Strategy) -> bool:
    """Return whether each replica keeps its share of the weights only."""
    return strategy == "optim_grads_params"


class DataParallelConfig(Config):
    """How replicas sum their gradients, and what they share out."""

    data_parallel_sharding_strategy: Strategy = option(
        derived="no_shard; optim with --use-distributed-optimizer; optim_grads_params with "
        "--use-megatron-fsdp or --use-torch-fsdp2"
    )
    """What replicas share out: nothing, optimizer states, gradients too, or weights too."""

    use_distributed_optimizer: bool = option(False)
    """Share out optimizer states over the replicas."""

    use_megatron_fsdp: bool = option(False)
    """Share out what --data-parallel-sharding-strategy says; everything when that is absent."""

    use_torch_fsdp2: bool = option(False)
    """Share everything out by torch's fully_shard, which cuts each parameter by rows and keeps
    weights in fp32."""

    torch_fsdp2_reshard_after_forward: bool = option(
        True, aliases={"--torch-fsdp2-no-reshard-after-forward": False}
    )
    """Under --use-torch-fsdp2, give weights up after a forward and gather them again for its
    backward."""

    num_distributed_optimizer_instances: int = option(1)
    """Groups of replicas; each shares out a whole set of states, and groups hold the same."""

    overlap_grad_reduce: bool = option(False)
    """Sum each bucket while the backward goes on."""

    overlap_param_gather: bool = option(False)
    """Gather new weights while the forward goes on, before the layer that needs them."""

    init_model_with_meta_device: bool = option(False)
    """Give weights memory only when they get their values: one unit of the model at a time, where
    weights are shared out."""

    ddp_bucket_size: int | None = option(None)
    """Elements of a gradient bucket; absent, max(40 million, 1 million x replicas) with
    --overlap-grad-reduce, else one bucket."""

    ddp_num_buckets: int | None = option(None)
    """Number of gradient buckets per chunk of a model, instead of their size."""

    ddp_reduce_scatter_with_fp32_accumulation: bool = option(False)
    """Add gradients up in fp32 where replicas share them out; refused where they travel in half,
    else nothing differs."""

    ddp_param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = option(())
    """Parameters whose gradients add up over microbatches in fp32; refused where they add up in
    half, else nothing differs."""

    @classmethod
    def derive(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Let the switches choose what is shared out."""
        strategy = "no_shard"
        if values["use_megatron_fsdp"] or values["use_torch_fsdp2"]:
            strategy = "optim_grads_params"
        elif values["use_distributed_optimizer"]:
            strategy = "optim"
        return {"data_parallel_sharding_strategy": strategy}

    def __post_init__(self) -> None:
        check_at_least(
            self, 1, "ddp_bucket_size", "ddp_num_buckets", "num_distributed_optimizer_instances"
        )
        if self.ddp_bucket_size is not None and self.ddp_num_buckets is not None:
            raise UserError(
                f"--ddp-bucket-size ({self.ddp_bucket_size}) and --ddp-num-buckets "
                f"({self.ddp_num_buckets}) both set the buckets; keep one"
            )
        strategy = self.data_parallel_sharding_strategy
        self._check_torch_fsdp2()
        if self.use_distributed_optimizer and strategy == "no_shard":
            raise UserError(
                "--use-distributed-optimizer shares out optimizer states, "
                "--data-parallel-sharding-strategy no_shard shares out nothing; drop one"
            )
        if self.overlap_param_gather and strategy == "no_shard":
            raise UserError(
                "--overlap-param-gather: nothing is gathered, since every replica updates all "
                "weights; add --use-distributed-optimizer or drop it"
            )
        if self.num_distributed_optimizer_instances > 1 and strategy == "no_shard":
            raise UserError(
                "--num-distributed-optimizer-instances "
                f"({self.num_distributed_optimizer_instances}) needs something that is shared out: "
                "add --use-distributed-optimizer or leave it at 1"
            )

    def _check_torch_fsdp2(self) -> None:
        if not self.use_torch_fsdp2:
            return
        if self.use_megatron_fsdp:
            raise UserError(
                "--use-torch-fsdp2 and --use-megatron-fsdp are two ways to share out the same; "
                "drop one"
            )
        strategy = self.data_parallel_sharding_strategy
        if not shares_weights(strategy):
            raise UserError(
                "--use-torch-fsdp2 shares out weights, gradients and states, "
                f"--data-parallel-sharding-strategy {strategy} does not; drop that, or share out "
                "less with --use-megatron-fsdp in place of --use-torch-fsdp2"
            )

    @property
    def shards_gradients(self) -> bool:
        """Return whether replicas share out gradients, and with them each microbatch's sums."""
        return shares_gradients(self.data_parallel_sharding_strategy)

    @property
    def shards_weights(self) -> bool:
        """Return whether replicas share out weights."""
        return shares_weights(self.data_parallel_sharding_strategy)

    def shares(self, replicas: int) -> int:
        """Return into how many shares ``replicas`` ranks divide what they share out.

        Raises:
            UserError: the replicas do not divide into --num-distributed-optimizer-instances, or
                each instance would be one rank.
        """
        groups = self.num_distributed_optimizer_instances
        if self.data_parallel_sharding_strategy == "no_shard":
            return 1
        if replicas % groups:
            raise UserError(
                f"--num-distributed-optimizer-instances ({groups}) must divide the {replicas} "
                f"ranks of data x context parallelism; choose one of {_listed(replicas)}"
            )
        if replicas == groups > 1:
            raise UserError(
                f"--num-distributed-optimizer-instances ({groups}) leaves each instance one of the "
                f"{replicas} ranks of data x context parallelism, with nobody to share with; "
                f"choose one of {_listed(replicas)}"
            )
        return replicas // groups

    def bucket_size(self, numel: int, replicas: int) -> int | None:
        """Return the elements after which a bucket of ``numel`` gradients is closed.

        None puts all in one bucket. Where gradients are shared out, a bucket is a unit's part of a
        buffer, whatever its size.
        """
        if self.shards_gradients:
            return None
        if self.ddp_num_buckets is not None:
            return -(-numel // self.ddp_num_buckets)
        if self.ddp_bucket_size is not None:
            return self.ddp_bucket_size
        return max(40_000_000, 1_000_000 * replicas) if self.overlap_grad_reduce else None


def _listed(replicas: int) -> str:
    """Return the numbers of instances that leave each of them several of ``replicas`` ranks."""
    return ", ".join(str(n) for n in range(1, replicas // 2 + 1) if replicas % n == 0) or "1"
