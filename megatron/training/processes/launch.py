"""Where this process stands among its peers, read from the launcher's environment.

No torch, no outside program, nothing written to the environment. Sources, first match wins:

    RANK and WORLD_SIZE   torchrun, torch.distributed.run and .launch, or set by hand
    SLURM_*               inside a job step of more than one task (srun); the shell of an sbatch or
                          salloc is not such a step, and neither is `srun -n 1`
    OMPI_COMM_WORLD_*     mpirun of Open MPI
    PMI_*, MPI_LOCAL*     mpirun of MPICH, Intel MPI, MVAPICH
    nothing               one process

Within an allocation mpirun's daemons are a job step of their own, one on each machine, whose
variables its processes inherit: such a step counts for nothing.

The world size comes from the launcher alone, never from the number of devices.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.core.utils import UserError

# Names of the rank, the size, and the same two on this machine.
_MPIRUNS = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # srun sets the first two of these as well, but not the others.
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)

DEFAULT_PORT = 29500
# Away from the ports that daemons and the kernel's own ephemeral range use.
_FIRST_JOB_PORT, _JOB_PORTS = 15000, 15000


@dataclass(frozen=True)
class Launch:
    """One process's place in the world and where its peers meet."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    """Processes on this machine, when the launcher says."""
    master_addr: str
    master_port: int
    source: str
    """What the ranks were read from, for the start-up line."""
    rendezvous: str
    """What the meeting point was read from."""

    def __str__(self) -> str:
        if self.world_size == 1:
            return f"1 process ({self.source})"
        return (
            f"{self.world_size} processes ({self.source}), meeting at "
            f"{self.master_addr}:{self.master_port} ({self.rendezvous})"
        )


def discover(environ: Mapping[str, str], local_rank: int | None = None) -> Launch:
    """Return this process's place.

    Args:
        environ: the process's environment.
        local_rank: a launcher's ``--local-rank``; the environment wins over it.

    Raises:
        UserError: the environment contradicts itself or leaves out what several processes need.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _from_torch(environ, local_rank)
    mpirun = next((names for names in _MPIRUNS if environ.keys() >= set(names)), None)
    if _in_slurm_step(environ) and not (mpirun and _is_of_daemons(environ, mpirun)):
        return _from_slurm(environ)
    if mpirun:
        return _from_mpirun(environ, mpirun)
    return Launch(0, 1, local_rank or 0, 1, "127.0.0.1", 0, "no launcher", "not needed")


def first_host(node_list: str) -> str:
    """Return the first host of a Slurm node list.

    >>> first_host("node[01-03,7],login1")
    'node01'
    >>> first_host("rack[2-3]n[08,10]-ib")
    'rack2n08-ib'
    """
    depth = 0
    for end, character in enumerate(node_list):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            node_list = node_list[:end]
            break
    # Of each bracket keep the first number of the first range, with its leading zeros.
    host = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", node_list.strip())
    if not host or "[" in host or "]" in host:
        raise UserError(f"cannot read the first host of node list {node_list!r}; set MASTER_ADDR")
    return host


def job_port(job_id: str, step_id: str = "0") -> int:
    """Return a port that is the same on every rank of a job step and differs between neighbours."""
    # Array jobs are written 12_3 in some variables; a step must not meet the one before it.
    digits = re.findall(r"\d+", job_id) or ["0"]
    step = int(step_id) if step_id.isdigit() else 0
    return _FIRST_JOB_PORT + (int(digits[0]) + 7 * step) % _JOB_PORTS


def local_device(local_rank: int, device_count: int) -> int:
    """Return the number of the device that this process uses, of the ``device_count`` it sees.

    Raises:
        UserError: more processes than devices share this machine.
    """
    if device_count == 1:
        # Launchers may show each task its own device only, which then has number 0. (Should it be
        # one device for several tasks instead, NCCL refuses the duplicate and names it.)
        return 0
    if local_rank >= device_count:
        raise UserError(
            f"local rank {local_rank} has no device of its own: {device_count} are visible; start "
            f"at most {device_count} processes per machine, make more visible "
            "(CUDA_VISIBLE_DEVICES), or set LOCAL_RANK when starting processes by hand"
        )
    return local_rank


def _from_torch(environ: Mapping[str, str], local_rank: int | None) -> Launch:
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        present = "RANK" if "RANK" in environ else "WORLD_SIZE"
        absent = "WORLD_SIZE" if present == "RANK" else "RANK"
        raise UserError(
            f"{present}={environ[present]} is set but {absent} is not; set both, or unset "
            f"{present} to run one process"
        )
    rank, world_size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    local_world_size = None
    if "LOCAL_WORLD_SIZE" in environ:
        local_world_size = _integer(environ, "LOCAL_WORLD_SIZE")
    if "LOCAL_RANK" in environ:
        local_rank = _integer(environ, "LOCAL_RANK")
    elif local_rank is None:
        # Set by hand: ranks of one machine are assumed to be neighbours.
        local_rank = rank % local_world_size if local_world_size else rank
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "RANK and WORLD_SIZE"
    return _checked(environ, launcher, (rank, world_size, local_rank, local_world_size), None)


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    # An sbatch or salloc shell has SLURM_NTASKS too, but it is no step of that many tasks.
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    has_rank = "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ
    return has_rank and tasks.isdigit() and int(tasks) > 1


def _is_of_daemons(environ: Mapping[str, str], mpirun: tuple[str, str, str, str]) -> bool:
    """Return whether a job step started mpirun's daemons, which started more processes than it."""
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    one_each = set(re.findall(r"(?:^|,)(\d+)", per_node)) == {"1"}
    return one_each and _integer(environ, mpirun[1]) > _integer(environ, "SLURM_STEP_NUM_TASKS")


