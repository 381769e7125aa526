"""Two functions that take turns: one order, whatever threads do; a failure ends both."""

import sys
import threading
import time

import pytest
import torch

from megatron.core import turns
from megatron.core.turns import Turns


def halves(said: list[str], times: dict[str, int], slow: str = "") -> list:  # type: ignore[type-arg]
    """Return functions that say when they go on, and give their turn away between."""

    def half(name: str) -> None:
        for step in range(times[name]):
            if name == slow:
                time.sleep(0.002)
            said.append(f"{name}{step}")
            turns.give()
        said.append(f"{name} ends")

    return [lambda name=name: half(name) for name in times]


@pytest.mark.parametrize("slow", ["", "a", "b"])
def test_one_order(slow: str) -> None:
    pairs, interval = Turns(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            said: list[str] = []
            pairs.run(*halves(said, {"a": 2, "b": 4}, slow))
            expected = ["a0", "b0", "a1", "b1", "a ends", "b2", "b3", "b ends"]
            assert said == expected
            said.clear()
            pairs.run(*halves(said, {"a": 3, "b": 0}, slow))
            assert said == ["a0", "b ends", "a1", "a2", "a ends"]
    finally:
        sys.setswitchinterval(interval)


def test_nobody_to_give_to() -> None:
    turns.give()
    done: list[str] = []
    Turns().run(lambda: done.append("a"), lambda: (done.append("b"), turns.give())[0])
    turns.give()
    assert done == ["a", "b"]


def test_the_second_half_is_the_callers_thread_and_the_first_has_one_of_its_own() -> None:
    pairs, prepared = Turns(lambda: prepared.append(threading.get_ident())), list[int]()
    threads: list[int] = []
    for _ in range(3):
        pairs.run(
            lambda: threads.append(threading.get_ident()),
            lambda: threads.append(threading.get_ident()),
        )
    assert threads[1] == threading.get_ident() and len(set(threads)) == 2
    assert prepared == [threads[0]]


def test_who_is_at_work_is_known_to_others() -> None:
    """A thread of neither half finds the one whose turn it is."""
    found: list[tuple[str, bool]] = []

    def look(name: str) -> None:
        seen: list[int | None] = []
        other = threading.Thread(target=lambda: seen.append(turns.at_work()))
        other.start()
        other.join()
        found.append((name, seen == [threading.get_ident()]))

    def half(name: str) -> None:
        look(name)
        turns.give()
        look(name)

    assert turns.at_work() is None
    Turns().run(lambda: half("a"), lambda: half("b"))
    assert turns.at_work() is None
    assert found == [("a", True), ("b", True), ("a", True), ("b", True)]


@pytest.mark.parametrize("failing", ["a", "b"])
@pytest.mark.parametrize("before", [True, False])
def test_a_failure_ends_both_and_is_raised(failing: str, before: bool) -> None:
    """The half that fails does so before or after it gave its turn away."""
    pairs, said = Turns(), list[str]()

    def half(name: str) -> None:
        try:
            if name == failing and before:
                raise KeyError(name)
            turns.give()
            if name == failing:
                raise KeyError(name)
            turns.give()
            said.append(f"{name} went on")
        finally:
            said.append(f"{name} ends")

    with pytest.raises(KeyError, match=failing) as error:
        pairs.run(lambda: half("a"), lambda: half("b"))
    assert "half" in [frame.name for frame in error.traceback]
    # Who has not begun does not begin.
    begun = ["a"] if (failing, before) == ("a", True) else ["a", "b"]
    assert sorted(said) == [f"{name} ends" for name in begun]
    # The same pair runs on: nothing is left of it.
    said.clear()
    pairs.run(lambda: said.append("a"), lambda: said.append("b"))
    assert said == ["a", "b"]


class _Gives(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        turns.give()
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        turns.give()
        return grad


def test_a_backward_beside_a_forward_gives_its_turn_away() -> None:
    """A failure on the other side goes through autograd, and leaves the next backward alone."""
    x = torch.ones(3, requires_grad=True)
    y = _Gives.apply(3 * x).sum()
    made: list[torch.Tensor] = []
    pairs = Turns()
    pairs.run(y.backward, lambda: made.append(_Gives.apply(2 * x).sum()))
    made[0].backward()
    assert x.grad is not None and x.grad.tolist() == [5, 5, 5]

    def fails() -> None:
        raise ValueError("a forward")

    with pytest.raises(ValueError, match="a forward"):
        pairs.run(_Gives.apply(3 * x).sum().backward, fails)
    assert x.grad.tolist() == [5, 5, 5]
    _Gives.apply(x).sum().backward()
    assert x.grad.tolist() == [6, 6, 6]
