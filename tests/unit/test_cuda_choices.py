"""What is decided for CUDA and NCCL, asked of a machine that only pretends to have them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core import comm
from megatron.core.grid import ParallelConfig
from megatron.core.mesh import Axis, Mesh, choose_overlap

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Machine:
    """Devices, which of them reach which, and the backend of every group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.devices, self.backend = 4, "nccl"
        self.apart: set[tuple[int, int]] = set()
        self.others: tuple[tuple[str, bool], ...] = ()
        """Host of each other rank, and whether its devices reach each other; as here if empty."""
        self.reduced: list[tuple[torch.device, object]] = []
        self.barriers: list[Any] = []
        monkeypatch.setattr(torch.cuda, "device_count", lambda: self.devices)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        reaches = lambda one, other: (one, other) not in self.apart  # noqa: E731
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", reaches)
        monkeypatch.setattr(dist, "get_backend", lambda group: self.backend)
        monkeypatch.setattr(dist, "all_reduce", self._all_reduce)
        monkeypatch.setattr(dist, "barrier", lambda group, **given: self.barriers.append(given))
        monkeypatch.setattr(dist, "all_gather_object", self._all_gather_object)
        zeros = torch.zeros
        # Of the right device, without memory there.
        fake = lambda *size, device: SimpleNamespace(device=device, cpu=zeros(*size))  # noqa: E731
        monkeypatch.setattr(torch, "zeros", fake)

    def _all_gather_object(self, values: list[Any], mine: object, group: object) -> None:
        values[:] = [mine, *(self.others or [mine] * (len(values) - 1))]

    def _all_reduce(self, x: Any, *, group: object) -> None:
        self.reduced.append((x.device, group))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def axis(size: int) -> Axis:
    return Axis("tp", tuple(range(size)), 0, object())  # type: ignore[arg-type]


def test_devices_that_reach_each_other_overlap_through_symmetric_memory(machine: Machine) -> None:
    assert choose_overlap(axis(2), CUDA) == "symmetric"
    assert choose_overlap(axis(4), CUDA) == "symmetric"
    # The fused operators are defined by now.
    assert torch.ops.symm_mem.fused_all_gather_matmul is not None


def test_all_others_form_a_ring(machine: Machine) -> None:
    assert choose_overlap(axis(2), CPU) == "ring"
    # Two machines, each with devices enough for both ranks.
    machine.others = (("another", True),)
    assert choose_overlap(axis(2), CUDA) == "ring"
    machine.others = ()
    machine.devices = 1  # each process is shown its own device alone
    assert choose_overlap(axis(2), CUDA) == "ring"
    machine.devices = 4
    machine.apart.add((3, 1))
    assert choose_overlap(axis(2), CUDA) == "ring"
    machine.apart.clear()
    machine.backend = "gloo"
    assert choose_overlap(axis(2), CUDA) == "ring"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be rank 1 of 4."""
    monkeypatch.setattr(dist, "new_group", lambda ranks, **given: tuple(ranks))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)


def test_stages_meet_before_their_first_transfer(machine: Machine, world: None) -> None:
    layout = ParallelConfig.resolve(pipeline_model_parallel_size=2)
    Mesh.create(layout, CUDA)
    assert machine.reduced == [(CUDA, (1, 3))]
    Mesh.create(layout, CPU)
    machine.backend = "gloo"
    Mesh.create(layout, CUDA)
    Mesh.create(ParallelConfig.resolve(), CUDA)
    assert len(machine.reduced) == 1


def test_a_barrier_of_nccl_is_told_its_device(machine: Machine) -> None:
    comm.barrier(axis(2))
    machine.backend = "gloo"
    comm.barrier(axis(2))
    assert machine.barriers == [{"device_ids": [3]}, {"device_ids": None}]


def test_transfers_of_gloo_go_through_the_host(machine: Machine) -> None:
    on_cuda, on_cpu = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)
    assert not comm._is_by_host(axis(2), on_cuda)  # type: ignore[arg-type]
    machine.backend = "gloo"
    assert comm._is_by_host(axis(2), on_cuda)  # type: ignore[arg-type]
    assert not comm._is_by_host(axis(2), on_cpu)  # type: ignore[arg-type]
