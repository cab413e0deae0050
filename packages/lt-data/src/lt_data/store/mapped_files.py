"""Memory maps of many files, read in one numpy call, without a file descriptor each.

`mmap.mmap` keeps a duplicate of the descriptor (Python 3.13 can do without), so a thousand files would exhaust the
usual `ulimit -n`. Here the file is closed as soon as it is mapped, by the C library's own `mmap`.

One array spans all addresses that a process may have; it contains each file, and any other array, at (address - first
address) / item size, so rows of any files are copied by one call. The memory between the maps may be unmapped, and
reading it ends the process, so callers compute indices from checked boundaries.

The kernel limits the maps of a process (vm.max_map_count, 65530). All `MappedFiles` of a process share half of that;
when it is used up, all let go of their maps and map again what they need. A map is removed when nothing refers to it,
so arrays that were returned stay valid.

Cost: about 10 microseconds to map a file, once; finding n places: a few vectorized operations.
"""

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value
_FIRST_ADDRESS = mmap.PAGESIZE  # numpy takes address 0 for no array
_ADDRESSES = 2**48 - _FIRST_ADDRESS  # no kernel maps beyond unless it is asked to
_MAX_MAPS = 32_765  # half of Linux's default vm.max_map_count
_lock = threading.RLock()
_all: "weakref.WeakSet[MappedFiles]" = weakref.WeakSet()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class _MemoryMap:
    """Mapped file; the map is removed with the object."""

    def __init__(self, descriptor: int, n_bytes: int) -> None:
        address = _LIBC.mmap(None, n_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.address, self.n_bytes = int(address), n_bytes

    def __del__(self, unmap: Callable[[int, int], int] = _LIBC.munmap) -> None:  # bound: modules are torn down at exit
        if "n_bytes" in self.__dict__:
            unmap(self.address, self.n_bytes)


class _MemorySpan:
    """Memory span that keeps what is mapped in it alive; read by numpy's array interface."""

    def __init__(self, address: int, n_bytes: int, dtype: np.dtype, keep: Any) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (address, True),  # read-only
            "shape": (n_bytes // dtype.itemsize,),
            "typestr": dtype.str,
        }
        self._keep = keep


class _AllAddresses(np.ndarray):
    """Array over all addresses. Most of its items do not exist, so it is not printed, as by a debugger."""

    def __getitem__(self, index: Any) -> Any:
        return self.view(np.ndarray)[index]

    def __repr__(self) -> str:
        return "<all addresses>"

    __str__ = __repr__


def map_file(descriptor: int, n_bytes: int, dtype: np.dtype) -> np.ndarray:
    """Return the first bytes of an open file as a read-only array; the descriptor may be closed.

    Raises:
        OSError: it cannot be mapped.
    """
    if n_bytes == 0:
        return np.zeros(0, dtype)
    mapped = _MemoryMap(descriptor, n_bytes)
    return np.asarray(_MemorySpan(mapped.address, n_bytes, dtype, mapped))


def item_of(array: np.ndarray) -> int:
    """Return the index of an array's first item in the array over all addresses."""
    return (array.__array_interface__["data"][0] - _FIRST_ADDRESS) // array.itemsize


class _Maps:
    """Files that are mapped at a time, and the array over all addresses, which keeps them."""

    def __init__(self, n_files: int, dtype: np.dtype) -> None:
        self.items = np.full(n_files, -1)
        self.arrays: dict[int, np.ndarray] = {}
        memory = _MemorySpan(_FIRST_ADDRESS, _ADDRESSES, dtype, self.arrays)
        self.ids = np.asarray(memory).view(_AllAddresses)

    def add(self, number: int, array: np.ndarray) -> None:
        self.arrays[number] = array
        self.items[number] = item_of(array)


class MappedFiles:
    """Numbered files of ids, each mapped at its first use.

    Args:
        open_file: maps a file by its number; what it raises is raised to the reader.
        n_files: their number.
        dtype: dtype of the ids.
    """

    def __init__(self, open_file: Callable[[int], np.ndarray], n_files: int, dtype: np.dtype) -> None:
        self._open_file = open_file
        self._n_files, self._dtype = n_files, dtype
        self._maps = _Maps(n_files, dtype)
        with _lock:
            _all.add(self)

    def array(self, number: int) -> np.ndarray:
        """Return a file as an array."""
        if (array := self._maps.arrays.get(number)) is not None:
            return array
        return self._map([number]).arrays[number]

    def span(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Return one array that contains some files.

        Args:
            numbers: file numbers, in any order, repeats allowed (int64 [n]).

        Returns:
            The array over all addresses, and the index in it at which each file begins (int64 [n]); nothing else of it
            may be read. The files stay mapped as long as this array. None if there are more files than may be mapped at
            a time.
        """
        maps = self._maps
        items = maps.items[numbers]
        if items.size and items.min() < 0:
            wanted = np.unique(numbers).tolist()
            if len(wanted) > _MAX_MAPS:
                return None
            maps = self._map(wanted)
            items = maps.items[numbers]
        return maps.ids, items

    def _map(self, wanted: list[int]) -> _Maps:
        """Return maps that contain some files."""
        with _lock:
            missing = [number for number in wanted if self._maps.items[number] < 0]
            if sum(len(other._maps.arrays) for other in _all) + len(missing) > _MAX_MAPS:
                for other in _all:
                    other._maps = _Maps(other._n_files, other._dtype)
                missing = wanted
            for number in missing:
                self._maps.add(number, self._open_file(number))
            return self._maps
