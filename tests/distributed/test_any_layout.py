"""Any layout reads what any other wrote: chains of layouts drawn at random go on as one process.

Each chain of three runs hands its checkpoint on twice, at another number of ranks, with replicas
that share out something else, with other padding of the vocabulary; losses, gradient norms and the
last checkpoint are those of one process that nothing interrupted. Weights and states of low
precision are handed on bit for bit, since what comes of them depends on the order of sums.
"""

import math
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

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
    "--hidden-dropout 0 --micro-batch-size 1 --lr 1e-2 --clip-grad 0.5 "
    "--eval-iters 0 --log-interval 1 --num-workers 0 --device cpu "
    "--metrics-file metrics.jsonl --save save"
)
MODELS = {
    "tied": "",
    "untied": "--untie-embeddings-and-output-weights",
    # Epsilon is far above rounding, or Adam would make steps of it. Biases are stored, not trained.
    "experts": "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 12 --adam-eps 1e-3 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.05 --moe-aux-loss-coeff 0.1 --moe-layer-freq [0]+[1]*3",
}
AWARE = "--bf16 --use-precision-aware-optimizer"
PRECISIONS = {
    "bf16": "--bf16",
    "bf16-moments": f"{AWARE} --adam-beta2 0.95 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "fp16-moments": f"{AWARE} --exp-avg-dtype fp16 --exp-avg-sq-dtype fp16",
    "fp16": "--fp16 --initial-loss-scale 1024 --loss-scale-window 2",
}
WORLDS = (1, 2, 3, 5, 8)
CHAIN = 3


class Drawn(NamedTuple):
    """One layout."""

    world: int
    replicas: int
    """What a global batch must be divisible by."""
    words: str


SERIAL = Drawn(1, 1, "")


