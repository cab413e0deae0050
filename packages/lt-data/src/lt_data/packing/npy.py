r"""Parser of one-dimensional `.npy` headers; numpy's own raises many kinds of errors on damaged files.

6 bytes  \x93NUMPY        2 bytes  1, 0 (the version)        u16  bytes of the text
text     {'descr': '<i8', 'fortran_order': False, 'shape': (5,), }, padded with spaces and a newline
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lt_data.errors import DataError
from lt_data.storage import open_regular, translate_os_errors

_MAGIC = b"\x93NUMPY\x01\x00"
_MAX_HEADER_BYTES = 2**16 + len(_MAGIC) + 2


def mmap_npy(path: Path, dtype: str, shape: Sequence[int]) -> np.ndarray:
    """Map an array that `np.save` wrote, reading only its header.

    Args:
        path: the file.
        dtype: expected dtype, such as `<i8`.
        shape: expected shape, of one dimension.

    Raises:
        DataError: it cannot be opened, or its header or size is not exactly that of such an array.
    """
    count = shape[0] if len(shape) == 1 else -1
    with translate_os_errors("open", path):
        with open_regular(path, inside=path.parent) as file:
            head = file.read(_MAX_HEADER_BYTES)
        size = path.stat().st_size
        text = rb"\{'descr': '%b', 'fortran_order': False, 'shape': \(%d,\), \} *\n" % (
            re.escape(dtype.encode()),
            count,
        )
        begin = len(_MAGIC) + 2
        length = int.from_bytes(head[len(_MAGIC) : begin], "little")
        valid = head.startswith(_MAGIC) and re.fullmatch(text, head[begin : begin + length])
        item = np.dtype(dtype).itemsize if valid else 0
        if not valid or size != begin + length + count * item:
            raise DataError(f"{path}: not a file of {count} numbers of type {dtype}; make the pack again")
        if not count:
            return np.zeros(0, dtype)
        # a plain array over the map: slicing np.memmap itself is several times slower
        return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=begin + length, shape=(count,)))
