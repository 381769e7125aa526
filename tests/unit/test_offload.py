"""Saved tensors that wait in host memory: moved once, back in time, equal bit for bit."""

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core import offload
from megatron.core.offload import HostCopies, Offloader

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # As in flat buffers: both are views of one memory.
        self.flat = torch.randn(2 * 8 * 8)
        self.first = nn.Parameter(self.flat[:64].view(8, 8))
        self.second = nn.Parameter(self.flat[64:].view(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first) @ self.second.t() * torch.sigmoid(x)


def trained(offloader: Offloader | None, blocks: int = 3, times: int = 1) -> list[Tensor]:
    torch.manual_seed(1)
    stack, x = [Block() for _ in range(blocks)], torch.randn(4, 8, requires_grad=True)

    def forward() -> Tensor:
        y = x * 1
        if offloader is None:
            for block in stack:
                y = block(y)
            return y.square().sum()
        with offloader.forward():
            for block in stack:
                with offloader.group(block.parameters):
                    y = block(y)
        return y.square().sum()

    for _ in range(times):
        forward().backward()
    return [x.grad, *(p.grad for block in stack for p in block.parameters())]  # type: ignore[list-item]


def test_gradients_are_the_same_and_buffers_are_used_again() -> None:
    offloader = Offloader(CPU)
    pool = offloader._copies.pool  # type: ignore[attr-defined]
    assert all(map(torch.equal, trained(offloader), trained(None)))
    # Of each block its input, a tanh, a sigmoid and what it multiplies, of 4 x 8 numbers.
    assert pool.bytes == 3 * 4 * 32 * 4
    assert all(map(torch.equal, trained(offloader, times=3), trained(None, times=3)))
    assert pool.bytes == 3 * 4 * 32 * 4
    assert sum(map(len, pool._free.values())) == 12


def saved_in_group(
    function: Any, x: Tensor, resident: Iterable[Tensor] = (), least: int = 0
) -> tuple[Tensor, Offloader]:
    offloader = Offloader(CPU, least)
    with offloader.forward(), offloader.group(lambda: resident):
        return function(x), offloader


def held(offloader: Offloader) -> int:
    return offloader._copies.pool.bytes  # type: ignore[attr-defined, no-any-return]


def test_memory_is_let_go_and_comes_back_as_it_was() -> None:
    """Two views of one memory are one copy; they keep their strides and places."""
    inner: list[Any] = []

    def function(x: Tensor) -> Tensor:
        mixed = torch.cat((x, x + 1), 1)
        inner.append(weakref.ref(mixed.untyped_storage()))
        a, b = mixed.split((5, 5), 1)
        return (a.t() @ b).sum()

    x = torch.randn(3, 5, requires_grad=True)
    loss, offloader = saved_in_group(function, x)
    gc.collect()
    assert inner[0]() is None and held(offloader) == 3 * 10 * 4
    loss.backward()
    twin = x.detach().clone().requires_grad_()
    function(twin).backward()
    assert torch.equal(x.grad, twin.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("view", [False, True])
def test_weights_and_whatever_lies_in_their_memory_stay(view: bool) -> None:
    flat = torch.randn(8, 8)
    weight = nn.Parameter(flat[:4])
    other = flat[4:] if view else torch.randn(4, 8)  # of the same memory, or of its own

    def function(x: Tensor) -> Tensor:
        return ((x @ weight.t()) * (x @ other.t())).sum()

    x = torch.randn(2, 8, requires_grad=True)
    loss, offloader = saved_in_group(function, x * 1, [weight])
    # x, both products and, unless it lives in the weight's memory, the other factor.
    assert held(offloader) == 4 * (16 + 8 + 8 + (0 if view else 32))
    loss.backward()
    assert weight.grad is not None and x.grad is not None


def test_small_tensors_and_shared_ones_stay() -> None:
    x, table = torch.randn(10, requires_grad=True), torch.randn(10)
    for least, size in ((11, 0), (10, 40)):
        _, offloader = saved_in_group(lambda x: torch.tanh(x).sum(), x, least=least)
        assert held(offloader) == size
    offloader = Offloader(CPU)
    with offloader.forward([table]), offloader.group(tuple):
        loss = (x * table).sum()
    assert held(offloader) == 0
    loss.backward()
    assert torch.equal(x.grad, table)  # type: ignore[arg-type]


class Watched(HostCopies):
    """Writes down which copies came back, by the number of the first byte."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.back: list[int] = []

    def start(self, ticket: Tensor) -> offload.Arriving:
        self.back.append(int(ticket.view(torch.float32)[0]))
        return super().start(ticket)


def test_a_group_comes_back_one_group_ahead() -> None:
    offloader, watched = Offloader(CPU), Watched()
    offloader._copies = watched
    x, at = torch.ones(2, requires_grad=True), list[list[int]]()
    x.register_hook(lambda grad: at.append(list(watched.back)))
    y = x * 1
    with offloader.forward():
        for number in range(4):
            with offloader.group(tuple):
                y = y * torch.full((2,), float(number + 1))  # saves its factor
            y.register_hook(lambda grad: at.append(list(watched.back)))
    y.sum().backward()
    # Before the backward of the last group nothing is back, then two groups, and so on.
    assert at == [[], [4, 3], [4, 3, 2], [4, 3, 2, 1], [4, 3, 2, 1]]


def test_passes_do_not_follow_one_another() -> None:
    """The first group of a pass is the first to be done: none of the pass before is fetched."""
    offloader, watched, losses = Offloader(CPU), Watched(), []
    offloader._copies = watched
    x = torch.ones(2, requires_grad=True)
    for factor in (7.0, 8.0):
        with offloader.forward(), offloader.group(tuple):
            losses.append((x * torch.full((2,), factor)).sum())
    losses[1].backward()
    assert watched.back == [8]
    losses[0].backward()
    assert watched.back == [8, 7] and x.grad is not None and x.grad.tolist() == [15.0, 15.0]


def test_a_graph_that_nobody_goes_through_gives_its_buffers_back() -> None:
    x = torch.randn(10, requires_grad=True)
    loss, offloader = saved_in_group(lambda x: torch.tanh(x).sum(), x)
    pool = offloader._copies.pool  # type: ignore[attr-defined]
    assert not pool._free
    del loss
    gc.collect()
    assert [len(free) for free in pool._free.values()] == [1]


def test_a_graph_that_is_kept_can_be_gone_through_twice() -> None:
    x = torch.randn(10, requires_grad=True)
    loss, _ = saved_in_group(lambda x: torch.tanh(x).sum(), x)
    loss.backward(retain_graph=True)
    once = x.grad.clone()  # type: ignore[union-attr]
    loss.backward()
    assert torch.equal(x.grad, 2 * once)  # type: ignore[arg-type]
