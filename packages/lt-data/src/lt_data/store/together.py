"""Several mapped arrays seen as one, so that one call copies from all of them, in C.

A map is memory at an address. One array that begins where the lowest map does and ends where the highest does has each
of them in it, at (address - lowest address) / item size. It is only a way to say places: what lies between the maps
belongs to others or to nobody, and reading it ends the process. So callers compute places from borders that they have
checked. Cost: nothing is mapped, read or copied.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np


class _Span:
    """Memory from the first item of one array to the last of another; holds the arrays between."""

    def __init__(self, address: int, items: int, maps: Sequence[np.ndarray]) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (address, True),  # read-only
            "shape": (items,),
            "typestr": maps[0].dtype.str,
        }
        self._maps = maps


def together(maps: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """One read-only array with several in it; it keeps them alive.

    Args:
        maps: at least one; each contiguous, one-dimensional and of one dtype, and begins at a multiple of its size.

    Returns:
        The array, and where in it each map begins (int64 [maps]). Nothing else in it may be read.
    """
    if len(maps) == 1:
        return maps[0], np.zeros(1, np.int64)
    size = maps[0].itemsize
    addresses = np.array([one.__array_interface__["data"][0] for one in maps], np.int64)
    assert not (addresses % size).any()
    assert all(one.dtype == maps[0].dtype and one.ndim == 1 and one.flags.c_contiguous for one in maps)
    lowest = int(addresses.min())
    highest = max(int(address) + one.nbytes for address, one in zip(addresses, maps, strict=True))
    whole = np.asarray(_Span(lowest, (highest - lowest) // size, maps))
    return whole, (addresses - lowest) // size