def layout(draw: Random, world: int, model: str) -> Drawn:
    """Return a layout of ``world`` ranks, of any kind that can train the model."""
    sizes = [
        (tp, cp, pp)
        for tp in (1, 2, 4)
        for cp in (1, 2)
        for pp in (1, 2, 4)
        if world % (tp * cp * pp) == 0
    ]
    tp, cp, pp = draw.choice(sizes)
    sharers = world // (tp * pp)
    words = [f"--make-vocab-size-divisible-by {draw.choice([1, 8, 13])}"]
    for size, flag in ((tp, "tensor-model"), (pp, "pipeline-model"), (cp, "context")):
        words += [f"--{flag}-parallel-size {size}"] * (size > 1)
    words += ["--sequence-parallel"] * (tp > 1 and draw.choice([False, True]))
    if pp == 2:
        vpp = "--num-virtual-stages-per-pipeline-rank 2"
        words.append(draw.choice(["", "--pipeline-schedule zb-v", vpp]))
    shared = draw.choice(["no_shard", "optim", "optim_grads", "optim_grads_params"])
    words.append(f"--data-parallel-sharding-strategy {shared}")
    if sharers > 1:
        words += ["--overlap-grad-reduce"] * draw.choice([False, True])
        if sharers in (4, 8) and shared != "no_shard":
            instances = draw.choice([1, 2])
            words += [f"--num-distributed-optimizer-instances {instances}"] * (instances > 1)
    if model == "experts":
        words.append(expert_layout(draw, world // pp))
    return Drawn(world, sharers // cp, " ".join(words))


def expert_layout(draw: Random, ranks: int) -> str:
    """Return how experts are cut over the ranks of a stage, and how tokens get to them."""
    etp, ep = draw.choice(
        [(etp, ep) for etp in (1, 2) for ep in (1, 2, 4) if ranks % (etp * ep) == 0]
    )
    dispatcher = draw.choice(["allgather", "alltoall"])
    sizes = f"--expert-tensor-parallel-size {etp} --expert-model-parallel-size {ep}"
    return f"{sizes} --moe-token-dispatcher-type {dispatcher}"


def layouts(draw: Random, model: str) -> list[Drawn]:
    """Return the layouts of a chain, each of another number of ranks."""
    return [layout(draw, world, model) for world in draw.sample(WORLDS, CHAIN)]


def batch(chain: list[Drawn]) -> str:
    """Return a global batch that all layouts of a chain can cut, as a flag."""
    common = math.lcm(*(drawn.replicas for drawn in chain))
    return f"--global-batch-size {common * math.ceil(4 / common)}"


def train(pool: Pool, layout: Drawn, folder: Path, kind: str, *more: object) -> None:
    """Run with flags of ``kind`` on a layout; add to the folder's metrics and checkpoints."""
    folder.mkdir(exist_ok=True)
    words = f"{COMMON} {kind} {layout.words}".split()
    ended = launch(pool, layout.world, "pretrain_gpt", *words, *more, folder=folder)
    assert [one.code for one in ended] == [0] * layout.world, (layout, ended[0].err)


class Stored(NamedTuple):
    """What a checkpoint holds."""

    tensors: dict[str, Tensor]
    """Weights and optimizer states."""
    facts: dict[str, Any]
    """Of the optimizer and of the schedule."""


def stored(folder: Path, iteration: int) -> Stored:
    """Return what a checkpoint holds, whole tensors read through their boxes."""
    with Checkpoint(folder / "save" / f"iter_{iteration:07d}") as checkpoint:
        keys = [key for key in checkpoint.index.tensors if not key.startswith("random.")]
        facts = {name: checkpoint.facts[name] for name in ("optimizer", "schedule")}
        return Stored({key: checkpoint.read(key) for key in keys}, facts)


class Straight:
    """Runs of one process that nothing interrupted, each made when it is first asked for."""

    def __init__(self, pool: Pool, factory: pytest.TempPathFactory) -> None:
        self._pool, self._factory = pool, factory
        self._folders: dict[str, Path] = {}

    def folder(self, kind: str) -> Path:
        """Return the folder of a run with flags of ``kind``."""
        if kind not in self._folders:
            folder = self._factory.mktemp("straight")
            train(self._pool, SERIAL, folder, kind)
            self._folders[kind] = folder
        return self._folders[kind]


@pytest.fixture(scope="module")
def straight(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    return Straight(pool, tmp_path_factory)


def check(pool: Pool, straight: Straight, folder: Path, model: str, chain: list[Drawn]) -> None:
    """Run an iteration on each layout, each going on from the one before, and compare."""
    kind = f"{MODELS[model]} --fp64 --train-iters {CHAIN} {batch(chain)}"
    for done, drawn in enumerate(chain, start=1):
        load = () if done == 1 else ("--load", "save")
        train(pool, drawn, folder, kind, *load, "--exit-interval", done)
    expected = straight.folder(kind)
    assert_rows_equal(metrics(folder / "metrics.jsonl"), metrics(expected / "metrics.jsonl"))
    ours, theirs = stored(folder, CHAIN), stored(expected, CHAIN)
    assert ours.facts == theirs.facts
    assert ours.tensors.keys() == theirs.tensors.keys()
    for key, tensor in theirs.tensors.items():
        largest = float(tensor.abs().max())
        torch.testing.assert_close(ours.tensors[key], tensor, rtol=0, atol=1e-10 * largest)


TRAINED = 3
"""Iterations before a state of low precision is handed on: a scale has grown, and counts again."""


def hand_on(pool: Pool, folder: Path, model: str, precision: str, chain: list[Drawn]) -> None:
    """Train on the first layout alone; what the others load they save again."""
    last = TRAINED + CHAIN - 1
    kind = f"{MODELS[model]} {PRECISIONS[precision]} --train-iters {last} {batch(chain)}"
    skip = ("--iterations-to-skip", *range(TRAINED + 1, last + 1))
    for done, drawn in enumerate(chain, start=TRAINED):
        load = () if done == TRAINED else ("--load", "save")
        train(pool, drawn, folder, kind, *load, "--exit-interval", done, *skip)
    first = stored(folder, TRAINED)
    assert any(key.startswith("optimizer.master.") for key in first.tensors)
    if precision == "fp16":
        scale = first.facts["optimizer"]["loss_scale"]
        assert (scale["scale"], scale["steps"]) == (2048, 1)
    for iteration in range(TRAINED + 1, last + 1):
        again = stored(folder, iteration)
        assert again.facts == first.facts
        assert again.tensors.keys() == first.tensors.keys()
        for key, tensor in first.tensors.items():
            assert again.tensors[key].dtype == tensor.dtype
            if precision == "fp16-moments" and key.startswith("optimizer.exp_avg"):
                # Other neighbours share a scale: what they dwarf is rounded to what they allow.
                dwarfed = 2**-29 * float(tensor.abs().max())
                torch.testing.assert_close(again.tensors[key], tensor, rtol=0, atol=dwarfed)
            else:
                assert torch.equal(again.tensors[key], tensor), (key, iteration)


@pytest.mark.parametrize(
    ("model", "seed"),
    [("untied", 24), ("experts", 1), pytest.param("tied", 28, marks=pytest.mark.slow)],
)
def test_chains_of_layouts_go_on_as_one_process(
    pool: Pool, straight: Straight, tmp_path: Path, model: str, seed: int
) -> None:
    check(pool, straight, tmp_path, model, layouts(Random(seed), model))


@pytest.mark.parametrize(
    ("model", "precision", "seed"), [("tied", "fp16", 28), ("experts", "bf16-moments", 18)]
)
def test_states_of_low_precision_are_handed_on_bit_for_bit(
    pool: Pool, tmp_path: Path, model: str, precision: str, seed: int
) -> None:
    hand_on(pool, tmp_path, model, precision, layouts(Random(seed), model))


QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
MANY = settings(max_examples=60, deadline=None, database=None, suppress_health_check=QUIET)
DRAWS = st.randoms(use_true_random=False)


@pytest.mark.slow
@MANY
@given(model=st.sampled_from(list(MODELS)), draw=DRAWS)
def test_many_chains_of_layouts(
    pool: Pool,
    straight: Straight,
    tmp_path_factory: pytest.TempPathFactory,
    model: str,
    draw: Random,
) -> None:
    check(pool, straight, tmp_path_factory.mktemp("chain"), model, layouts(draw, model))


@pytest.mark.slow
@MANY
@given(model=st.sampled_from(list(MODELS)), precision=st.sampled_from(list(PRECISIONS)), draw=DRAWS)
def test_many_chains_of_low_precision(
    pool: Pool, tmp_path_factory: pytest.TempPathFactory, model: str, precision: str, draw: Random
) -> None:
    hand_on(pool, tmp_path_factory.mktemp("chain"), model, precision, layouts(draw, model))
