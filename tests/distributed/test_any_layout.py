"""Any layout reads what any other wrote: chains of layouts drawn at random go on as one process.

Each chain of three runs hands its checkpoint on twice, at another number of ranks, with replicas
that share out something else, with other padding of the vocabulary; losses, gradient norms and the
last checkpoint are those of one process that nothing interrupted.
"""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.core.dist_checkpointing.reader import Checkpoint
from tests.harness import Pool
from tests.programs import assert_rows_equal, launch, metrics

COMMON = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --swiglu "
    "--position-embedding-type rope --group-query-attention --num-query-groups 2 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 30 --attention-dropout 0 "
    "--hidden-dropout 0 --micro-batch-size 1 --global-batch-size 30 --lr 1e-2 --clip-grad 0.5 "
    "--train-iters 3 --eval-iters 0 --log-interval 1 --num-workers 0 --fp64 --device cpu "
    "--metrics-file metrics.jsonl --save save"
)
ITERATIONS = 3


class Drawn(NamedTuple):
    """One layout."""

    world: int
    words: str


@st.composite
def layouts(draw: st.DrawFn) -> Drawn:
    """Return a layout of one to eight ranks, primes among them."""
    tp, cp, pp = draw(
        st.sampled_from(
            [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 4), (2, 1, 2), (2, 2, 1)]
        )
    )
    most = 8 // (tp * cp * pp)
    dp = draw(st.sampled_from([size for size in (1, 2, 3, 5, 6) if size <= most]))
    words = [f"--make-vocab-size-divisible-by {draw(st.sampled_from([1, 8, 13]))}"]
    for size, flag in ((tp, "tensor-model"), (pp, "pipeline-model"), (cp, "context")):
        words += [f"--{flag}-parallel-size {size}"] * (size > 1)
    words += ["--sequence-parallel"] * (tp > 1 and draw(st.booleans()))
    if pp == 2:
        schedule = draw(st.sampled_from(["", "--pipeline-schedule zb-v", "vpp"]))
        words.append(schedule.replace("vpp", "--num-virtual-stages-per-pipeline-rank 2"))
    shared = draw(st.sampled_from(["no_shard", "optim", "optim_grads", "optim_grads_params"]))
    words.append(f"--data-parallel-sharding-strategy {shared}")
    if dp * cp > 1:
        words += ["--overlap-grad-reduce"] * draw(st.booleans())
        if dp in (2, 6) and shared != "no_shard":
            instances = draw(st.sampled_from([1, 2]))
            words += [f"--num-distributed-optimizer-instances {instances}"] * (instances > 1)
    return Drawn(tp * cp * pp * dp, " ".join(words))


def train(pool: Pool, layout: Drawn, folder: Path, *more: object) -> None:
    """Run on a layout and add to the folder's metrics and checkpoints."""
    folder.mkdir(exist_ok=True)
    words = f"{COMMON} {layout.words}".split()
    ended = launch(pool, layout.world, "pretrain_gpt", *words, *more, folder=folder)
    assert [one.code for one in ended] == [0] * layout.world, (layout, ended[0].err)


def stored(folder: Path) -> dict[str, Tensor]:
    """Return weights and optimizer states of the last checkpoint."""
    with Checkpoint(folder / "save" / f"iter_{ITERATIONS:07d}") as checkpoint:
        keys = [key for key in checkpoint.index.tensors if not key.startswith("random.")]
        return {key: checkpoint.read(key) for key in keys}


@pytest.fixture(scope="module")
def straight(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of one process that nothing interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    train(pool, Drawn(1, ""), folder)
    return folder


def check(pool: Pool, straight: Path, folder: Path, chain: list[Drawn]) -> None:
    """Run an iteration on each layout, each going on from the one before, and compare."""
    for done, layout in enumerate(chain, start=1):
        load = () if done == 1 else ("--load", "save")
        train(pool, layout, folder, *load, "--exit-interval", done)
    assert_rows_equal(metrics(folder / "metrics.jsonl"), metrics(straight / "metrics.jsonl"))
    ours, theirs = stored(folder), stored(straight)
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        largest = float(tensor.abs().max())
        torch.testing.assert_close(ours[key], tensor, rtol=0, atol=1e-10 * largest)


CHAINS = st.lists(layouts(), min_size=ITERATIONS, max_size=ITERATIONS)
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(
    max_examples=3, derandomize=True, deadline=None, database=None, suppress_health_check=QUIET
)
@given(chain=CHAINS)
def test_chains_of_layouts_go_on_as_one_process(
    pool: Pool, straight: Path, tmp_path_factory: pytest.TempPathFactory, chain: list[Drawn]
) -> None:
    check(pool, straight, tmp_path_factory.mktemp("chain"), chain)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, database=None, suppress_health_check=QUIET)
@given(chain=CHAINS)
def test_many_chains_of_layouts(
    pool: Pool, straight: Path, tmp_path_factory: pytest.TempPathFactory, chain: list[Drawn]
) -> None:
    check(pool, straight, tmp_path_factory.mktemp("chain"), chain)
