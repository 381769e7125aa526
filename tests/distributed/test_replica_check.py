"""Copies of weights that drift apart stop the run, with their names and the ranks that differ."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pretrain_gpt
from megatron.core import comm, rng, sharding
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.mesh import Mesh
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.groups import grouping
from megatron.core.tokenizers.vocabulary import resolve_vocabulary
from megatron.training import arguments
from megatron.training.failing.failure import RunFailed
from megatron.training.processes import setup
from megatron.training.replica_check import ReplicaCheck, describe, fingerprint
from tests.harness import Pool

CPU = torch.device("cpu")
RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--max-position-embeddings 16 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 60 --train-iters 1 --device cpu --global-batch-size 4 "
    "--group-query-attention --num-query-groups 2"
)
NORM = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"


def build(world: int, words: str) -> tuple[Mesh, list[nn.Module]]:
    """Return a model as a run starts with it."""
    config = arguments.parse(f"{RUN} {words}".split(), world_size=world).config
    mesh = setup.connected_mesh(config, CPU)
    vocabulary = resolve_vocabulary(config.tokenizer, 61, mesh.tp.size)
    stages = [config.stages[at] for at in config.placement.positions(mesh.pp.coordinate)]
    chunks = pretrain_gpt.build_model(config, mesh, vocabulary, stages)
    for chunk in chunks:
        rng.initialize(chunk, 1)
    return mesh, list(chunks)


def replicas_of(chunks: list[nn.Module], mesh: Mesh) -> DataParallel:
    return DataParallel(chunks, mesh, torch.float32, group_of=grouping(OptimizerConfig.resolve()))


def corrupt(chunks: list[nn.Module], part: str, place: tuple[int, ...]) -> str:
    """Change one element as little as its format can; return the parameter's name."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            name = sharding.of(parameter).name
            if name.endswith(part):
                with torch.no_grad():
                    old = parameter[place].clone()
                    parameter[place] = torch.nextafter(old, old + 1)
                return name
    raise AssertionError(f"no parameter {part}")


def check(rank: int, world: int, words: str, guilty: int, part: str, place: tuple[int, ...]) -> str:
    """Return the message of the check after ``guilty`` has changed an element."""
    mesh, chunks = build(world, words)
    checker = ReplicaCheck(replicas_of(chunks, mesh), mesh, 10)
    checker.after(10)
    if rank == guilty:
        corrupt(chunks, part, place)
    checker.after(15)  # not due
    with pytest.raises(RunFailed) as caught:
        checker.after(20)
    return str(caught.value)


