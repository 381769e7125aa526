"""The sum of one bucket's gradients over replicas, each of which keeps what it updates.

    no_shard      all-reduce, in place
    optim         reduce-scatter, in place: this rank's share of the bucket is whole afterwards
    optim_grads   reduce-scatter, and what comes out is added to this rank's gradients; the bucket's
                  own are then given up

Groups of replicas that hold the same shares add theirs up once an iteration (`sum_copies`).

A sum in fp16 could overflow where no replica's gradient does, so each takes its part of a mean
before (`divisor`); the optimizer's scale makes it a sum again.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from megatron.core import comm, held
from megatron.core.distributed.buffers import FlatBuffer
from megatron.core.distributed.pieces import Shares

Finish = Callable[[], None]
"""Waits until this rank's part of a sum is among its gradients."""


def divisor(shares: Shares, dtype: torch.dtype) -> int:
    """Return what replicas divide gradients by before they are summed in ``dtype``."""
    return shares.replicas if dtype == torch.float16 else 1


def even_out(buffers: Iterable[FlatBuffer], divisor: int) -> None:
    """Let the gradients of experts be divided by as much as those of all else.

    Args:
        buffers: whose gradients are summed over their own replicas, and divided by these.
        divisor: of the dense layers' replicas; 1 where nothing was divided.
    """
    for buffer in buffers:
        if divisor > 1 and buffer.shares.replicas != divisor:
            for piece in buffer.grad_pieces:
                piece.mul_(buffer.shares.replicas / divisor)


def start(buffer: FlatBuffer, number: int, dtype: torch.dtype) -> Finish:
    """Start the sum of bucket ``number``, whose gradients travel in ``dtype``.

    One replica has nothing to send, so nothing is rounded.
    """
    shares = buffer.shares
    if shares.replicas == 1:
        return lambda: None
    begin, end = buffer.plan.buckets[number]
    bucket = buffer.grad[begin:end]
    sent = bucket.to(dtype)  # the same tensor, where the dtype is the same
    if sent is not bucket:
        held.see(sent)
    if divisor(shares, dtype) > 1:
        sent.div_(divisor(shares, dtype))
    if shares.axis.size > 1:
        return _start_share(buffer, number, sent, in_place=sent is bucket)
    handle = comm.all_reduce(sent, shares.copies, async_op=True)

    def finish() -> None:
        handle.wait()
        if sent is not bucket:
            bucket.copy_(sent)

    return finish


def _start_share(buffer: FlatBuffer, number: int, sent: Tensor, *, in_place: bool) -> Finish:
    """Start the sum of what is ``sent``, of which this rank gets its share."""
    piece, adds = buffer.grad_pieces[number], buffer.shares.gradients
    in_place = in_place and not adds
    out = piece if in_place else sent.new_empty(piece.shape)
    if not in_place:
        held.see(out)
    handle = comm.reduce_scatter_into(out, sent, buffer.shares.axis, async_op=True)

    def finish() -> None:
        handle.wait()
        if adds:
            piece.add_(out)
            buffer.drop_grad()
        elif not in_place:
            piece.copy_(out)

    return finish


def sum_copies(buffers: Iterable[FlatBuffer]) -> None:
    """Add up the shares of the groups of replicas that hold the same ones."""
    handles = [
        comm.all_reduce(piece, buffer.shares.copies, async_op=True)
        for buffer in buffers
        if buffer.shares.axis.size > 1
        for piece in buffer.grad_pieces
    ]
    for handle in handles:
        handle.wait()
