"""What routers of experts tell each other, in closed form; `traffic` has the table.

Not foreseen are the rounds of Sinkhorn's assignment, which end when it is even: one number for the
tokens that count, and then E numbers each, over tp and cp.
"""

from typing import Protocol

from megatron.core.optimizer.memory import BYTES
from megatron.core.transformer.moe.router_config import LOSS_NAMES
from megatron.training.config import RunConfig
from megatron.training.plan.saved_routers import INDEX

FP64 = 8


class Book(Protocol):
    """Adds up what is moved (`traffic_passes.Book`)."""

    @property
    def sizes(self) -> dict[str, int]: ...

    def add(self, axis: str, op: str, size: int, calls: int = 1) -> None: ...


def add_router(
    book: Book, config: RunConfig, tokens: int, count: int, forwards: int, *, trains: bool
) -> None:
    """Add what one router moves while ``count`` microbatches go through.

    Args:
        book: takes it.
        config: the run.
        tokens: that a rank routes of each microbatch.
        count: of microbatches.
        forwards: of each, 2 where backward makes the layer again.
        trains: losses are computed.
    """
    router = config.model.router
    number = BYTES[config.precision.accumulation_dtype]  # of a logit
    if router.moe_router_dtype == "fp64":
        number = FP64
    if router.capacity_factor is not None:
        rows, topk = tokens, router.moe_router_topk
        for axis in ("tp", "cp"):
            rows *= book.sizes[axis]
            book.add(axis, "all_gather", rows * (topk + 2) * INDEX, count * forwards)
            if router.moe_token_drop_policy == "probs":
                book.add(axis, "all_gather", rows * topk * number, count * forwards)
    if router.loss_weights and trains:
        _add_losses(book, config, number, count, forwards)


def _add_losses(book: Book, config: RunConfig, number: int, count: int, forwards: int) -> None:
    losses, experts = config.model.router.loss_weights, config.model.moe.num_experts
    assert experts is not None
    by_sample = LOSS_NAMES["seq_aux_loss"] in losses
    apart = config.training.micro_batch_size if by_sample else 1
    for axis in ("tp", "cp"):
        size = apart * (2 * experts + 2) * number
        book.add(axis, "all_reduce", size, count * forwards)
    if LOSS_NAMES["global_aux_loss"] in losses:  # once, whatever is recomputed
        book.add("dp", "all_gather", book.sizes["dp"] * (experts + 1) * number, count)
