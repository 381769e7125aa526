"""Every rank's calls find each other by NCCL's rule, which gloo does not enforce."""

import os
import re
import time
from pathlib import Path

import pytest
import torch

import pretrain_gpt
from megatron.core import comm
from megatron.core.comm import Call
from megatron.core.datasets.cache import BuildPolicy
from megatron.core.utils import silent
from megatron.training import arguments, startup
from megatron.training.job import Job
from megatron.training.processes import setup
from megatron.training.program import Program
from tests.call_order import disagreement
from tests.harness import Pool

CPU = torch.device("cpu")
# Eight samples in the first iteration and twelve in the two others: two and three microbatches of
# each of two replicas. An evaluation during the run and one at its end, and a checkpoint.
RUN = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 2 "
    "--global-batch-size 12 --rampup-batch-size 8 4 8 --lr 1e-3 --mock-data --num-workers 0 "
    "--tokenizer-type NullTokenizer --vocab-size 60 --train-samples 32 --log-interval 1 "
    "--timing-log-level 2 --eval-iters 1 --eval-interval 2 --device cpu --fp64 "
    "--log-params-norm --log-num-zeros-in-grad"
)
LAYOUTS = {
    "tp2 sp pp2 vpp2": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--num-virtual-stages-per-pipeline-rank 2 --untie-embeddings-and-output-weights",
    ),
    "tp4 sp, shared key heads": (4, "--tensor-model-parallel-size 4 --sequence-parallel"),
    "cp2 dp2 overlapped": (
        4,
        "--context-parallel-size 2 --overlap-grad-reduce --ddp-bucket-size 2000",
    ),
    "pp2 dp2 overlapped": (
        4,
        "--pipeline-model-parallel-size 2 --overlap-grad-reduce --ddp-bucket-size 2000",
    ),
    "pp4": (4, "--pipeline-model-parallel-size 4"),
    "pp2 waiting": (2, "--pipeline-model-parallel-size 2 --no-overlap-p2p-communication"),
    "zb-v": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v"),
    "tp2 pp2 cp2": (
        8,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2 "
        "--cp-comm-type a2a",
    ),
    "tp2 sp, rings beside products": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
    ),
    "cp4, two levels": (
        4,
        "--context-parallel-size 4 --cp-comm-type a2a+p2p "
        "--hierarchical-context-parallel-sizes 2 2",
    ),
    "cp2, keys gathered": (2, "--context-parallel-size 2 --cp-comm-type all_gather"),
    # 16 positions of 2 samples, 128 rows of the padded vocabulary on a rank: 4,096 logits, so four
    # pieces of 8 tokens.
    "tp2, loss by pieces": (2, "--tensor-model-parallel-size 2 --logits-at-once 1024"),
}
# What shows that the layout's own way of communicating was at work: axis, call, shape if it tells.
AT_WORK: dict[str, list[tuple[str, str, tuple[int, ...] | None]]] = {
    "tp2 sp, rings beside products": [("tp", "shift", None)],
    "cp4, two levels": [("cp_inner", "all_to_all", None), ("cp_outer", "shift", None)],
    "cp2, keys gathered": [("cp", "all_gather", None)],
    "tp2, loss by pieces": [("tp", "all_reduce max", (8,))],
}


def calls_of_a_run(rank: int, folder: str, words: list[str]) -> list[Call]:
    """Train through the parts of the real entry point, and return what this rank called."""
    run = arguments.parse(words, "pretrain_gpt", world_size=int(os.environ["WORLD_SIZE"]))
    mesh = setup.connected_mesh(run.config, CPU)
    program = Program(
        build_model=pretrain_gpt.build_model,
        build_datasets=pretrain_gpt.build_datasets,
        forward_step=pretrain_gpt.forward_step,
    )
    os.chdir(folder)
    policy = BuildPolicy(build=rank == 0, timeout=60)
    job = Job(run.config, mesh, program, policy, silent, startup.StartupClock(), time.time())
    with comm.recording() as calls:
        assert job.run() == 0
    return calls


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_calls_of_a_run_find_each_other(pool: Pool, tmp_path: Path, name: str) -> None:
    world, layout = LAYOUTS[name]
    words = f"{RUN} {layout} --save {tmp_path}/save".split()
    made = pool.run(world, calls_of_a_run, str(tmp_path), words)
    assert disagreement(dict(enumerate(made))) is None
    axes = {call.axis for calls in made for call in calls}
    own = {axis for axis, *_ in AT_WORK.get(name, [])} or re.findall(r"\b(tp|pp|cp)\d", name)
    assert axes >= {"world", *own}, axes
    assert ("dp_cp" in axes) == bool(re.search(r"\b[dc]p\d", name))
    made_by_zero = {(call.axis, call.name, call.shape) for call in made[0]}
    for axis, call, shape in AT_WORK.get(name, []):
        shapes = {found for *where, found in made_by_zero if where == [axis, call]}
        assert shapes and (shape is None or shape in shapes), (axis, call, shapes)


