"""Gradient buckets are summed while the backward goes on: when each starts, and what it sums."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core import comm, sharding
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.grid import ParallelConfig
from megatron.core.mesh import Axis, Mesh
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.groups import grouping
from megatron.core.sharding import Init
from megatron.core.tensor_parallel.layers import linear, make_parameter
from tests.harness import Pool

WIDTH = 8
CPU = torch.device("cpu")


class Stack(nn.Module):
    """Three matrices and a gain; the first matrix serves at both ends, as a tied embedding does."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        for name in ("ends", "one", "two"):
            record = sharding.whole((WIDTH, WIDTH), Init())
            weight = make_parameter(record, (WIDTH, WIDTH), Mesh.serial(), torch.float64)
            weight.data = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
            setattr(self, name, weight)
        record = sharding.whole((WIDTH,), Init(), decay=False)
        self.gain = make_parameter(record, (WIDTH,), Mesh.serial(), torch.float64)
        self.gain.data.fill_(0.5)
        sharding.name_parameters(self)

    def forward(self, x: Tensor, middle: Sequence[str]) -> Tensor:
        alone = Axis("none", (0,), 0, None)
        for name in ("ends", *middle, "ends"):
            x = linear(x, getattr(self, name), None, alone, False) * self.gain
        return x


def replicas(mesh: Mesh, model: Stack, **settings: Any) -> DataParallel:
    config = DataParallelConfig.resolve(**settings)
    parallel = DataParallel(
        [model], mesh, torch.float64, group_of=grouping(OptimizerConfig.resolve()), config=config
    )
    parallel.zero_grad()
    return parallel


def backward(model: Stack, rank: int, number: int, middle: Sequence[str] = ("one", "two")) -> None:
    generator = torch.Generator().manual_seed(10 * rank + number)
    x = torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)
    model(x, middle).square().sum().backward()


def _iterations(rank: int, settings: dict[str, Any]) -> None:
    mesh = Mesh.create(ParallelConfig.resolve(), CPU)
    plain, overlapped = Stack(), Stack()
    expected = replicas(mesh, plain)
    parallel = replicas(mesh, overlapped, overlap_grad_reduce=True, **settings)
    buckets = sum(len(buffer.plan.buckets) for buffer in parallel.buffers)
    assert buckets == 4 and len(parallel.buffers) == 1
    # How often a matrix is used may differ from one iteration to the next.
    for middle in (("one", "two"), ("one", "two", "one"), ("two", "one")):
        expected.zero_grad()
        parallel.zero_grad()
        for model in (plain, overlapped):
            backward(model, rank, 0, middle)
        parallel.begin(0, "backward", True)
        with comm.counting() as during:
            backward(overlapped, rank, 1, middle)
        with comm.counting() as after:
            parallel.finish(0, "backward", True)
        with comm.counting() as rest:
            parallel.reduce_gradients()
        counts = [t.calls["dp_cp", "all_reduce"] for t in (during, after, rest)]
        assert counts == [4, 0, 0]
        backward(plain, rank, 1, middle)
        expected.reduce_gradients()
        for one, other in zip(plain.parameters(), overlapped.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-14, atol=0)


@pytest.mark.parametrize("settings", [{"ddp_bucket_size": 60}, {"ddp_num_buckets": 4}])
def test_buckets_start_while_the_last_backward_runs(pool: Pool, settings: dict[str, Any]) -> None:
    pool.run(2, _iterations, settings)


def _order(rank: int) -> list[int]:
    """Return the places of the buckets in the order in which they are launched."""
    mesh, model = Mesh.create(ParallelConfig.resolve(), CPU), Stack()
    parallel = replicas(mesh, model, overlap_grad_reduce=True, ddp_bucket_size=60)
    flat, starts = parallel.buffers[0].grad, []
    original = comm.all_reduce

    def noting(x: Tensor, *rest: Any, **more: Any) -> comm.Handle:
        if rest[0].name == "dp_cp":
            starts.append((x.data_ptr() - flat.data_ptr()) // flat.element_size())
        return original(x, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "all_reduce", noting)
        for _ in range(2):
            parallel.begin(0, "backward", True)
            # Gradients become complete in another order on each rank.
            backward(model, rank, 1, ("one", "two") if rank else ("two", "one"))
            parallel.finish(0, "backward", True)
            parallel.reduce_gradients()
    return starts


def test_the_order_of_launches_is_that_of_places_on_every_rank(pool: Pool) -> None:
    orders = pool.run(2, _order)
    assert orders[0] == orders[1]
    half = len(orders[0]) // 2
    assert orders[0][:half] == sorted(orders[0][:half]) == orders[0][half:]


def _unused(rank: int) -> None:
    """A matrix that takes no part in an iteration holds its bucket back, until the end."""
    mesh, model = Mesh.create(ParallelConfig.resolve(), CPU), Stack()
    parallel = replicas(mesh, model, overlap_grad_reduce=True, ddp_bucket_size=60)
    parallel.begin(0, "backward", True)
    with comm.counting() as during:
        backward(model, rank, 1, ("one",))
    parallel.finish(0, "backward", True)
    parallel.reduce_gradients()
    assert during.calls["dp_cp", "all_reduce"] < 4
    assert model.two.grad is not None and not model.two.grad.any()


def test_a_weight_without_a_gradient_does_not_block(pool: Pool) -> None:
    pool.run(2, _unused)
