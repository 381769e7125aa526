"""Replace a matrix by the nearest orthogonal one, about: Newton-Schulz iterations.

With X = U S V^T of norm at most 1, each iteration

    A = X X^T            X = a X + (b A + c A^2) X

maps the singular values s to a s + b s^3 + c s^5 and leaves U and V alone. The coefficients drive
all s towards 1, quickly rather than exactly: what is left varies around 1 by a few tenths, which
does not harm an update (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/). A product
on the shorter side is cheaper; the result is the same on either.

Shapes: M rows, N columns.
"""

from collections.abc import Callable
from itertools import chain, cycle, islice, repeat

import torch
from torch import Tensor

from megatron.core.kernels.matmul import matmul, upcast_pays

Coefficients = tuple[float, float, float]
"""a, b, c of one iteration."""

COEFFICIENTS: dict[str, tuple[Coefficients, ...]] = {
    # Jordan et al., 2024.
    "simple": ((3.4445, -4.7750, 2.0315),),
    # Cesista et al., 2025, https://leloykun.github.io/ponder/muon-opt-coeffs/
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Amsel et al., 2025, https://arxiv.org/abs/2505.16932
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    # Grishina et al., 2025, https://arxiv.org/abs/2506.10935
    "cans": (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    # Boissin et al., 2025, https://github.com/thib-s/flash-newton-schulz
    "aol": (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
}
_CONVERGING = ("polar_express", "cans")
"""Kinds whose last iteration may be repeated; the others start over."""

EPSILON = 1e-7
"""Least norm that a matrix is divided by."""


def schedule(kind: str, steps: int) -> list[Coefficients]:
    """Return the coefficients of ``steps`` iterations of a kind of `COEFFICIENTS`."""
    known = COEFFICIENTS[kind]
    endless = chain(known, repeat(known[-1])) if kind in _CONVERGING else cycle(known)
    return list(islice(endless, steps))


def orthogonalise(
    x_MN: Tensor,
    coefficients: list[Coefficients],
    *,
    in_half: bool = False,
    complete: Callable[[Tensor], None] | None = None,
    cut_rows: bool | None = None,
) -> Tensor:
    """Return about U V^T of ``x_MN`` = U S V^T, in its dtype.

    A matrix that is cut over ranks is given in parts: products over the dim that is cut are then
    partial sums, which ``complete`` completes in place.

    Args:
        x_MN: fp32 or fp64.
        coefficients: of each iteration.
        in_half: multiply in bfloat16.
        complete: sums a tensor over the ranks that hold the other parts.
        cut_rows: which dim is cut; absent, the shorter side of A is chosen.
    """
    rows, columns = x_MN.shape
    transposed = rows > columns if cut_rows is None else cut_rows
    x = x_MN.mT if transposed else x_MN
    squares = x.square().sum()
    if complete is not None:
        complete(squares)
    x = x / squares.sqrt().clamp(min=EPSILON)
    if in_half:
        x = x.to(torch.bfloat16)
    for a, b, c in coefficients:
        gram = matmul(x, x.mT)
        if complete is not None:
            complete(gram)
        x = _add_product(x, _add_product(gram, gram, gram, b, c), x, a, 1.0)
    return (x.mT if transposed else x).to(x_MN.dtype)


def _add_product(base: Tensor, left: Tensor, right: Tensor, of_base: float, of: float) -> Tensor:
    """Return ``of_base * base + of * left @ right``, rounded once to their dtype."""
    if upcast_pays(base.device, base.dtype):
        wide = (part.to(torch.float32) for part in (base, left, right))
        return torch.addmm(*wide, beta=of_base, alpha=of).to(base.dtype)
    return torch.addmm(base, left, right, beta=of_base, alpha=of)
