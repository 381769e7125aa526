"""Regions whose saved tensors are made again: equal bit for bit, once, and gone in between."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core import saved_tensors
from megatron.core.mesh import Mesh
from megatron.core.recompute import discarding, recompute
from megatron.core.saved_tensors import Handle, keeping
from megatron.core.sharding import Init, split
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear


class Net(nn.Module):
    """A norm, two linear layers and dropout from torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.norm(x))

    def rest(self, y: Tensor) -> Tensor:
        y = nn.functional.dropout(torch.tanh(self.wide(y)), 0.3, self.training)
        return self.back(y) * torch.rand(())


def plain(net: Net, x: Tensor) -> Tensor:
    return net(x)


def whole(net: Net, x: Tensor) -> Tensor:
    return recompute(net, x)


def norm_alone(net: Net, x: Tensor) -> Tensor:
    with discarding(net.norm, x) as y:
        return net.rest(y)


def norm_and_rest(net: Net, x: Tensor) -> Tensor:
    with discarding(net.norm, x) as y:
        return recompute(net.rest, y)


WAYS = (whole, norm_alone, norm_and_rest)
Way = Callable[[Net, Tensor], Tensor]


def trained(way: Way) -> tuple[list[Tensor], list[str], Tensor]:
    """Return outputs and gradients, whose hooks ran, and where the generator stands after all."""
    torch.manual_seed(1)
    net, x = Net(), torch.randn(5, 8)
    told: list[str] = []
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: told.append(name))
    first = x.clone().requires_grad_()
    out = way(net, way(net, first))  # both runs before any backward
    noise = torch.rand(3)
    out.square().sum().backward()
    assert first.grad is not None
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    return [out.detach(), noise, first.grad, *grads], told, torch.rand(3)


@pytest.mark.parametrize("way", WAYS)
def test_results_are_the_same_bit_for_bit(way: Way) -> None:
    expected, hooks, after = trained(plain)
    found, told, later = trained(way)
    assert len(found) == len(expected) == 9
    assert all(map(torch.equal, found, expected))
    assert told == hooks and len(told) == 6  # once for each parameter, after both of its uses
    assert torch.equal(after, later), "backward has moved the generator"


@pytest.mark.parametrize("way", WAYS)
def test_without_gradients_it_is_a_plain_call(way: Way) -> None:
    net, seen = Net().eval(), Seen()
    with torch.no_grad(), keeping(seen):
        torch.manual_seed(2)
        found = way(net, torch.ones(2, 8))
    torch.manual_seed(2)
    assert torch.equal(found, net(torch.ones(2, 8)).detach()) and not seen.sizes


