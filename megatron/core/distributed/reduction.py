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

from megatron.core import comm, held
from megatron.core.distributed.buffers import FlatBuffer
from megatron.core.distributed.pieces import Shares

Finish = Callable[[], None]
"""Waits until this rank's part of a sum is among its gradients."""


def divisor(shares: Shares, dtype: torch.dtype) -> int:
    """Return what replicas divide gradients by before they are summed in ``dtype``."""
    return shares.replicas if dtype == torch.float16 else 1


def start(buffer: FlatBuffer, number: int, dtype: torch.dtype) -> Finish:
    """Start the sum of bucket ``number``, whose gradients travel in ``dtype``."""
    shares = buffer.shares
    begin, end = buffer.plan.buckets[number]
    bucket = buffer.grad[begin:end]
    sent = bucket.to(dtype)  # the same tensor, where the dtype is the same
    if sent is not bucket:
        held.see(sent)
    if divisor(shares, dtype) > 1:
        sent.div_(divisor(shares, dtype))
    if shares.axis.size == 1:
        handle = comm.all_reduce(sent, shares.copies, async_op=True)

        def finish() -> None:
            handle.wait()
            if sent is not bucket:
                bucket.copy_(sent)

        return finish
    piece, adds = buffer.grad_pieces[number], shares.gradients
    in_place = sent is bucket and not adds
    out = piece if in_place else sent.new_empty(piece.shape)
    if not in_place:
        held.see(out)
    handle = comm.reduce_scatter_into(out, sent, shares.axis, async_op=True)

    def finish_share() -> None:
        handle.wait()
        if adds:
            piece.add_(out)
            buffer.drop_grad()
        elif not in_place:
            piece.copy_(out)

    return finish_share


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
