"""Megatron IndexedDataset of a whole store: `tokens.bin` and `tokens.idx`, one sequence per document.

The shards of a store are such pairs already (lt_data.store.megatron tells the layout); this joins them to one prefix
for `--data-path`. Any dataset of integers can be read: the sequences of a document are joined. Cost: the bytes are
copied; the index has 20 bytes per document and is written in chunks and read through maps.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lt_data.errors import DataError
from lt_data.exports.job import ExportJob
from lt_data.storage import translate_os_errors
from lt_data.store.megatron import MAGIC, index_chunks

_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_HEADER = struct.Struct("<9sQBQQ")


def write(job: ExportJob) -> None:
    """Write the two files."""
    store = job.store
    with job.create("tokens.bin") as file:
        for _, batches in job.files(1, 2**62):
            for batch in batches:
                file.write(np.ascontiguousarray(batch.ids).tobytes())
    with job.create("tokens.idx") as file:
        for chunk in index_chunks(store.lengths, store.manifest.dtype):
            file.write(chunk)


def read(path: Path) -> Iterator[tuple[np.ndarray, str]]:
    """Yield the documents of an IndexedDataset.

    Args:
        path: its prefix, one of its two files, or a folder with exactly one pair.

    Yields:
        The ids of a document (integers), and its location.

    Raises:
        DataError: no such pair, another version, floats, or an index that does not match its tokens.
    """
    prefix = str(path).removesuffix(".bin").removesuffix(".idx")
    found = sorted(path.glob("*.idx")) if path.is_dir() else [Path(f"{prefix}.idx")]
    if len(found) != 1 or not found[0].is_file():
        raise DataError(
            f"{path}: one .idx file is needed, found {[file.name for file in found]}; give the prefix of one"
        )
    idx, bin_ = found[0], found[0].with_suffix(".bin")
    with translate_os_errors("read", path), idx.open("rb") as file:
        header, idx_bytes, bin_bytes = file.read(_HEADER.size), idx.stat().st_size, bin_.stat().st_size
    if len(header) < _HEADER.size or not header.startswith(MAGIC):
        raise DataError(f"{idx}: not a Megatron index (does not begin with {MAGIC[:7].decode()})")
    _, version, code, n, n_boundaries = _HEADER.unpack(header)
    if version != 1 or code not in _DTYPES:
        raise DataError(f"{idx}: version {version}, type {code}: only version 1 with integers is supported")
    if n_boundaries < 1 or idx_bytes != _HEADER.size + 12 * n + 8 * n_boundaries:
        raise DataError(f"{idx}: {idx_bytes} bytes do not match {n} sequences and {n_boundaries} document indices")
    dtype = np.dtype(_DTYPES[code])
    if bin_bytes % dtype.itemsize:
        raise DataError(f"{bin_}: not a whole number of tokens of type {code}; copy it again")
    if not n:
        return
    lengths = np.memmap(idx, "<i4", "r", _HEADER.size, (n,))
    pointers = np.memmap(idx, "<i8", "r", _HEADER.size + 4 * n, (n,))
    boundaries = np.memmap(idx, "<i8", "r", _HEADER.size + 12 * n, (n_boundaries,))
    if (boundaries[0], boundaries[-1]) != (0, n):
        raise DataError(f"{idx}: its documents are the sequences {boundaries[0]} to {boundaries[-1]} of {n}")
    tokens = np.memmap(bin_, dtype, "r") if bin_bytes else np.zeros(0, dtype)
    for number in range(n_boundaries - 1):
        first, last = int(boundaries[number]), int(boundaries[number + 1])
        location = f"{bin_}:{number + 1}"
        if first > last:
            raise DataError(f"{idx}: document {number} ends before it begins; make it again")
        parts = [tokens[:0]]
        for length, pointer in zip(lengths[first:last].tolist(), pointers[first:last].tolist(), strict=True):
            begin, offset = divmod(pointer, dtype.itemsize)
            if offset or not 0 <= begin <= begin + length <= tokens.size:
                raise DataError(f"{location}: {length} tokens at byte {pointer} are not in the file; copy both again")
            parts.append(tokens[begin : begin + length])
        yield np.concatenate(parts), location
