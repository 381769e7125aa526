"""Jobs that torchrun restarts go on by themselves, also with fewer processes.

What a user gives is torchrun's own flags and one folder for --save and --load; losses are those of
one process that nobody interrupted.
"""

import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.end_to_end.elastic_program import Death, agent
from tests.end_to_end.interruptions import LIMIT, RUN, import_once, straight
from tests.programs import assert_rows_equal, free_port, metrics

SAVING = "--save save --load save --save-interval 2"


@pytest.fixture(autouse=True, scope="module")
def _import_once() -> None:
    import_once("tests.end_to_end.elastic_program")


def meeting(port: int) -> str:
    """Return torchrun's words for agents that meet at a port of this machine."""
    return (
        f"--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-id job --monitor-interval 0.1"
    )


def start(
    folder: Path, torchrun: str, program: str, log: str = "log", deaths: Sequence[Death] = ()
) -> BaseProcess:
    """Start one agent with torchrun's words, and words of the program."""
    words = (torchrun.split(), f"{RUN} {program}".split(), str(folder), log, list(deaths))
    process = multiprocessing.get_context("forkserver").Process(target=agent, args=words)
    process.start()
    return process


def ended(process: BaseProcess) -> int | None:
    """Wait for the end of an agent and return its code; None if it had to be killed."""
    process.join(LIMIT)
    code = process.exitcode
    kill(process)
    return code


def kill(process: BaseProcess) -> None:
    """Kill an agent with its workers, as a machine that is lost."""
    if process.pid is not None and process.is_alive():
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def attempts(folder: Path) -> list[tuple[int, int]]:
    """Return iteration and attempt of every row, in order."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [(row["iteration"], row["attempt"]) for row in rows]


def check(folder: Path, expected: set[tuple[int, int]]) -> None:
    """Look for these (iteration, attempt) among the rows, and compare the numbers of all."""
    assert expected <= set(attempts(folder))
    one = straight(folder / "straight", f"--train-iters {max(number for number, _ in expected)}")
    for row in metrics(folder / "metrics.jsonl"):
        assert_rows_equal([row], one[row["iteration"]])


def test_a_killed_worker_is_restarted_and_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    """Rank 1 is killed in iteration 4, and after the restart rank 0 in iteration 5."""
    torchrun = f"{meeting(free_port())} --nproc-per-node 2 --max-restarts 2"
    deaths = [Death(0, 1, 4), Death(1, 0, 5)]
    process = start(tmp_path, torchrun, f"{SAVING} --train-iters 6", deaths=deaths)
    assert ended(process) == 0, (tmp_path / "log").read_text()
    check(tmp_path, {(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2)})


def test_a_job_that_loses_a_machine_goes_on_with_the_other(tmp_path: Path) -> None:
    """Two agents of one process each; the batch is still 4 sequences when one is left."""
    port = free_port()
    settings = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
    torchrun = f"{meeting(port)} --rdzv-conf {settings} --nnodes 1:2 --max-restarts 2"
    program = f"{SAVING} --train-iters 8"
    agents = [start(tmp_path, torchrun, program, "log.0")]
    try:
        _wait_for_listener(port)  # whoever comes first keeps the meeting point
        agents.append(start(tmp_path, torchrun, program, "log.1", [Death(0, None, 5, True)]))
        assert ended(agents[0]) == 0, (tmp_path / "log.0").read_text()
    finally:
        for process in agents:
            kill(process)
    printed = "".join((tmp_path / log).read_text() for log in ("log.0", "log.1"))
    assert "launch: 2 processes" in printed and "launch: 1 process " in printed
    check(tmp_path, {(1, 0), (2, 0), (3, 0), (5, 1), (6, 1), (7, 1), (8, 1)})


def _wait_for_listener(port: int) -> None:
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("nobody listens")
