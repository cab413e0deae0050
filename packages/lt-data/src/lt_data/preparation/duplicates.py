"""Duplicates among the parts of a job, by ranges of hashes, each found by itself in bounded memory.

Each part has dropped its own duplicates. Of the others the first in the order of the parts stays, whoever found it:

    UNIT/by-hash              hashes of the part's documents in order (16 bytes each), then their numbers (u4)
    duplicates-003-of-016     documents of range 3 that an earlier part has: part << 32 | document (u8), in order

Range i of n has the hashes whose first 8 bytes, as a big-endian number, are from i/n to (i+1)/n of 2^64. The number of
ranges depends on the number of documents alone. A range reads its piece of each part's file, so all ranges together
read each file once.

Cost: 20 bytes on disk per document; memory of a range: about 80 bytes per document of it.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lt_data.errors import DataError
from lt_data.preparation.unit_writer import DOCUMENTS_FILE, ENTRY_DTYPE
from lt_data.storage import open_regular, translate_os_errors, write_file

BY_HASH = "by-hash"
HASH_DTYPE = ENTRY_DTYPE["hash"]
RANGE_DOCUMENTS = 2**23
"""Documents of a range, on average: 0.7 GB of memory."""
_NUMBER_DTYPE = np.dtype("<u4")
_ENTRY_BYTES = HASH_DTYPE.itemsize + _NUMBER_DTYPE.itemsize
_ID_DTYPE = np.dtype("<u8")


def count_ranges(n_documents: int) -> int:
    """Return the number of ranges for so many documents of all parts."""
    return max(1, -(-n_documents // RANGE_DOCUMENTS))


def read_entries(part: Path) -> np.ndarray:
    """Read the list of the documents of a part (`ENTRY_DTYPE`)."""
    path = part / DOCUMENTS_FILE
    with translate_os_errors("read", path):
        return np.fromfile(path, ENTRY_DTYPE)


def write_by_hash(part: Path) -> None:
    """Write the hashes of the documents of a part, in order.

    Raises:
        DataError: a file system error.
    """
    entries = read_entries(part)
    order = np.argsort(entries["hash"], kind="stable")
    hashes = np.ascontiguousarray(entries["hash"][order])
    write_file(part / BY_HASH, hashes.tobytes() + order.astype(_NUMBER_DTYPE).tobytes())


def count_documents(part: Path) -> int:
    """Return the number of documents of a part that has its hashes in order."""
    path = part / BY_HASH
    with translate_os_errors("read", path):
        return path.stat().st_size // _ENTRY_BYTES


def find_duplicates(parts: Sequence[Path], index: int, n_ranges: int) -> np.ndarray:
    """Find the documents of a range that an earlier part has too.

    Args:
        parts: folders of the parts, in order.
        index: the range.
        n_ranges: number of ranges.

    Returns:
        part << 32 | number of the document among those that the part encoded (u64), in order.

    Raises:
        DataError: the hashes of a part cannot be read.
    """
    hashes, ids = [np.zeros(0, HASH_DTYPE)], [np.zeros(0, _ID_DTYPE)]
    for number, part in enumerate(parts):
        found, documents = _read_range(part / BY_HASH, index, n_ranges)
        hashes.append(found)
        ids.append(documents.astype(_ID_DTYPE) | _ID_DTYPE.type(number << 32))
    high, low = np.concatenate(hashes).view(">u8").reshape(-1, 2).astype(np.uint64).T
    order = np.lexsort((low, high))  # stable: equal hashes stay in the order of the parts
    high, low = high[order], low[order]
    is_repeated = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
    return np.sort(np.concatenate(ids)[order[1:][is_repeated]])


def _read_range(path: Path, index: int, n_ranges: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of a range in a file, and the numbers of their documents."""
    with translate_os_errors("read", path), open_regular(path) as file:
        size = file.seek(0, 2)
        n = size // _ENTRY_BYTES
        if size != n * _ENTRY_BYTES:
            raise DataError(f"{path}: broken; remove the folder {path.parent} to prepare it again")
        if not n:
            return np.zeros(0, HASH_DTYPE), np.zeros(0, _NUMBER_DTYPE)
        hashes = np.memmap(file, HASH_DTYPE, mode="r", shape=(n,))
        first = int(np.searchsorted(hashes, _bound(index, n_ranges)))
        last = int(np.searchsorted(hashes, _bound(index + 1, n_ranges))) if index + 1 < n_ranges else n
        numbers = np.memmap(file, _NUMBER_DTYPE, mode="r", offset=n * HASH_DTYPE.itemsize, shape=(n,))
        return np.array(hashes[first:last]), np.array(numbers[first:last])


def _bound(index: int, n_ranges: int) -> np.bytes_:
    """Return the lowest hash of a range."""
    return np.bytes_((-(-(index << 64) // n_ranges)).to_bytes(8, "big"))


def encode_duplicates(ids: np.ndarray) -> bytes:
    """Return the bytes of a file of the duplicates of a range."""
    return ids.astype(_ID_DTYPE).tobytes()


def read_duplicates(files: Sequence[Path], part: int) -> np.ndarray:
    """Return the duplicates of a part among those of all ranges (u32, in order).

    Raises:
        DataError: a file cannot be read.
    """
    found = [np.zeros(0, np.uint32)]
    for path in files:
        with translate_os_errors("read", path):
            if not path.stat().st_size:
                continue
            ids = np.memmap(path, _ID_DTYPE, mode="r")
        first, last = np.searchsorted(ids, np.array([part << 32, (part + 1) << 32], _ID_DTYPE)).tolist()
        found.append((ids[first:last] & _ID_DTYPE.type(0xFFFFFFFF)).astype(np.uint32))
    return np.sort(np.concatenate(found))
