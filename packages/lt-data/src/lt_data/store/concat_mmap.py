"""View of several memory maps as one array, so that one numpy call copies from all of them.

One array that spans from the lowest mapped address to the highest contains each map at (address - lowest address) /
item size. The memory between the maps may be unmapped, and reading it ends the process, so callers compute indices from
checked boundaries. Cost: nothing is mapped, read or copied.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np


class _MemorySpan:
    """Memory span over several arrays, which it keeps alive."""

    def __init__(self, address: int, items: int, maps: Sequence[np.ndarray]) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (address, True),  # read-only
            "shape": (items,),
            "typestr": maps[0].dtype.str,
        }
        self._maps = maps


def concat_mmaps(maps: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return one read-only array that contains several; it keeps them alive.

    Args:
        maps: at least one; contiguous, one-dimensional, of one dtype, and aligned to its item size.

    Returns:
        The array, and the index in it at which each map begins (int64 [maps]). Nothing else in it may be read.
    """
    if len(maps) == 1:
        return maps[0], np.zeros(1, np.int64)
    size = maps[0].itemsize
    addresses = np.array([array.__array_interface__["data"][0] for array in maps], np.int64)
    assert not (addresses % size).any()
    assert all(array.dtype == maps[0].dtype and array.ndim == 1 and array.flags.c_contiguous for array in maps)
    lowest = int(addresses.min())
    highest = max(int(address) + array.nbytes for address, array in zip(addresses, maps, strict=True))
    span = np.asarray(_MemorySpan(lowest, (highest - lowest) // size, maps))
    return span, (addresses - lowest) // size
