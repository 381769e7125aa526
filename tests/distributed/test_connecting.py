"""A rank that cannot tell the others how it fares ends the run, with its own error."""

import socket
from typing import Any

import pytest
import torch

from megatron.core.grid import ParallelConfig
from megatron.core.mesh import Mesh
from megatron.core.utils import UserError
from megatron.training.failing import watchdog
from megatron.training.failing.heartbeat import Pulse
from megatron.training.failing.watchdog import Watchdog
from tests.harness import Pool


def refused(rank: int) -> tuple[str, int]:
    mesh = Mesh.create(ParallelConfig.resolve(), torch.device("cpu"))
    told: list[BaseException] = []

    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    def fail(self: Watchdog, error: BaseException) -> None:
        told.append(error)  # and the process would end
        self.stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watchdog, "fail", fail)
        if rank == 1:
            patch.setattr(socket, "create_connection", refuse)
        with pytest.raises(UserError) as raised:
            watchdog.start(mesh.world, mesh.where, "localhost", Pulse(), "a program")
    return str(raised.value), len(told)


def test_all_are_told_of_a_rank_that_cannot_connect(pool: Pool) -> None:
    found = pool.run(3, refused)
    assert len({message for message, _ in found}) == 1
    assert found[0][0].startswith("[dp1] rank 1 cannot reach rank 0 at localhost:")
    assert "Connection refused" in found[0][0] and "MASTER_ADDR" in found[0][0]
    assert [told for _, told in found] == [1, 0, 1], "who is connected tells the others"
