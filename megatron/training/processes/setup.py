"""From a launch to a mesh: device, threads, determinism, process groups.

The environment is read, not written, with one exception that is announced: `--deterministic-mode`
on CUDA needs CUBLAS_WORKSPACE_CONFIG before the first matrix product.
"""

import os
import random
from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.core.config import Config
from megatron.core.mesh import GroupOptions, Mesh
from megatron.core.utils import Say, UserError, usable_cores
from megatron.training.config import RunConfig
from megatron.training.process_config import ProcessConfig
from megatron.training.processes import agent_store, meeting
from megatron.training.processes.flight_recorder import record_collectives
from megatron.training.processes.group_settings import group_settings
from megatron.training.processes.launch import Launch, local_device

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
MARGIN = timedelta(seconds=30)
"""By which a collective waits longer than the run's limit.

When the limit is over, the watchdog names the rank that the others wait for; NCCL ends its process
without a word of that, and must not be first by chance. A few heartbeats are enough.
"""


def create_mesh(
    config: RunConfig,
    launch: Launch,
    say: Say,
    environ: MutableMapping[str, str] = os.environ,
) -> Mesh:
    """Choose the device, connect the processes and return this run's mesh.

    A collective of the world when there are several processes.

    Raises:
        UserError: the device, the backend or the layout cannot be had here.
    """
    device = choose_device(config.process.device, launch)
    backend = choose_backend(config.process.distributed_backend, device)
    set_threads(device, launch, environ, say)
    if config.training.deterministic_mode:
        be_deterministic(device, environ, say)
    seed_generators(config.training.seed)
    config.parallel.grids(launch.world_size)  # a layout that cannot be is refused before waiting
    if launch.world_size == 1:
        return Mesh.serial(device)
    if backend == "nccl":
        record_collectives(config.process.flight_recorder, environ, say)
    limit = timedelta(minutes=config.process.distributed_timeout_minutes)
    join(config, launch, backend, limit, environ)
    try:
        return connected_mesh(config, device)
    except BaseException:
        disconnect()  # else gloo's threads abort the process at its end
        raise


def join(
    config: Config,
    launch: Launch,
    backend: str,
    limit: timedelta,
    environ: MutableMapping[str, str],
) -> None:
    """Meet the other processes, and find out that they were given the same settings.

    Raises:
        UserError: the meeting point cannot be used, or settings differ; see `meeting`.
        RunFailed: not all processes came in time.
    """
    late = limit + MARGIN
    meeting.meet(launch, lambda: connect(launch, backend, late, environ), limit, MARGIN)
    try:
        meeting.check_settings(config)
    except BaseException:
        disconnect()
        raise


def connected_mesh(config: RunConfig, device: torch.device) -> Mesh:
    """Return the mesh of a run whose processes are connected; a collective of the world."""
    return Mesh.create(
        config.parallel,
        device,
        **config.parted_axes,
        options=group_options(config.process, dist.get_backend()),
    )


def group_options(process: ProcessConfig, backend: str) -> GroupOptions:
    """Return what the process groups of a run are made with: NCCL's settings for NCCL alone."""
    return GroupOptions(
        timeout=timedelta(minutes=process.distributed_timeout_minutes) + MARGIN,
        nccl=group_settings(process) if backend == "nccl" else {},
    )


def choose_device(asked: str, launch: Launch) -> torch.device:
    """Return the device of this process, made current if it is a CUDA one."""
    available = torch.cuda.is_available()
    if asked == "cpu" or (asked == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise UserError(
            f"--device {asked}: torch {torch.__version__} sees no CUDA device here; give "
            "--device cpu to run on the CPU"
        )
    device = torch.device("cuda", local_device(launch.local_rank, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def choose_backend(asked: str, device: torch.device) -> str:
    """Return the library for collectives on ``device``."""
    if device.type == "cpu":
        return "gloo"  # what only exists on CUDA maps to the CPU's own
    return "nccl" if asked == "auto" else asked


def set_threads(
    device: torch.device,
    launch: Launch,
    environ: MutableMapping[str, str],
    say: Say,
) -> None:
    """Share the cores between the processes of a machine, unless OMP_NUM_THREADS says how."""
    if device.type != "cpu" or launch.world_size == 1 or "OMP_NUM_THREADS" in environ:
        return
    processes = launch.local_world_size or launch.world_size
    threads = max(1, usable_cores() // processes)
    torch.set_num_threads(threads)
    say(f"threads per process: {threads} (set OMP_NUM_THREADS to choose)")


def be_deterministic(device: torch.device, environ: MutableMapping[str, str], say: Say) -> None:
    """Make torch refuse operations whose results differ from run to run."""
    if device.type == "cuda" and _CUBLAS not in environ:
        environ[_CUBLAS] = ":4096:8"
        say(f"--deterministic-mode: set {_CUBLAS}=:4096:8, which cuBLAS needs")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def seed_generators(seed: int) -> None:
    """Seed the process's generators, for a user's own code: the model's draws are all keyed."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def connect(
    launch: Launch, backend: str, limit: timedelta, environ: MutableMapping[str, str]
) -> None:
    """Join the world; fails after the time limit when some process does not come."""
    meeting_point: dict[str, Any]
    if agent_store.is_kept(environ):
        meeting_point = {"store": agent_store.meet(launch, limit)}
    elif {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"} <= set(environ):
        meeting_point = {"init_method": "env://"}
    else:
        meeting_point = {"init_method": f"tcp://{launch.master_addr}:{launch.master_port}"}
    # No device_id: with one, NCCL would split the world's communicator for every group, and each
    # rank would take part in the making of all groups, its own or not: hundreds in a large world.
    dist.init_process_group(
        backend,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=limit,
        **meeting_point,
    )


def disconnect() -> None:
    """Leave the world, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
