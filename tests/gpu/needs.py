"""The device that these tests run on, and what some of them need besides."""

import os

import pytest
import torch
import torch.distributed as dist

from megatron.core.kernels import flash, probe
from tests.programs import free_port

REHEARSAL = os.environ.get("MEGATRON_GPU_TESTS_ON") == "cpu"
DEVICE = torch.device("cpu" if REHEARSAL else "cuda")
COUNT = torch.cuda.device_count()

CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (REHEARSAL or torch.cuda.is_available()),
        reason="needs a CUDA device, and a torch built for it: torch.cuda.is_available() is false",
    ),
]
"""Marks of a module that needs a device."""

TWO_DEVICES = pytest.mark.skipif(
    not REHEARSAL and COUNT < 2,
    reason=f"NCCL needs a CUDA device for every process: two, and there are {COUNT}",
)


def flash_attn() -> None:
    """Skip a test where flash-attn cannot be used."""
    reason = flash.why_not(DEVICE, torch.bfloat16)
    if reason is not None:
        pytest.skip(reason)


def triton() -> None:
    """Skip a test where Triton's kernels cannot be used."""
    reason = probe.triton_missing(DEVICE, torch.bfloat16)
    if reason is not None:
        pytest.skip(reason)


def device_of(rank: int) -> torch.device:
    """Return a rank's device, made current; ranks beyond the last device share."""
    if DEVICE.type == "cpu":
        return DEVICE
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def connect(rank: int, backend: str) -> torch.device:
    """Let the ranks of a pool's job talk through ``backend``; return this one's device.

    The pool connects them through gloo. A rehearsal stays with that.
    """
    device = device_of(rank)
    if backend == "gloo" or REHEARSAL:
        return device
    meeting, world = [free_port() if rank == 0 else None], dist.get_world_size()
    dist.broadcast_object_list(meeting)
    dist.barrier()
    dist.destroy_process_group()
    address = f"tcp://127.0.0.1:{meeting[0]}"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world)
    return device


def far(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the size of a difference, relative to the size of what is wanted."""
    got, want = (x.detach().to("cpu", torch.float64) for x in (got, want))
    assert got.shape == want.shape and bool(got.isfinite().all())
    return float((got - want).norm() / want.norm().clamp(min=1e-300))
