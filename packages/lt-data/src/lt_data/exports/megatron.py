"""One Megatron IndexedDataset of a whole store: `tokens.bin` and `tokens.idx`, each document a sequence.

The shards of a store are such pairs already; this joins them into the one prefix that `--data-path` takes. Reading
takes any dataset of integers: a document's sequences are joined, whatever their number and place. Cost: the bytes are
copied, the index has 20 bytes per document and is written and read in parts.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lt_data.errors import DataError
from lt_data.exports.files import Files
from lt_data.exports.job import Job, Written
from lt_data.exports.samples import document_batches
from lt_data.storage import os_errors
from lt_data.store.megatron import MAGIC, index_parts, index_size

PREFIX = "tokens"
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_HEADER = struct.Struct("<9sQBQQ")


def at_least(job: Job) -> int:
    """Bytes that the export needs."""
    return job.store.n_tokens * job.store.dtype.itemsize + index_size(job.store.n_documents)


def write(job: Job, files: Files) -> Written:
    """Write the pair of files."""
    store = job.store
    done = 0
    with files.new(f"{PREFIX}.bin") as file:
        for batch in document_batches(store, 0, store.n_documents):
            file.write(np.ascontiguousarray(batch.tokens).view(np.uint8).data)
            job.progress(done := done + batch.tokens.size, store.n_tokens, "tokens")
    with files.new(f"{PREFIX}.idx") as file:
        for part in index_parts(store.lengths, store.manifest.dtype):
            file.write(part)
    return Written(samples=store.n_documents, tokens=store.n_tokens)


def read(path: Path) -> Iterator[tuple[np.ndarray, int, str]]:
    """The documents of an IndexedDataset.

    Args:
        path: its prefix, one of its two files, or a folder that holds just one pair.

    Yields:
        The ids of a document (integers), 0, and where it stands.

    Raises:
        DataError: no such pair, another version, floats, or an index that does not fit its tokens.
    """
    prefix = _prefix(path)
    idx, bin_ = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    with os_errors("read", idx), idx.open("rb") as file:
        header = file.read(_HEADER.size)
        idx_bytes = idx.stat().st_size
    if len(header) < _HEADER.size or not header.startswith(MAGIC):
        raise DataError(f"{idx}: not an index of Megatron (no {MAGIC[:7].decode()} at its start)")
    _, version, code, n, n_borders = _HEADER.unpack(header)
    if version != 1 or code not in _DTYPES:
        raise DataError(f"{idx}: version {version}, type {code}: this reads version 1 of integers")
    if n_borders < 1 or idx_bytes != _HEADER.size + 12 * n + 8 * n_borders:
        raise DataError(f"{idx}: {idx_bytes} bytes do not fit {n} sequences and {n_borders} borders (of text alone)")
    with os_errors("read", bin_):
        n_tokens, rest = divmod(bin_.stat().st_size, np.dtype(_DTYPES[code]).itemsize)
        if rest:
            raise DataError(f"{bin_}: not a whole number of tokens of type {code}; copy it again")
        tokens = np.memmap(bin_, _DTYPES[code], "r") if n_tokens else np.zeros(0, _DTYPES[code])
    if not n:
        return
    with os_errors("read", idx):
        lengths = np.memmap(idx, "<i4", "r", _HEADER.size, (n,))
        pointers = np.memmap(idx, "<i8", "r", _HEADER.size + 4 * n, (n,))
        borders = np.memmap(idx, "<i8", "r", _HEADER.size + 12 * n, (n_borders,))
    if int(borders[0]) != 0 or int(borders[-1]) != n:
        raise DataError(f"{idx}: its documents are the sequences {borders[0]} to {borders[-1]} of {n}; make it again")
    itemsize = tokens.dtype.itemsize
    for number in range(n_borders - 1):
        first, last = int(borders[number]), int(borders[number + 1])
        where = f"{bin_}:{number + 1}"
        if first > last:
            raise DataError(f"{idx}: document {number} ends before it begins; make it again")
        parts: list[np.ndarray] = []
        for length, pointer in zip(lengths[first:last].tolist(), pointers[first:last].tolist(), strict=True):
            begin, odd = divmod(pointer, itemsize)
            if odd or not 0 <= begin <= begin + length <= n_tokens:
                raise DataError(f"{where}: {length} tokens at byte {pointer} do not lie in the file; copy both again")
            parts.append(np.asarray(tokens[begin : begin + length]))
        yield (parts[0] if len(parts) == 1 else np.concatenate([*parts, np.zeros(0, tokens.dtype)])), 0, where


def _prefix(path: Path) -> Path:
    if path.is_dir():
        found = sorted(path.glob("*.idx"))
        if len(found) != 1:
            names = ", ".join(file.name for file in found) or "none"
            raise DataError(f"{path}: one .idx file is needed, found {names}; name the prefix of one")
        return found[0].with_suffix("")
    return path.with_suffix("") if path.suffix in (".idx", ".bin") else path
