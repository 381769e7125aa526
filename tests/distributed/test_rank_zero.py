"""What rank 0 finds out reaches all ranks, and so does what goes wrong there."""

import pickle
from collections.abc import Callable

import pytest
import torch

from megatron.core import comm
from megatron.core.grid import ParallelConfig
from megatron.core.mesh import Mesh
from megatron.core.utils import UserError
from megatron.training.failing.failure import describe
from megatron.training.processes import rank_zero
from megatron.training.processes.rank_zero import from_first, from_first_at_length
from tests.harness import Pool

CPU = torch.device("cpu")
ANSWER = {"index": ["a", "b"] * 50}


def answers(rank: int) -> tuple[object, int]:
    mesh = Mesh.create(ParallelConfig.resolve(tensor_model_parallel_size=2), CPU)
    asked: list[int] = []

    def action() -> object:
        asked.append(rank)
        return ANSWER

    with comm.counting() as traffic, comm.recording() as calls:
        found = from_first(mesh.world, action)
    assert asked == ([0] if rank == 0 else []), "only the first is asked"
    assert [call.name for call in calls] == ["broadcast_object"]
    assert comm.broadcast_object(rank, mesh.tp) == rank - rank % 2, "the first of the axis"
    return found, traffic.bytes["world", "broadcast_object"]


def test_the_first_ranks_answer_travels_once(pool: Pool) -> None:
    assert pool.run(4, answers) == [(ANSWER, len(pickle.dumps((ANSWER, None))))] * 4


class Odd(Exception):
    """An exception that cannot be pickled back."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def refuse() -> None:
    raise UserError("--load (x) is missing")


def fail() -> None:
    raise Odd(1, 2)


def errors(rank: int, action: Callable[[], None]) -> tuple[str, bool]:
    mesh = Mesh.create(ParallelConfig.resolve(), CPU)
    with pytest.raises(Exception) as raised:  # noqa: PT011
        from_first(mesh.world, action)
    comm.barrier(mesh.world)  # all are in step still
    failure = describe(raised.value)
    return failure.message, failure.is_lost


def test_an_error_of_the_first_rank_reaches_all(pool: Pool) -> None:
    assert pool.run(2, errors, refuse) == [("--load (x) is missing", False)] * 2


def test_what_is_no_users_error_is_the_first_ranks_own(pool: Pool) -> None:
    """The others' errors only follow from it, so they are not taken for the cause of an end."""
    first, other = pool.run(2, errors, fail)
    assert first == ("Odd: 1 and 2", False)
    assert other == ("PeerError: rank 0 failed: Odd: 1 and 2", True)


def at_length(rank: int, fails: bool) -> tuple[object, list[str]]:
    mesh = Mesh.create(ParallelConfig.resolve(), CPU)

    def action(goes_on: Callable[[], None]) -> object:
        for _ in range(3):
            goes_on()
        if fails:
            refuse()
        return ANSWER

    with pytest.MonkeyPatch.context() as patch, comm.recording() as calls:
        patch.setattr(rank_zero, "WORD", 0.0)
        try:
            found: object = from_first_at_length(mesh.world, action)
        except UserError as error:
            found = str(error)
    comm.barrier(mesh.world)
    return found, [call.name for call in calls]


@pytest.mark.parametrize("fails", [False, True])
def test_who_waits_for_long_work_hears_that_it_goes_on(pool: Pool, fails: bool) -> None:
    """Three times while it does, once at its end, and then what it gave."""
    expected = "--load (x) is missing" if fails else ANSWER
    assert pool.run(3, at_length, fails) == [(expected, ["broadcast_object"] * 5)] * 3
