"""Work that goes on beside the program: tensors live as long as it needs them, and no longer.

A collective over NCCL, and a copy from pinned memory, run on the device when the call has long
returned. What they read must not be given to somebody else meanwhile, even if nobody here holds it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.core import comm
from megatron.core.mesh import Axis
from megatron.training.batches import Batches
from tests.gpu import needs
from tests.gpu.needs import DEVICE
from tests.harness import Pool

pytestmark = needs.CUDA

BACKENDS = ["gloo", pytest.param("nccl", marks=needs.TWO_DEVICES)]
SIZE = 2**20
ROUNDS = 20


class Numbered:
    """Samples that hold nothing but their number."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        tokens = np.full(2**16, index, dtype=np.int64)
        return {"tokens": tokens, "loss_mask": np.ones(2**16, dtype=np.float32)}


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_from_pinned_memory_are_whole(workers: int) -> None:
    """Pinned memory is used again as soon as its copy has ended, which nobody waits for here."""
    numbers = [[2 * i, 2 * i + 1] for i in range(60)]
    batches = Batches(Numbered(), numbers, DEVICE, num_workers=workers)
    width = 64 if needs.REHEARSAL else 2048
    busy = torch.randn(width, width, device=DEVICE)
    sums = []
    for batch in batches.take(len(numbers)):
        busy = busy @ busy * 1e-3  # copies wait behind it
        assert batch["tokens"].device.type == DEVICE.type
        sums.append(batch["tokens"].double().mean(1))
    assert torch.stack(sums).tolist() == numbers


def everyone(rank: int, backend: str) -> tuple[Axis, torch.device]:
    device = needs.connect(rank, backend)
    return Axis("dp", (0, 1), rank, dist.group.WORLD), device


def gathered(rank: int, backend: str) -> list[float]:
    """Gather tensors that are dropped at once, while their memory is wanted by others."""
    axis, device = everyone(rank, backend)
    means = []
    for i in range(ROUNDS):
        out = torch.empty(2 * SIZE, device=device)
        handle = comm.all_gather_into(
            out, torch.full((SIZE,), float(i + rank), device=device), axis, async_op=True
        )
        junk = [torch.full((SIZE,), -1e6, device=device) for _ in range(4)]
        handle.wait()
        means.append(out.double().mean())
        del junk
    return torch.stack(means).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_gathered_is_kept_until_it_has_been_read(pool: Pool, backend: str) -> None:
    for found in pool.run(2, gathered, backend, timeout=200.0):
        assert found == [i + 0.5 for i in range(ROUNDS)]


def reduced(rank: int, backend: str) -> list[float]:
    """Scatter sums whose parts the program overwrites as soon as it may."""
    axis, device = everyone(rank, backend)
    part, means = torch.empty(2 * SIZE, device=device), []
    for i in range(ROUNDS):
        part.fill_(float(i + rank))
        out = torch.empty(SIZE, device=device)
        comm.reduce_scatter_into(out, part, axis, async_op=True).wait()
        means.append(out.double().mean())
    total = torch.full((SIZE,), float(rank + 1), device=device)
    handle = comm.all_reduce(total, axis, async_op=True)
    torch.full((SIZE,), -1e6, device=device)
    handle.wait()
    return [*torch.stack(means).tolist(), total.double().mean().item()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wait_orders_the_stream(pool: Pool, backend: str) -> None:
    for found in pool.run(2, reduced, backend, timeout=200.0):
        assert found == [*(2.0 * i + 1 for i in range(ROUNDS)), 3.0]


def passed_on(rank: int, backend: str) -> list[float]:
    """Send tensors whose memory is given back once the send has ended, as the executor does."""
    axis, device = everyone(rank, backend)
    means = []
    for i in range(ROUNDS):
        if rank == 0:
            x = torch.full((SIZE,), float(i), device=device)
            comm.send(x, axis, 1).wait()
            x.untyped_storage().resize_(0)
            means.append(torch.full((SIZE,), float(i), device=device).double().mean())
        else:
            out = torch.empty(SIZE, device=device)
            comm.receive(out, axis, 0).wait()
            means.append(out.double().mean())
    came = comm.shift(torch.full((SIZE,), float(rank), device=device), axis).wait()
    everything = comm.all_to_all(torch.full((2, SIZE), float(rank), device=device), axis)
    means += [came.double().mean(), everything[0].double().mean(), everything[1].double().mean()]
    comm.barrier(axis)
    assert comm.gather_objects(rank, axis) == [0, 1]
    return torch.stack(means).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sent_tensor_may_be_freed(pool: Pool, backend: str) -> None:
    for rank, found in enumerate(pool.run(2, passed_on, backend, timeout=200.0)):
        assert found == [*(float(i) for i in range(ROUNDS)), 1.0 - rank, 0.0, 1.0]


def memory_of_sends(rank: int, backend: str) -> int:
    """Return the most memory that the sends of many tensors, each freed, have held."""
    axis, device = everyone(rank, backend)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(ROUNDS):
        x = torch.zeros(SIZE, device=device)
        if rank == 0:
            comm.send(x, axis, 1).wait()
        else:
            comm.receive(x, axis, 0).wait()
        x.untyped_storage().resize_(0)
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 4 * SIZE


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wait_lets_go_of_what_was_sent(pool: Pool, backend: str) -> None:
    """Nothing holds on to it: a few tensors are alive at a time, not all."""
    for found in pool.run(2, memory_of_sends, backend, timeout=200.0):
        assert 4 * SIZE <= found <= 4 * 4 * SIZE
