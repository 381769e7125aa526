"""Where a process stands, by launcher; expected values are what each launcher documents."""

import subprocess
import sys

import pytest

from megatron.core.utils import UserError
from megatron.training.processes.launch import Launch, discover, first_host, job_port, local_device

SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "node[03-04]",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


def place(launch: Launch) -> tuple[int, int, int]:
    return launch.rank, launch.world_size, launch.local_rank


def test_env_04_no_launcher_is_one_process() -> None:
    launch = discover({})
    assert place(launch) == (0, 1, 0)
    assert str(launch) == "1 process (no launcher)"


def test_torchrun_wins_over_slurm() -> None:
    torchrun = {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "head",
        "MASTER_PORT": "1234",
        "TORCHELASTIC_RUN_ID": "x",
    }
    launch = discover({**SRUN, **torchrun})
    assert place(launch) == (2, 4, 0)
    assert (launch.master_addr, launch.master_port, launch.source) == ("head", 1234, "torchrun")


def test_srun_gives_place_and_meeting_point() -> None:
    launch = discover(SRUN)
    assert place(launch) == (5, 8, 1)
    assert launch.local_world_size == 4
    assert launch.master_addr == "node03"
    assert launch.master_port == discover({**SRUN, "SLURM_PROCID": "0"}).master_port
    assert "srun" in str(launch) and "Slurm's node list" in str(launch)


@pytest.mark.parametrize(
    "shell",
    [
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # sbatch
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"},  # salloc
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun --pty bash
    ],
)
def test_a_slurm_shell_is_one_process(shell: dict[str, str]) -> None:
    assert place(discover(shell)) == (0, 1, 0)


def test_a_given_master_address_is_kept() -> None:
    launch = discover({**SRUN, "MASTER_ADDR": "ib-head", "MASTER_PORT": "7"})
    assert (launch.master_addr, launch.master_port) == ("ib-head", 7)


def test_mpirun() -> None:
    launch = discover(MPIRUN)
    assert place(launch) == (3, 4, 3)
    assert launch.master_addr == "127.0.0.1"


def test_mpirun_over_several_machines_needs_an_address() -> None:
    with pytest.raises(UserError, match="MASTER_ADDR"):
        discover({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    inside_slurm = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "SLURM_JOB_NODELIST": "n7,n8"}
    assert discover({**MPIRUN, **inside_slurm}).master_addr == "n7"


def test_mpirun_within_a_slurm_allocation() -> None:
    """Its daemons are a job step of two tasks, whose variables the processes inherit."""
    daemons = {
        **SRUN,
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_JOB_NODELIST": "node[03-05]",
    }
    ranks = {**MPIRUN, "OMPI_COMM_WORLD_RANK": "6", "OMPI_COMM_WORLD_SIZE": "8"}
    launch = discover({**daemons, **ranks})
    assert place(launch) == (6, 8, 3)
    assert (launch.source, launch.master_addr) == ("mpirun", "node03")


def test_srun_comes_before_mpirun() -> None:
    assert discover({**MPIRUN, **SRUN}).source == "srun"
    # One task on each machine, and as many processes: either could have started them.
    single = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1(x8)"}
    assert discover({**MPIRUN, **single}).source == "srun"


HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


def test_mpirun_of_mpich_and_its_relatives() -> None:
    launch = discover({**HYDRA, "MASTER_ADDR": "head"})
    assert place(launch) == (5, 8, 1) and launch.local_world_size == 4
    assert launch.source == "mpirun"


def test_pmi_variables_that_srun_sets_are_not_mpiruns() -> None:
    pmi = {"PMI_RANK": "5", "PMI_SIZE": "8"}
    assert discover({**SRUN, **pmi}).source == "srun"
    shell = {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    assert place(discover({**shell, "PMI_RANK": "0", "PMI_SIZE": "1"})) == (0, 1, 0)


@pytest.mark.parametrize("rank", range(6))
def test_srun_over_nodes_with_unequal_numbers_of_tasks(rank: int) -> None:
    """Four tasks on the first node and two on the second: nobody knows their number on its own."""
    tasks = {
        **SRUN,
        "SLURM_STEP_NUM_TASKS": "6",
        "SLURM_STEP_TASKS_PER_NODE": "4,2",
        "SLURM_STEP_NODELIST": "gpu[7-8]",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % 4),
    }
    launch = discover(tasks)
    assert place(launch) == (rank, 6, rank % 4)
    assert launch.local_world_size is None and launch.master_addr == "gpu7"


def test_torchrun_of_one_machine_says_no_number_of_machines() -> None:
    """As torchrun and torch.distributed.run set them without --nnodes."""
    environ = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
    }
    launch = discover(environ)
    assert place(launch) == (1, 2, 1) and launch.source == "torchrun"
    # A torchrun per node that srun started: its variables win over those of the step.
    assert place(discover({**SRUN, **environ})) == (1, 2, 1)


def test_rank_by_hand() -> None:
    launch = discover({"RANK": "3", "WORLD_SIZE": "4"})
    assert place(launch) == (3, 4, 3)
    assert discover({"RANK": "3", "WORLD_SIZE": "4"}, local_rank=1).local_rank == 1
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}
    assert discover(environ, local_rank=1).local_rank == 0  # the environment wins


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "RANK is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 is not among the 2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' is not a whole number"),
    ],
)
def test_contradictions_are_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        discover(environ)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[01-03,7]", "node01"),
        ("node[7,01-03],login1", "node7"),
        ("login1,node[01-03]", "login1"),
        ("single", "single"),
        ("rack[2-3]n[08,10]-ib", "rack2n08-ib"),
        ("a-b.example.org,c", "a-b.example.org"),
    ],
)
def test_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_ports_of_neighbouring_jobs_and_steps_differ() -> None:
    ports = {job_port("100"), job_port("101"), job_port("100", "1"), job_port("101", "1")}
    assert len(ports) == 4
    assert all(1024 < port < 32768 for port in ports)


def test_env_03_devices_do_not_decide_the_world() -> None:
    assert discover({"RANK": "1", "WORLD_SIZE": "2"}).world_size == 2
    assert local_device(1, device_count=8) == 1
    assert local_device(3, device_count=1) == 0  # each task sees its own only
    with pytest.raises(UserError, match="local rank 2 .* 2 are visible"):
        local_device(2, device_count=2)


def test_launching_imports_no_torch() -> None:
    code = "import sys, megatron.training.processes.launch; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