def _from_slurm(environ: Mapping[str, str]) -> Launch:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    local_size = None
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE", "")  # such as 4(x2),3
    counts = {int(count) for count in re.findall(r"(?:^|,)(\d+)", per_node)}
    if len(counts) == 1:
        local_size = counts.pop()
    place = (
        _integer(environ, "SLURM_PROCID"),
        _integer(environ, "SLURM_STEP_NUM_TASKS"),
        _integer(environ, "SLURM_LOCALID") if "SLURM_LOCALID" in environ else 0,
        local_size,
    )
    return _checked(environ, "srun", place, nodes)


def _from_mpirun(environ: Mapping[str, str], names: tuple[str, str, str, str]) -> Launch:
    rank, size, local_rank, local_size = (_integer(environ, name) for name in names)
    place = (rank, size, local_rank, local_size)
    return _checked(environ, "mpirun", place, None)


def _checked(
    environ: Mapping[str, str],
    source: str,
    place: tuple[int, int, int, int | None],
    node_list: str | None,
) -> Launch:
    rank, world_size, local_rank, local_world_size = place
    if not 0 <= rank < world_size:
        raise UserError(f"{source}: rank {rank} is not among the {world_size} ranks of the world")
    address, port, rendezvous = _meeting_point(
        environ, source, node_list, several_machines=local_world_size not in (None, world_size)
    )
    if not 0 < port < 2**16:
        raise UserError(f"MASTER_PORT={port} is no port; give one from 1 to 65535")
    return Launch(rank, world_size, local_rank, local_world_size, address, port, source, rendezvous)


def _meeting_point(
    environ: Mapping[str, str], source: str, node_list: str | None, several_machines: bool
) -> tuple[str, int, str]:
    """Return (address, port, where they come from)."""
    node_list = node_list or environ.get("SLURM_JOB_NODELIST")
    address = environ.get("MASTER_ADDR")
    if address:
        origin = "MASTER_ADDR"
    elif node_list:
        address, origin = first_host(node_list), "Slurm's node list"
    elif several_machines:
        raise UserError(
            f"{source} started processes on several machines and MASTER_ADDR is not set; set it to "
            "the host of rank 0 on every machine (mpirun: -x MASTER_ADDR=HOST)"
        )
    else:
        address, origin = "127.0.0.1", "this machine"
    if environ.get("MASTER_PORT"):
        return address, _integer(environ, "MASTER_PORT"), origin
    if environ.get("SLURM_JOB_ID"):
        step = environ.get("SLURM_STEP_ID", "0")
        return address, job_port(environ["SLURM_JOB_ID"], step), f"{origin}, port from the job id"
    return address, DEFAULT_PORT, f"{origin}, default port"


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise UserError(f"{name}={environ[name]!r} is not a whole number") from None
