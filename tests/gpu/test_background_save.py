"""Saves beside training: copies to page-locked memory, on a stream of their own, are whole."""

import time
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import plan
from megatron.core.dist_checkpointing.background import BackgroundSave
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.dist_checkpointing.staging import HostBuffer
from megatron.core.mesh import Mesh
from megatron.core.sharding import Init, whole
from tests.gpu import needs
from tests.gpu.needs import DEVICE

pytestmark = needs.CUDA

SIZE = 1024


@pytest.mark.parametrize("limit", [None, 6 * SIZE * SIZE, 0])
def test_what_was_computed_before_is_saved_while_the_device_is_busy(
    tmp_path: Path, limit: int | None
) -> None:
    world, buffer = Mesh.serial(DEVICE).world, HostBuffer(limit)
    state = {name: torch.zeros(SIZE, SIZE, device=DEVICE) for name in ("one", "two", "three")}
    busy = torch.randn(SIZE, SIZE, device=DEVICE)
    for number in range(3):
        for _ in range(10):
            busy = torch.tanh(busy @ busy)
        for place, tensor in enumerate(state.values()):
            tensor.fill_(10 * number + place)  # queued behind the products
        items = [
            plan.of_tensor(name, whole((SIZE, SIZE // 2), Init()), tensor[:, ::2])
            for name, tensor in state.items()
        ]
        save = BackgroundSave(items, tmp_path / str(number), {}, world, buffer)
        for _ in range(10):
            busy = torch.tanh(busy @ busy)
        save.settle()
        for tensor in state.values():
            tensor.fill_(-1.0)
        while not save.written(DEVICE):
            time.sleep(0.01)
        save.finish()
        with Checkpoint(tmp_path / str(number)) as checkpoint:
            for place, name in enumerate(state):
                assert (checkpoint.read(name) == 10 * number + place).all(), (number, name)
    buffer.free()
    assert buffer.bytes == 0
