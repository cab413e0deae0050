r"""The header of a one-dimensional `.npy` file, without numpy's parser, which fails on damage in many ways.

6 bytes  \x93NUMPY        2 bytes  1, 0 (the version)        u16  bytes of the text
text     {'descr': '<i8', 'fortran_order': False, 'shape': (5,), }, filled with blanks and a newline
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lt_data.errors import DataError
from lt_data.storage import os_errors

_MAGIC = b"\x93NUMPY\x01\x00"
_LONGEST = 2**16 + len(_MAGIC) + 2


def open_array(path: Path, dtype: str, shape: Sequence[int]) -> np.ndarray:
    """Map an array that `np.save` wrote; nothing is read but its header.

    Args:
        path: the file.
        dtype: what it must be, such as `<i8`.
        shape: of one dimension.

    Raises:
        DataError: it cannot be opened, or is not the file of such an array, byte for byte of its header.
    """
    count = shape[0] if len(shape) == 1 else -1
    with os_errors("open", path):
        with path.open("rb") as file:
            head = file.read(_LONGEST)
        size = path.stat().st_size
        text = rb"\{'descr': '%b', 'fortran_order': False, 'shape': \(%d,\), \} *\n" % (
            re.escape(dtype.encode()),
            count,
        )
        begin = len(_MAGIC) + 2
        length = int.from_bytes(head[len(_MAGIC) : begin], "little")
        good = head.startswith(_MAGIC) and re.fullmatch(text, head[begin : begin + length])
        item = np.dtype(dtype).itemsize if good else 0
        if not good or size != begin + length + count * item:
            raise DataError(f"{path}: not a file of {count} numbers of type {dtype}; make the pack again")
        if not count:
            return np.zeros(0, dtype)
        # A plain array over the map: slicing np.memmap itself is several times slower.
        return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=begin + length, shape=(count,)))
