"""Megatron IndexedDataset of a whole store: `tokens.bin` and `tokens.idx`, one sequence per document.

The shards of a store are such pairs already; this joins them to one prefix for `--data-path`. Any dataset of integers
can be read: the sequences of a document are joined. Cost: the bytes are copied; the index has 20 bytes per document and
is written and read in chunks.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lt_data.errors import DataError
from lt_data.exports.export_job import ExportJob, WriteResult
from lt_data.exports.files import OutputFiles
from lt_data.exports.input_files import check_input
from lt_data.exports.samples import document_batches
from lt_data.storage import translate_os_errors
from lt_data.store.megatron import MAGIC, index_chunks, index_size

PREFIX = "tokens"
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_HEADER = struct.Struct("<9sQBQQ")


def min_bytes(job: ExportJob) -> int:
    """Return the bytes that the export needs."""
    return job.store.n_tokens * job.store.dtype.itemsize + index_size(job.store.n_documents)


def write(job: ExportJob, files: OutputFiles) -> WriteResult:
    """Write the two files."""
    store = job.store
    done = 0
    with files.create(f"{PREFIX}.bin") as file:
        for batch in document_batches(store, 0, store.n_documents):
            file.write(np.ascontiguousarray(batch.tokens).view(np.uint8).data)
            job.progress(done := done + batch.tokens.size, store.n_tokens, "tokens")
    with files.create(f"{PREFIX}.idx") as file:
        for chunk in index_chunks(store.lengths, store.manifest.dtype):
            file.write(chunk)
    return WriteResult(samples=store.n_documents, tokens=store.n_tokens)


def read(path: Path) -> Iterator[tuple[np.ndarray, int, str]]:
    """Yield the documents of an IndexedDataset.

    Args:
        path: its prefix, one of its two files, or a folder with exactly one pair.

    Yields:
        The ids of a document (integers), 0, and its location.

    Raises:
        DataError: no such pair, another version, floats, or an index that does not match its tokens.
    """
    prefix = _prefix(path)
    idx, bin_ = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (idx, bin_):
        check_input(path)
    with translate_os_errors("read", idx), idx.open("rb") as file:
        header = file.read(_HEADER.size)
        idx_bytes = idx.stat().st_size
    if len(header) < _HEADER.size or not header.startswith(MAGIC):
        raise DataError(f"{idx}: not a Megatron index (does not begin with {MAGIC[:7].decode()})")
    _, version, code, n, n_boundaries = _HEADER.unpack(header)
    if version != 1 or code not in _DTYPES:
        raise DataError(f"{idx}: version {version}, type {code}: only version 1 with integers is supported")
    if n_boundaries < 1 or idx_bytes != _HEADER.size + 12 * n + 8 * n_boundaries:
        raise DataError(
            f"{idx}: {idx_bytes} bytes do not match {n} sequences and {n_boundaries} document indices (without modes)"
        )
    with translate_os_errors("read", bin_):
        n_tokens, rest = divmod(bin_.stat().st_size, np.dtype(_DTYPES[code]).itemsize)
        if rest:
            raise DataError(f"{bin_}: not a whole number of tokens of type {code}; copy it again")
        tokens = np.memmap(bin_, _DTYPES[code], "r") if n_tokens else np.zeros(0, _DTYPES[code])
    if not n:
        return
    with translate_os_errors("read", idx):
        lengths = np.memmap(idx, "<i4", "r", _HEADER.size, (n,))
        pointers = np.memmap(idx, "<i8", "r", _HEADER.size + 4 * n, (n,))
        boundaries = np.memmap(idx, "<i8", "r", _HEADER.size + 12 * n, (n_boundaries,))
    first, last = int(boundaries[0]), int(boundaries[-1])
    if (first, last) != (0, n):
        raise DataError(f"{idx}: its documents are the sequences {first} to {last} of {n}; make it again")
    itemsize = tokens.dtype.itemsize
    for number in range(n_boundaries - 1):
        first, last = int(boundaries[number]), int(boundaries[number + 1])
        location = f"{bin_}:{number + 1}"
        if first > last:
            raise DataError(f"{idx}: document {number} ends before it begins; make it again")
        parts: list[np.ndarray] = []
        for length, pointer in zip(lengths[first:last].tolist(), pointers[first:last].tolist(), strict=True):
            begin, offset = divmod(pointer, itemsize)
            if offset or not 0 <= begin <= begin + length <= n_tokens:
                raise DataError(f"{location}: {length} tokens at byte {pointer} are not in the file; copy both again")
            parts.append(np.asarray(tokens[begin : begin + length]))
        yield (parts[0] if len(parts) == 1 else np.concatenate([*parts, np.zeros(0, tokens.dtype)])), 0, location


def _prefix(path: Path) -> Path:
    if path.is_dir():
        files = sorted(path.glob("*.idx"))
        if len(files) != 1:
            names = ", ".join(file.name for file in files) or "none"
            raise DataError(f"{path}: one .idx file is needed, found {names}; give the prefix of one")
        return files[0].with_suffix("")
    return path.with_suffix("") if path.suffix in (".idx", ".bin") else path
