"""Transfers by way of host memory, as gloo's are for tensors on a device: here of the host too."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import comm
from megatron.core.mesh import Axis
from tests.harness import Pool


@mock.patch.object(comm, "_is_by_host", lambda axis, x: True)
def exchanged(rank: int) -> tuple[Tensor, Tensor]:
    axis = Axis("pp", (0, 1, 2), rank, dist.group.WORLD)
    arrival = comm.shift(torch.full((3, 2), float(rank)), axis)
    # Two under way at once, and a sender that changes its tensor at once.
    mine = [torch.full((4,), 10.0 * rank + i, dtype=torch.bfloat16) for i in range(2)]
    came = [torch.zeros(4, dtype=torch.bfloat16) for _ in range(2)]
    handles = []
    for i in range(2):
        if rank > 0:
            handles.append(comm.receive(came[i], axis, rank - 1))
        if rank < 2:
            handles.append(comm.send(mine[i], axis, rank + 1))
            mine[i].zero_()
    for handle in handles:
        handle.wait()
    return arrival.wait(), torch.stack(came)


def test_what_is_sent_arrives(pool: Pool) -> None:
    for rank, (shifted, came) in enumerate(pool.run(3, exchanged)):
        assert torch.equal(shifted, torch.full((3, 2), float((rank - 1) % 3)))
        sent = [10.0 * (rank - 1) + i if rank else 0.0 for i in range(2)]
        assert came[:, 0].tolist() == sent and came.shape == (2, 4)
