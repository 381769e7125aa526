"""How the processes of a run meet: what is said when they do not, or were told different things."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.core.utils import UserError
from megatron.training.arguments import parse
from megatron.training.failing.failure import RunFailed
from megatron.training.processes import meeting
from megatron.training.processes.launch import Launch
from tests.harness import Pool

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --global-batch-size 4 "
    "--tokenizer-type NullTokenizer --vocab-size 20 --train-iters 1 --lr 1e-2 --device cpu"
)
PLACE = Launch(1, 4, 1, 4, "localhost", 29501, "srun", "Slurm's node list")
LIMIT = timedelta(seconds=60)


def _check(rank: int, more: str) -> str:
    flags = f"{FLAGS} --tensorboard-dir /scratch/{rank} --num-workers {rank}"
    first, _, others = more.rpartition(" | ")
    source = "" if "--data-path" in more else "--mock-data"
    flags = f"{flags} {source} {others if rank else first}"
    try:
        meeting.check_settings(parse(flags.split(), "pretrain_gpt", world_size=2).config)
    except UserError as error:
        return str(error)
    except SystemExit as ended:
        return f"exit {ended.code}"
    return ""


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("", ""),
        ("--seed 7", "rank 1 has --seed 7, rank 0 1234"),
        ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2, rank 0 1"),
        ("--split 90,10,0", "--split '90,10,0'"),
        ("--eval-iters 7", "--eval-iters 7"),
        # A path may be a machine's own, but not whether there is one.
        ("--load /x/a | ", "rank 1 has --load None, rank 0 '/x/a'"),
        (" | --save /x/a", "rank 1 has --save '/x/a', rank 0 None"),
        ("--save /x/a | --save /x/b", ""),
        # All take the checkpoint that rank 0 finds.
        ("--load /x/a | --load /x/b", "rank 1 has --load '/x/b', rank 0 '/x/a'"),
        (
            "--data-path 0.9 /x/a 0.1 /x/b | --data-path 0.1 /x/a 0.9 /x/b",
            "--data-path ('0.1', '/x/a', '0.9', '/x/b'), rank 0 ('0.9', ",
        ),
        ("--data-path 0.9 /x/a 0.1 /x/b | --data-path 0.9 /y/a 0.1 /y/b", ""),
        ("--data-path /x/a /x/b | --data-path /x/a", "rank 1 has --data-path"),
    ],
)
def test_all_processes_are_told_the_same(pool: Pool, more: str, said: str) -> None:
    messages = pool.run(2, _check, more)
    assert said in messages[0] and bool(messages[0]) == bool(said)
    assert messages[1] == ("exit 2" if said else "")


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (dist.DistNetworkError("... EADDRINUSE ..."), UserError, "set MASTER_PORT to a free one"),
        (dist.DistNetworkError("unreachable"), RunFailed, "(unreachable)"),
        (dist.DistStoreError("Timed out ... 1/4 clients joined"), RunFailed, "1/4 clients joined"),
    ],
)
def test_why_they_do_not_meet(error: Exception, kind: type[Exception], said: str) -> None:
    def connect() -> None:
        raise error

    with pytest.raises(kind) as caught:
        meeting.meet(PLACE, connect, LIMIT)
    assert said in str(caught.value) and "localhost:29501" in str(caught.value)
    assert "rank 1 of 4 (srun)" in str(caught.value)


def test_the_limit_is_named_as_it_was_given() -> None:
    def connect() -> None:
        raise dist.DistStoreError("Timed out")

    with pytest.raises(
        RunFailed, match=r"within 90 s \(--distributed-timeout-minutes 1 and 30 s\)"
    ):
        meeting.meet(PLACE, connect, LIMIT, timedelta(seconds=30))


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a..b", "x" * 300])
def test_a_host_that_nobody_knows_is_refused_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "RESOLVING", 0.0)
    place = replace(PLACE, master_addr=name)
    with pytest.raises(UserError, match=r"rank 1 of 4 .* cannot find the host of rank 0") as caught:
        meeting.meet(place, lambda: pytest.fail("connects"), LIMIT)
    assert name in str(caught.value)


def test_errors_of_torch_that_are_no_matter_of_meeting_stay_as_they_are() -> None:
    with pytest.raises(ValueError, match="other"):
        meeting.meet(PLACE, lambda: int("other"), LIMIT)  # type: ignore[arg-type,return-value]


STRANGER = """
import sys
from datetime import timedelta
from pathlib import Path
sys.path.insert(0, {root!r})
from megatron.training.processes import launch
from megatron.training.processes import meeting
from megatron.training.processes import setup
import os
meeting.PATIENCE = timedelta(seconds=1)
limit = timedelta(seconds=2)
place = launch.discover(os.environ)
meeting.meet(place, lambda: setup.connect(place, "gloo", limit, os.environ), limit)
"""


def test_a_stranger_at_the_port_that_never_answers_holds_nobody_for_ever() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        environment = {
            **os.environ,
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        done = subprocess.run(
            [sys.executable, "-c", STRANGER.format(root=str(ROOT))],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 1
    assert f"did not meet the others at 127.0.0.1:{port}" in done.stderr
