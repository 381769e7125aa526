"""Gradient sums and norms on two processes: what every rank ends with, and the bytes it took."""

import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from megatron.core import comm, sharding
from megatron.core.grid import ParallelConfig
from megatron.core.mesh import Mesh
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.optimizer import build_optimizer
from megatron.core.precision.config import PrecisionConfig
from megatron.core.sharding import Init, Region, Sharding
from tests.harness import Pool


class Share(nn.Module):
    """What a tensor-parallel rank of two holds."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.split = self._make((3, 4), sharding.split((6, 4), Init(), 0, rank, 2))
        self.norm = self._make(
            (5,), sharding.whole((5,), Init(), replicated=("tp",), summed=("tp",), decay=False)
        )
        self.bias = self._make((5,), sharding.whole((5,), Init(), replicated=("tp",), decay=False))
        # Two query rows of this rank, and one key row that both ranks hold and use.
        query = Region(((0, 2), (0, 2)), ((2 * rank, 2 * rank + 2), (0, 2)))
        key = Region(((2, 3), (0, 2)), ((4, 5), (0, 2)), ("tp",), ("tp",))
        self.qkv = self._make((3, 2), Sharding((5, 2), (query, key), Init()))
        sharding.name_parameters(self)

    @staticmethod
    def _make(shape: tuple[int, ...], record: Sharding) -> nn.Parameter:
        return sharding.attach(nn.Parameter(torch.zeros(shape, dtype=torch.float64)), record)


def _tensor_parallel(rank: int) -> None:
    mesh = Mesh.create(ParallelConfig.resolve(tensor_model_parallel_size=2), torch.device("cpu"))
    model = Share(rank)
    optimizer = build_optimizer(
        OptimizerConfig(clip_grad=0.0), [model], mesh, PrecisionConfig.resolve(fp64=True)
    )
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(rank + 1.0)
    assert model.bias.grad is not None and model.qkv.grad is not None
    model.bias.grad.fill_(7.0)  # whole on both ranks already
    optimizer.data_parallel.reduce_gradients()
    assert model.norm.grad is not None and model.split.grad is not None
    assert model.split.grad.unique().tolist() == [rank + 1.0]
    assert model.norm.grad.tolist() == [3.0] * 5
    assert model.bias.grad.tolist() == [7.0] * 5
    assert model.qkv.grad.tolist() == [[rank + 1.0] * 2] * 2 + [[3.0] * 2]
    result = optimizer.step(1.0, lr=0.1, weight_decay=0.0, count_zeros=True)
    # Gathered: 12 ones and 12 twos, 5 threes, 5 sevens, 4 ones and 4 twos, 2 threes.
    squares = 12 + 12 * 4 + 5 * 9 + 5 * 49 + 4 + 4 * 4 + 2 * 9
    assert result.grad_norm.item() == pytest.approx(math.sqrt(squares), rel=1e-14)
    assert result.num_zeros is not None and result.num_zeros.item() == 0


def _data_parallel(rank: int) -> None:
    mesh = Mesh.create(ParallelConfig.resolve(), torch.device("cpu"))
    model = nn.Module()
    model.weight = Share._make((100, 3), sharding.whole((100, 3), Init()))
    model.bias = Share._make((10,), sharding.whole((10,), Init(), decay=False))
    sharding.name_parameters(model)
    optimizer = build_optimizer(
        OptimizerConfig(clip_grad=0.0), [model], mesh, PrecisionConfig.resolve(fp64=True)
    )
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(rank + 1.0)
    with comm.counting() as traffic:
        optimizer.data_parallel.reduce_gradients()
    # 300 elements in an aligned slot of 320, then 10, padded to two shares of 192.
    assert dict(traffic.bytes) == {("dp_cp", "all_reduce"): 384 * 8}
    assert all(p.grad is not None and (p.grad == 3).all() for p in model.parameters())
    result = optimizer.step(1.0, lr=0.1, weight_decay=0.0)
    assert result.grad_norm.item() == pytest.approx(3 * math.sqrt(310), rel=1e-14)


def _metadata(rank: int) -> None:
    mesh = Mesh.create(ParallelConfig.resolve(), torch.device("cpu"))
    with comm.counting() as traffic:
        assert comm.gather_objects("ab" * (rank + 1), mesh.dp) == ["ab", "abab"]
        comm.barrier(mesh.world)
    size = len(pickle.dumps("ab")) + len(pickle.dumps("abab"))
    assert dict(traffic.bytes) == {("dp", "gather_objects"): size, ("world", "barrier"): 0}
    assert traffic.calls["world", "barrier"] == traffic.calls["dp", "gather_objects"] == 1


def test_metadata_and_barriers_are_counted(pool: Pool) -> None:
    pool.run(2, _metadata)


@pytest.mark.parametrize("body", [_tensor_parallel, _data_parallel])
def test_two_ranks_end_with_the_whole_gradient(pool: Pool, body: Callable[[int], None]) -> None:
    """Each logical element is summed over the ranks that hold a part, and counted once."""
    pool.run(2, body)
