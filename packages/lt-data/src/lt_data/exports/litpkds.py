"""LITPKDS chunks, the packed format of lit-gpt and TinyLlama (and of Litespark's other preparation).

    7 bytes  LITPKDS
    u64      version, 1
    u8       type: 8 = uint16, 4 = int32
    u64      ids in this file
    ids

All documents are joined and cut into files of at most 1024 blocks of seq_len + 1 ids; a reader takes blocks of that
length. Every file has one length, so the last is filled up with `pad_id`, or the blocks that would need it are dropped.
The format keeps no borders of documents. Note that PackedDataset leaves out files that do not divide evenly among its
processes. Memory: one batch.
"""

import re
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lt_data.errors import DataError
from lt_data.exports.blocks import Chunk, numbered
from lt_data.exports.files import Files
from lt_data.exports.job import Job, Written
from lt_data.exports.samples import block_batches
from lt_data.storage import os_errors

MAGIC = b"LITPKDS"
_HEADER = struct.Struct("<7sQBQ")
_CODES = {"uint16": 8, "uint32": 4}
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_BLOCKS = 1024  # in a file, the custom of lit-gpt


def at_least(job: Job) -> int:
    """Bytes that the export needs."""
    files, blocks = _shape(job)
    return files * (_HEADER.size + blocks * job.block * job.store.dtype.itemsize)


def _shape(job: Job) -> tuple[int, int]:
    """Files, and blocks in each: as even as can be, so that the last file needs little padding or loses little."""
    asked = job.options.file_bytes
    most = _BLOCKS if asked is None else max(1, asked // (job.block * job.store.dtype.itemsize))
    files = -(-job.n_blocks // most)
    if job.options.last_row == "drop":
        return files, job.n_blocks // files
    return files, -(-job.n_blocks // files)


def write(job: Job, files: Files) -> Written:
    """Write the files `<split>_0000000000.bin` and so on."""
    n_files, blocks = _shape(job)
    store = job.store
    chunk = blocks * job.block
    done = 0
    for number in range(n_files):
        with files.new(f"{job.options.split}_{number:010d}.bin") as file:
            file.write(_HEADER.pack(MAGIC, 1, _CODES[store.manifest.dtype], chunk))
            for tokens in block_batches(store, number * chunk, (number + 1) * chunk, job.pad_id):
                file.write(np.ascontiguousarray(tokens).view(np.uint8).data)
                job.progress(done := done + tokens.size, n_files * chunk, "tokens")
    written = n_files * chunk
    return Written(
        samples=n_files * blocks, tokens=min(store.n_tokens, written), padding=max(0, written - store.n_tokens)
    )


def read(path: Path) -> Iterator[Chunk]:
    """The chunks of a folder in the order of their names, or one file.

    Yields:
        The ids of each file; files whose names differ in the closing number alone belong together.

    Raises:
        DataError: no file, or one of another format or length.
    """
    with os_errors("read", path):
        files = numbered(path.glob("*.bin")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path}: no .bin file; name a folder of LITPKDS chunks")
    for file in files:
        with os_errors("read", file), file.open("rb") as opened:
            header = opened.read(_HEADER.size)
            size = file.stat().st_size
        if len(header) < _HEADER.size or not header.startswith(MAGIC):
            raise DataError(f"{file}: not a LITPKDS chunk; name a folder that holds nothing else")
        _, version, code, chunk = _HEADER.unpack(header)
        if version != 1 or code not in _DTYPES:
            raise DataError(f"{file}: version {version}, type {code}: this reads version 1 of integers")
        dtype = np.dtype(_DTYPES[code])
        if size != _HEADER.size + chunk * dtype.itemsize:
            raise DataError(f"{file}: {size} bytes, its header says {chunk} ids of {dtype}; copy it again")
        with os_errors("read", file):
            ids = np.memmap(file, dtype, "r", _HEADER.size) if chunk else np.zeros(0, dtype)
        yield Chunk(ids, str(file), re.sub(r"_?\d+\.bin$", "", file.name))
