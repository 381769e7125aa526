"""Newton-Schulz iterations: what they do to singular values, and torch's own as the oracle."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.optim import _muon

from megatron.core.optimizer.newton_schulz import COEFFICIENTS, orthogonalise, schedule

F64 = torch.float64
ZEROPOWER = _muon._zeropower_via_newtonschulz


class StaysWide(torch.Tensor):
    """A float64 matrix that torch's Newton-Schulz cannot round to bfloat16."""

    def bfloat16(self, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
        return self


def torchs_own(x: Tensor, steps: int = 5) -> Tensor:
    """Return what torch.optim.Muon makes of a matrix, in float64 throughout."""
    wide = x.clone().as_subclass(StaysWide)
    made = ZEROPOWER(wide, COEFFICIENTS["simple"][0], steps, 1e-7)
    return made.as_subclass(Tensor)


def matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=F64)


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6), (1, 7), (7, 1)])
def test_equals_torch_in_float64(shape: tuple[int, int]) -> None:
    x = matrix(*shape)
    made = orthogonalise(x, schedule("simple", 5))
    torch.testing.assert_close(made, torchs_own(x), rtol=1e-12, atol=1e-12)


def test_equals_torch_in_bfloat16() -> None:
    """The same products, rounded at the same places but for the division by the norm."""
    x = matrix(12, 20).float()
    made = orthogonalise(x, schedule("simple", 5), in_half=True)
    theirs = ZEROPOWER(x.clone(), COEFFICIENTS["simple"][0], 5, 1e-7)
    assert made.dtype == torch.float32
    assert (made - theirs.float()).norm() < 0.03 * made.norm()
    exact = orthogonalise(x.double(), schedule("simple", 5))
    assert (made - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_singular_values_follow_the_polynomial(kind: str) -> None:
    """U and V stay, and s becomes a s + b s^3 + c s^5, step after step."""
    x = matrix(4, 7)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm()
    for a, b, c in schedule(kind, 6):
        s = a * s + b * s**3 + c * s**5
    expected = u @ torch.diag(s) @ vh
    torch.testing.assert_close(orthogonalise(x, schedule(kind, 6)), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("kind", "steps"), [("quintic", 5), ("polar_express", 8), ("cans", 5)])
def test_singular_values_come_close_to_one(kind: str, steps: int) -> None:
    made = orthogonalise(matrix(16, 40), schedule(kind, steps))
    values = torch.linalg.svdvals(made)
    assert values.min() > 0.6 and values.max() < 1.4


def test_coefficients_start_over_or_stay_at_the_last() -> None:
    quintic, polar = COEFFICIENTS["quintic"], COEFFICIENTS["polar_express"]
    assert schedule("quintic", 7) == [*quintic, *quintic[:2]]
    assert schedule("polar_express", 10) == [*polar, polar[-1], polar[-1]]
    assert schedule("simple", 2) == [*COEFFICIENTS["simple"]] * 2


def test_a_matrix_of_zeros_stays_one() -> None:
    assert torch.equal(orthogonalise(torch.zeros(3, 5), schedule("quintic", 5)), torch.zeros(3, 5))


@pytest.mark.parametrize("cut_rows", [True, False])
@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_parts_make_the_whole(shape: tuple[int, int], cut_rows: bool) -> None:
    """Two ranks played one after the other: each takes from the other the sum that it needs."""
    x = matrix(*shape)
    halves = x.chunk(2, 0 if cut_rows else 1)
    sums: list[list[Tensor]] = [[], []]

    def run(rank: int, others: list[Tensor]) -> Tensor:
        given = iter(others)
        sums[rank].clear()

        def complete(partial: Tensor) -> None:
            sums[rank].append(partial.clone())
            partial += next(given, torch.zeros_like(partial))

        return orthogonalise(
            halves[rank], schedule("quintic", 4), complete=complete, cut_rows=cut_rows
        )

    # One more sum is right each time, since it depends on those before it only.
    for _ in range(6):
        run(0, list(sums[1]))
        run(1, list(sums[0]))
    made = torch.cat([run(0, list(sums[1])), run(1, list(sums[0]))], 0 if cut_rows else 1)
    torch.testing.assert_close(
        made, orthogonalise(x, schedule("quintic", 4)), rtol=1e-11, atol=1e-11
    )
    assert [len(each) for each in sums] == [5, 5]  # of the norm, and of each iteration


def test_all_kinds_differ() -> None:
    x = matrix(4, 6)
    made = [orthogonalise(x, schedule(kind, 5)) for kind in COEFFICIENTS]
    assert all(not torch.allclose(a, b) for a, b in itertools.combinations(made, 2))
