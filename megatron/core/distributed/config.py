"""What a user chooses about data parallelism; plain Python."""

from megatron.core.config import Config, check_at_least, option
from megatron.core.utils import UserError


class DataParallelConfig(Config):
    """How replicas sum their gradients."""

    overlap_grad_reduce: bool = option(False)
    """Sum each bucket while the backward goes on."""

    ddp_bucket_size: int | None = option(None)
    """Elements of a gradient bucket; absent, max(40 million, 1 million x replicas) with
    --overlap-grad-reduce, else one bucket."""

    ddp_num_buckets: int | None = option(None)
    """Number of gradient buckets per chunk of a model, instead of their size."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "ddp_bucket_size", "ddp_num_buckets")
        if self.ddp_bucket_size is not None and self.ddp_num_buckets is not None:
            raise UserError(
                f"--ddp-bucket-size ({self.ddp_bucket_size}) and --ddp-num-buckets "
                f"({self.ddp_num_buckets}) both set the buckets; keep one"
            )

    def bucket_size(self, numel: int, replicas: int) -> int | None:
        """Return the elements after which a bucket of ``numel`` gradients is closed.

        None puts all in one bucket.
        """
        if self.ddp_num_buckets is not None:
            return -(-numel // self.ddp_num_buckets)
        if self.ddp_bucket_size is not None:
            return self.ddp_bucket_size
        return max(40_000_000, 1_000_000 * replicas) if self.overlap_grad_reduce else None
