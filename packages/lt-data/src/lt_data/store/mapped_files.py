"""Memory maps of many files without a file descriptor each.

`mmap.mmap` keeps a duplicate of the descriptor (Python 3.13 can do without), so a thousand files would exhaust the
usual `ulimit -n`. Here the C library's own `mmap` is called, and the file may be closed as soon as it is mapped. A map
is removed when no array refers to it. Cost: about 10 microseconds a file.
"""

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


class _MemoryMap:
    """Mapped file, read by numpy's array interface; the map is removed with the object."""

    def __init__(self, descriptor: int, n_bytes: int, dtype: np.dtype) -> None:
        address = _LIBC.mmap(None, n_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (int(address), True),  # read-only
            "shape": (n_bytes // dtype.itemsize,),
            "typestr": dtype.str,
        }
        self._mapped = int(address), n_bytes

    def __del__(self, unmap: Callable[[int, int], int] = _LIBC.munmap) -> None:  # bound: modules are torn down at exit
        if "_mapped" in self.__dict__:
            unmap(*self._mapped)


def map_file(descriptor: int, n_bytes: int, dtype: np.dtype) -> np.ndarray:
    """Return the first bytes of an open file as a read-only array; the descriptor may be closed.

    Raises:
        OSError: it cannot be mapped.
    """
    return np.asarray(_MemoryMap(descriptor, n_bytes, dtype)) if n_bytes else np.zeros(0, dtype)
