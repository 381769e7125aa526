"""Streams of random numbers that the order and the shape of samples are drawn from.

All are Mersenne twisters (Matsumoto and Nishimura, 1998), so that orders can equal Megatron-core's,
which takes them from C++: `words` is ``std::mt19937`` (numpy's legacy ``RandomState`` is the same
generator), `Twister64` is ``std::mt19937_64``.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Words64 = npt.NDArray[np.uint64]

BLOCK = 1 << 16
LENGTH, MIDDLE = 312, 156
"""Words of the state of the 64-bit twister, and how far apart two of them are mixed."""
UPPER, LOWER = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)
MATRIX = np.uint64(0xB5026F5AA96619E9)
SEEDING = 6364136223846793005
MASK64 = 2**64 - 1


def generator(seed: int, sample: int) -> np.random.RandomState:
    """Return the source of a sample's draws, which nothing but its number and the seed decide."""
    parts = [number >> shift & 0xFFFFFFFF for number in (seed, sample) for shift in (0, 32)]
    return np.random.RandomState(parts)


def words(seed: int) -> Iterator[int]:
    """Yield the 32-bit words of ``std::mt19937(seed)``, without end."""
    random = np.random.RandomState(seed)
    while True:
        yield from random.randint(0, 2**32, size=BLOCK, dtype=np.uint32).tolist()


class Twister64:
    """The 64-bit words of ``std::mt19937_64(seed)``, a block at a time."""

    def __init__(self, seed: int) -> None:
        state = [seed & MASK64]
        for i in range(1, LENGTH):
            last = state[-1]
            state.append((SEEDING * (last ^ last >> 62) + i) & MASK64)
        self._state = np.array(state, dtype=np.uint64)

    def block(self) -> Words64:
        """Return the next `LENGTH` words."""
        old = self._state
        new = np.empty_like(old)
        # Each word is mixed of two neighbours and one half the state away, which is new by then.
        split = LENGTH - MIDDLE
        new[:split] = old[MIDDLE:] ^ _mixed(old[:split], old[1 : split + 1])
        last = LENGTH - 1
        new[split:last] = new[: last - split] ^ _mixed(old[split:last], old[split + 1 :])
        new[last] = new[last - split] ^ _mixed(old[last:], new[:1])[0]
        self._state = new
        return _tempered(new)


def _mixed(high: Words64, low: Words64) -> Words64:
    joined = (high & UPPER) | (low & LOWER)
    return (joined >> np.uint64(1)) ^ ((joined & np.uint64(1)) * MATRIX)


def _tempered(x: Words64) -> Words64:
    x = x ^ (x >> np.uint64(29) & np.uint64(0x5555555555555555))
    x = x ^ (x << np.uint64(17) & np.uint64(0x71D67FFFEDA60000))
    x = x ^ (x << np.uint64(37) & np.uint64(0xFFF7EEE000000000))
    return x ^ x >> np.uint64(43)


def permutation64(length: int, seed: int) -> npt.NDArray[np.int64]:
    """Return a permutation of ``range(length)``: Fisher and Yates' with words of `Twister64`.

    Place ``i``, from the last one down, is swapped with place ``word % (i + 1)``.
    """
    order = list(range(length))
    twister = Twister64(seed)
    place = length - 1
    while place > 0:
        block = twister.block()[:place]
        sizes = np.arange(place + 1, place + 1 - len(block), -1).astype(np.uint64)
        for other in (block % sizes).tolist():
            order[place], order[other] = order[other], order[place]
            place -= 1
    return np.array(order, dtype=np.int64)