def planted(rank: int, name: str) -> list[Call]:
    """Do what gloo puts up with."""
    mesh = setup.connected_mesh(arguments.parse(RUN.split(), world_size=2).config, CPU)
    axis, other = mesh.dp, 1 - rank
    with comm.recording() as calls:
        comm.all_reduce(torch.ones(3), axis)
        if name == "order of transfers":
            # Both send first. gloo starts both at once, one NCCL communicator never the second.
            out = torch.empty(2)
            sent = comm.send(torch.ones(2), axis, other)
            comm.receive(out, axis, other).wait()
            sent.wait()
        elif name == "a call too many":
            # Nobody waits for it, so that gloo goes on.
            if rank == 1:
                comm.all_reduce(torch.ones(4), axis, async_op=True)
        else:
            shape = (2, 3) if rank == 0 else (3, 2)
            comm.all_reduce(torch.ones(shape), axis, "max")
    return calls


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "order of transfers",
            [
                "rank 0, call 2: send to rank 1 of float32 [2]",
                "rank 1, call 2: send to rank 0 of float32 [2]",
            ],
        ),
        (
            "a call too many",
            [
                "rank 0, call 2: no more calls",
                "rank 1, call 2: all_reduce sum of float32 [4]",
            ],
        ),
        (
            "shape",
            [
                "rank 0, call 2: all_reduce max of float32 [2, 3]",
                "rank 1, call 2: all_reduce max of float32 [3, 2]",
            ],
        ),
    ],
)
def test_a_planted_mismatch_is_named(pool: Pool, name: str, expected: list[str]) -> None:
    calls = dict(enumerate(pool.run(2, planted, name)))
    head = "ranks [0, 1] of axis dp do not find each other:"
    assert disagreement(calls) == "\n".join([head, *(f"  {line}" for line in expected)])


def test_groups_are_told_apart() -> None:
    """Two groups may interleave as they like; within one, transfers of other pairs are in order."""

    def call(axis: str, ranks: tuple[int, ...], name: str, peer: int | None = None) -> Call:
        return Call(axis, ranks, name, (1,), "float32", peer)

    tp, dp, pp = (0, 1), (0, 1), (0, 1, 2)
    fine = {
        0: [call("tp", tp, "shift"), call("dp", dp, "barrier"), call("pp", pp, "send", 1)],
        1: [
            call("dp", dp, "barrier"),
            call("pp", pp, "receive", 0),
            call("tp", tp, "shift"),
            call("pp", pp, "send", 2),
        ],
        2: [call("pp", pp, "receive", 1)],
    }
    assert disagreement(fine) is None
    crossed = {
        0: [call("pp", pp, "send", 1), call("pp", pp, "send", 2)],
        1: [call("pp", pp, "receive", 2), call("pp", pp, "receive", 0)],
        2: [call("pp", pp, "receive", 0), call("pp", pp, "send", 1)],
    }
    text = disagreement(crossed)
    assert text is not None and "rank 1, call 1: receive from rank 2" in text


def test_nothing_is_written_down_outside_the_block(pool: Pool) -> None:
    assert pool.run(2, outside) == [1, 1]


def outside(rank: int) -> int:
    mesh = setup.connected_mesh(arguments.parse(RUN.split(), world_size=2).config, CPU)
    comm.barrier(mesh.dp)
    with comm.recording() as calls:
        comm.barrier(mesh.dp)
    comm.barrier(mesh.dp)
    return len(calls)
