"""The worker pool that all distributed tests share; the fixture `pool` of `conftest` gives it."""

from megatron.training.verification.worker_pool import Body, Pool, RankFailed

__all__ = ["Body", "Pool", "RankFailed"]