TP2, TP4 = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 4"
PP2, CP2 = "--pipeline-model-parallel-size 2", "--context-parallel-size 2"
CASES = {
    "a replica of three": (
        (3, "--global-batch-size 3", 1, "0.mlp.linear_fc1.weight", (5, 2)),
        "decoder.layers.0.mlp.linear_fc1.weight: [dp1] (rank 1) against 2 others that agree",
    ),
    "one of two replicas": (
        (2, "", 1, "embedding.word_embeddings.weight", (60, 15)),
        "embedding.word_embeddings.weight: [dp0] (rank 0) against [dp1] (rank 1)",
    ),
    "a context-parallel rank": (
        (4, CP2, 2, "1.mlp.linear_fc2.bias", (3,)),
        "decoder.layers.1.mlp.linear_fc2.bias: [dp1 cp0] (rank 2) against 3 others that agree",
    ),
    "what tensor-parallel ranks hold whole": (
        (4, TP4, 3, "1.mlp.linear_fc2.bias", (0,)),
        "decoder.layers.1.mlp.linear_fc2.bias: [tp3] (rank 3) against 3 others that agree",
    ),
    # Of four query heads with two groups on four ranks, ranks 0 and 1 hold the first key head: the
    # rows after one query head of four channels.
    "shared key heads": (
        (4, TP4, 0, "0.self_attention.linear_qkv.weight", (4, 0)),
        "decoder.layers.0.self_attention.linear_qkv.weight: [tp0] (rank 0) against [tp1] (rank 1)",
    ),
    "tied ends": (
        (2, PP2, 1, "embedding.word_embeddings.weight", (7, 0)),
        "embedding.word_embeddings.weight: [pp0] (rank 0) against [pp1] (rank 1)",
    ),
    "replicas of tied ends": (
        (4, PP2, 3, "embedding.word_embeddings.weight", (7, 0)),
        "embedding.word_embeddings.weight: [pp1 dp1] (rank 3) against 3 others that agree",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_par_09_one_changed_element_is_found(pool: Pool, name: str) -> None:
    """All ranks raise the same message, which names the parameter and who stands alone."""
    (world, words, guilty, part, place), expected = CASES[name]
    messages = pool.run(world, check, world, words, guilty, part, place)
    assert len(set(messages)) == 1, messages
    start = "iteration 20: copies of weights that must be equal differ: "
    assert messages[0].startswith(f"{start}{expected}. It happened after iteration 10")


def own_shares(rank: int) -> list[str]:
    """Change what is this rank's alone, and rows that only pad the vocabulary."""
    mesh, chunks = build(4, f"{TP2} {PP2}")
    corrupt(chunks, "mlp.linear_fc1.weight", (0, 0))
    if mesh.tp.coordinate == 1 and mesh.pp.coordinate == 0:
        corrupt(chunks, "word_embeddings.weight", (127, 0))
    return ReplicaCheck(replicas_of(chunks, mesh), mesh, 1).differences()


def test_what_one_rank_alone_holds_is_not_compared(pool: Pool) -> None:
    assert pool.run(4, own_shares) == [[]] * 4


def traffic(rank: int) -> tuple[int, int]:
    mesh, chunks = build(2, "")
    regions = sum(
        len(sharding.of(parameter).regions) for chunk in chunks for parameter in chunk.parameters()
    )
    checker = ReplicaCheck(replicas_of(chunks, mesh), mesh, 1)
    with comm.counting() as counted:
        checker.after(1)
    return counted.bytes.total(), 2 * 8 * regions + 8


def test_a_check_that_passes_moves_two_numbers_a_region(pool: Pool) -> None:
    for moved, expected in pool.run(2, traffic):
        assert moved == expected


def negate_two(x: Tensor) -> None:
    x[3], x[7] = -x[3], -x[7]


def swap(x: Tensor) -> None:
    x[[10, 11]] = x[[11, 10]]


def lowest_bit(x: Tensor) -> None:
    x[99] = torch.nextafter(x[99], x[99] + 1)


def not_a_number(x: Tensor) -> None:
    x[0] = float("nan")


def negative_zero(x: Tensor) -> None:
    x[50] = -0.0 if x[50] == 0 else x[50]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", [negate_two, swap, lowest_bit, not_a_number, negative_zero])
def test_hashes_see_every_change(dtype: torch.dtype, change: Callable[[Tensor], None]) -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[50] = 0.0
    y = x.clone()
    assert fingerprint(y) == fingerprint(x)
    change(y)
    assert fingerprint(y) != fingerprint(x)


def test_hashes_go_by_place_in_the_box_not_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A box cut out of another tensor, and one hashed in pieces, have the hash of their values."""
    whole = torch.arange(60.0).view(6, 10)
    box = whole[1:4, 2:7]
    alone = box.clone()
    assert fingerprint(box) == fingerprint(alone)
    monkeypatch.setattr("megatron.training.replica_check._CHUNK", 4)
    in_pieces = fingerprint(alone)
    monkeypatch.undo()
    assert in_pieces == fingerprint(alone)


def test_many_regions_are_told_apart() -> None:
    box, other = ((0, 1),), ((1, 2),)
    suspects = [{("w", box): 1, ("w", other): 5}, {("w", box): 2}, {("w", box): 3, ("w", other): 6}]
    assert describe(["[dp0]", "[dp1]", "[dp2]"], suspects) == [
        "w [(0, 1)]: [dp0] (rank 0) against [dp1] (rank 1) against [dp2] (rank 2)",
        "w [(1, 2)]: [dp0] (rank 0) against [dp2] (rank 2)",
    ]