class Seen:
    """A scope that takes nothing, and writes down what it is offered."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def keep(self, x: Tensor) -> Handle | None:
        assert not isinstance(x, nn.Parameter)
        self.sizes.append(x.untyped_storage().nbytes())
        return None


@pytest.mark.parametrize(
    ("way", "kept"),
    [
        (whole, 5 * 8),
        (norm_and_rest, 5 * 8),
        # Of the rest a tanh, what dropout saves, the input of the second layer and the factor.
        (norm_alone, 5 * 8 + 3 * 5 * 32 + 1),
    ],
)
def test_inputs_alone_are_kept_and_all_is_gone_at_the_end(way: Way, kept: int) -> None:
    net, x = Net(), torch.randn(5, 8, requires_grad=True)
    with saved_tensors.counting(net.parameters()) as meter:
        out = way(net, x * 1)
        before = meter.now
        out.sum().backward()
    assert before == 4 * kept
    assert meter.now == 0


def test_an_output_that_is_discarded_is_not_alive_after_forward() -> None:
    net, x = Net(), torch.randn(5, 8, requires_grad=True)
    with discarding(net.norm, x) as y:
        out, storage = net.rest(y), weakref.ref(y.untyped_storage())
        assert storage() is not None
    del y
    gc.collect()
    assert storage() is None
    out.sum().backward()
    assert x.grad is not None


def test_views_of_outputs_are_found_again_where_they_lay() -> None:
    """Several outputs of which the block saves views, with the strides that they had."""
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    twin = x.detach().clone().requires_grad_()

    def make(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(x)
        return y, (y * 2).t()

    def use(a: Tensor, b: Tensor) -> Tensor:
        return (a[1:, ::2] @ b[::2, :3]).square().sum() + (a * b.t()).sum()

    with discarding(make, x) as outputs:
        loss = use(*outputs)
    loss.backward()
    use(*make(twin)).backward()
    assert torch.equal(x.grad, twin.grad)  # type: ignore[arg-type]


def test_what_the_block_saves_besides_stays_saved() -> None:
    seen, x = Seen(), torch.randn(4, requires_grad=True)
    with keeping(seen), discarding(torch.tanh, x) as y:
        (y * torch.sin(y)).sum().backward()  # sin(y) is nobody's output
    assert seen.sizes == [16, 16]  # the region's input, and sin(y)


def test_a_graph_that_is_kept_can_be_gone_through_twice() -> None:
    for way in WAYS:
        torch.manual_seed(1)
        net, x = Net(), torch.randn(5, 8, requires_grad=True)
        loss = way(net, x).sum()
        loss.backward(retain_graph=True)
        once = x.grad.clone()  # type: ignore[union-attr]
        loss.backward()
        assert torch.equal(x.grad, 2 * once)  # type: ignore[arg-type]


def test_a_region_that_does_something_else_the_second_time_is_found() -> None:
    runs: list[int] = []

    def fickle(x: Tensor) -> Tensor:
        runs.append(1)
        return torch.tanh(x) if len(runs) == 1 else torch.tanh(torch.sin(x))

    loss = recompute(fickle, torch.ones(3, requires_grad=True)).sum()
    with pytest.raises(AssertionError, match="saved 1 tensors at first and 2 when it ran again"):
        loss.backward()


def test_hooks_of_modules_come_in_pairs_in_both_runs() -> None:
    net, calls = Net(), list[str]()
    net.back.register_forward_pre_hook(lambda *_: calls.append("before"))
    net.back.register_forward_hook(lambda *_: calls.append("after"))
    # What comes after the last saved tensor of a region runs again too.
    net.back.bias.requires_grad_(False)
    recompute(net, torch.randn(2, 8, requires_grad=True)).sum().backward()
    assert calls == ["before", "after"] * 2


def test_inputs_that_need_no_gradient_get_none() -> None:
    x, table = torch.randn(3, requires_grad=True), torch.tensor([2, 0, 1])
    seen: list[bool] = []

    def pick(x: Tensor, table: Tensor) -> Tensor:
        seen.extend((x.requires_grad, table.requires_grad))
        return torch.sin(x)[table]

    recompute(pick, x, table).sum().backward()
    assert seen == [True, False] * 2


def test_a_weights_own_gradient_goes_to_its_buffer_once_postponed_or_not() -> None:
    def trained(recomputes: bool, postpones: bool) -> tuple[list[Tensor], list[int]]:
        layer = ColumnParallelLinear(
            split((6, 4), Init(), 0, 0, 1), 6, Mesh.serial(), torch.float64
        )
        generator = torch.Generator().manual_seed(1)
        for parameter in layer.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data, parameter.grad = values, torch.zeros_like(values)
        buffers = [parameter.grad for parameter in layer.parameters()]
        x = torch.randn(5, 2, 4, generator=generator, dtype=torch.float64).requires_grad_()
        told: list[int] = []
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(lambda one: told.append(one.numel()))

        def region(x: Tensor) -> Tensor:
            return torch.sin(layer(torch.tanh(x)))

        loss = (recompute(region, x) if recomputes else region(x)).square().sum()
        if postpones:
            with layers.postponing() as tasks:
                loss.backward()
            assert len(tasks) == 1 and not layer.weight.grad.any()  # type: ignore[union-attr]
            for task in tasks:
                task()
        else:
            loss.backward()
        grads: list[Any] = [parameter.grad for parameter in layer.parameters()]
        assert all(a is b for a, b in zip(grads, buffers, strict=True))
        return [x.grad, *grads], told  # type: ignore[list-item]

    expected, hooks = trained(False, False)
    for recomputes, postpones in ((True, False), (True, True), (False, True)):
        found, told = trained(recomputes, postpones)
        assert all(map(torch.equal, found, expected))
        assert sorted(told) == sorted(hooks) == [6, 24]
