"""Random bits that need no state: Philox-4x32-10 (Salmon et al., 2011), in torch.

A block of four 32-bit words is a function of a 128-bit counter and a 64-bit key, so any element of
a mask can be drawn anywhere, in any order, and drawn again in backward instead of being kept. Here
the key is the seed of a mask, and the counter says where an element stands: element (row, column)
of a matrix is word ``column % 4`` of the block at counter ``(column // 4, row, row >> 32, 0)``.

Torch's own generators number their draws by how a kernel was launched, which no other kernel can
repeat; this is the specification of those that draw in Triton.

Shapes: N rows, H columns.
"""

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
"""What the two words of the key grow by, round by round."""
ROUNDS = 10
WORD = 0xFFFFFFFF


def halves(number: int) -> tuple[int, int]:
    """Return the low and the high 32 bits of a number below 2^64."""
    assert 0 <= number < 2**64, number
    return number & WORD, number >> 32


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int) -> tuple[Tensor, ...]:
    """Return four words for each counter, as int64 tensors of values below 2^32.

    Args:
        counter: four words, int64 tensors of values below 2^32 that broadcast together.
        key: below 2^64.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = halves(key)
    for _ in range(ROUNDS):
        # Products of two words fill 64 bits: int64 holds them modulo 2^64, which is all we read.
        a, b = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (b >> 32) & WORD ^ c1 ^ k0,
            b & WORD,
            (a >> 32) & WORD ^ c3 ^ k1,
            a & WORD,
        )
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def threshold(p: float) -> int:
    """Return how many of the 2^31 values of a word's upper 31 bits mean that it is dropped."""
    assert 0.0 <= p < 1.0, p
    return min(round(p * 2**31), 2**31 - 1)


def keep_mask(rows: int, columns: int, p: float, seed: int, device: torch.device) -> Tensor:
    """Return which elements of a matrix a dropout keeps, kept_NH, bool.

    Each is dropped with probability ``p``, to within 2^-32.

    Args:
        rows: N.
        columns: H.
        p: in [0, 1).
        seed: below 2^64, such as `core.rng.DropoutKey.at` gives.
        device: of the result.
    """
    row_N1 = torch.arange(rows, device=device)[:, None]
    group_1G = torch.arange(-(-columns // 4), device=device)[None]
    counter = (group_1G, row_N1 & WORD, row_N1 >> 32, torch.zeros_like(group_1G))
    words_NG4 = torch.stack(torch.broadcast_tensors(*philox(counter, seed)), -1)
    return (words_NG4.flatten(1)[:, :columns] >> 1) >= threshold(p)


def uniform(rows_N: Tensor, columns: int, seed: int) -> Tensor:
    """Return a number of the open interval (0, 1) for each element of a matrix, u_NH, fp64.

    An element depends on the number of its row, its column and the seed alone, so that ranks which
    share the rows draw what one rank would.

    Args:
        rows_N: numbers of the rows, int64, not negative.
        columns: H.
        seed: below 2^64.
    """
    row_N1 = rows_N[:, None]
    group_1G = torch.arange(-(-columns // 4), device=rows_N.device)[None]
    counter = (group_1G, row_N1 & WORD, row_N1 >> 32, torch.zeros_like(group_1G))
    words_NG4 = torch.stack(torch.broadcast_tensors(*philox(counter, seed)), -1)
    return (words_NG4.flatten(1)[:, :columns].double() + 0.5) / 2.0**32
