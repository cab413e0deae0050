"""CRC-32 of zip archives, by `isal` (`lt-ckpt[fast]`) if installed, else by zlib.

The values are the same. zlib takes about 0.25 s of a processor per GB, isal a tenth of that. The CRCs of two runs of
bytes give that of both together: the first one is multiplied by a power of x modulo the polynomial (M. Adler, zlib's
`crc32_combine`), some microseconds.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec

crc32: Callable[[bytes | memoryview, int], int] = import_module("isal.isal_zlib" if find_spec("isal") else "zlib").crc32
"""(bytes, CRC of the preceding bytes) → CRC of all."""

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
"""The polynomial 1; bits are reflected, so x is the next lower bit."""


def combine_crc32(first: int, second: int, n_bytes: int) -> int:
    """Return the CRC of two runs of bytes.

    Args:
        first: CRC of the first run.
        second: CRC of the second run.
        n_bytes: Length of the second run.
    """
    return _multiply(_power_of_x(8 * n_bytes), first) ^ second


def _multiply(a: int, b: int) -> int:
    """Return the product of two polynomials, modulo that of CRC-32."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def _power_of_x(n: int) -> int:
    """Return x to the power of n."""
    result, exponent = _ONE, 0
    while n:
        if n & 1:
            result = _multiply(_squared_x(exponent), result)
        n, exponent = n >> 1, exponent + 1
    return result


@cache
def _squared_x(n: int) -> int:
    """Return x, squared n times."""
    return _ONE >> 1 if not n else _multiply(_squared_x(n - 1), _squared_x(n - 1))
