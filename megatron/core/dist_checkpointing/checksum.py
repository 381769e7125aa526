"""Checksums of parts joined into the checksum of the whole, so that parts may be read in any order.

A CRC-32 is the remainder of the bytes, taken as a polynomial over GF(2), by a fixed polynomial. So
the checksum of two runs of bytes is that of the first, multiplied by x^(8 x length of the second),
plus that of the second (RFC 1952, appendix; Warren, Hacker's Delight, chapter 14). Bits are
mirrored, as `zlib.crc32` has them: the highest bit is the coefficient of x^0.
"""

import functools

_DIVISOR = 0xEDB88320
_ONE = 1 << 31


def joined(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two runs of bytes, given those of both and the second's length."""
    return _product(_power(8 * length), first) ^ second


def _product(a: int, b: int) -> int:
    """Return a x b modulo the divisor."""
    result = 0
    for degree in range(32):
        if a & (_ONE >> degree):
            result ^= b
        b = (b >> 1) ^ (_DIVISOR if b & 1 else 0)
    return result


@functools.lru_cache(maxsize=1024)
def _power(exponent: int) -> int:
    """Return x^exponent modulo the divisor."""
    result, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            result = _product(result, square)
        square = _product(square, square)
        exponent >>= 1
    return result
