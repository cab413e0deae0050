"""LITPKDS chunks, the packed format of lit-gpt and TinyLlama (and of Litespark's other preparation).

    7 bytes  LITPKDS
    u64      version, 1
    u8       type: 8 = uint16, 4 = int32
    u64      ids in this file
    ids

All documents are concatenated and cut into files of at most 1024 blocks of seq_len + 1 ids, the block size of the
reader. All files have the same length, so the last is padded with `pad_id`, or incomplete blocks are dropped. The
format has no document boundaries. PackedDataset skips files that do not divide evenly among its processes. Memory: one
batch.
"""

import re
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lt_data.errors import DataError
from lt_data.exports.blocks import TokenBlock, sort_by_name
from lt_data.exports.export_job import ExportJob, WriteResult
from lt_data.exports.files import OutputFiles
from lt_data.exports.samples import block_batches
from lt_data.storage import translate_os_errors

MAGIC = b"LITPKDS"
_HEADER = struct.Struct("<7sQBQ")
_CODES = {"uint16": 8, "uint32": 4}
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_MAX_BLOCKS_PER_FILE = 1024  # as in lit-gpt


def min_bytes(job: ExportJob) -> int:
    """Return the bytes that the export needs."""
    files, blocks = _file_layout(job)
    return files * (_HEADER.size + blocks * job.block_tokens * job.store.dtype.itemsize)


def _file_layout(job: ExportJob) -> tuple[int, int]:
    """Return the number of files and of blocks per file, balanced to minimize padding or dropped blocks."""
    max_blocks = _MAX_BLOCKS_PER_FILE
    if job.options.file_bytes is not None:
        max_blocks = max(1, job.options.file_bytes // (job.block_tokens * job.store.dtype.itemsize))
    files = -(-job.n_blocks // max_blocks)
    if job.options.last_row == "drop":
        return files, job.n_blocks // files
    return files, -(-job.n_blocks // files)


def write(job: ExportJob, files: OutputFiles) -> WriteResult:
    """Write the files `<split>_0000000000.bin` and so on."""
    n_files, blocks = _file_layout(job)
    store = job.store
    chunk_ids = blocks * job.block_tokens
    done = 0
    for number in range(n_files):
        with files.create(f"{job.options.split}_{number:010d}.bin") as file:
            file.write(_HEADER.pack(MAGIC, 1, _CODES[store.manifest.dtype], chunk_ids))
            for tokens in block_batches(store, number * chunk_ids, (number + 1) * chunk_ids, job.pad_id):
                file.write(np.ascontiguousarray(tokens).view(np.uint8).data)
                job.progress(done := done + tokens.size, n_files * chunk_ids, "tokens")
    written = n_files * chunk_ids
    return WriteResult(
        samples=n_files * blocks, tokens=min(store.n_tokens, written), padding=max(0, written - store.n_tokens)
    )


def read(path: Path) -> Iterator[TokenBlock]:
    """Yield the chunks of a folder in the order of their names, or of one file.

    Yields:
        The ids of each file; files whose names differ only in the final number are one series.

    Raises:
        DataError: no file, or one of another format or length.
    """
    with translate_os_errors("read", path):
        files = sort_by_name(path.glob("*.bin")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path}: no .bin file; give a folder of LITPKDS chunks")
    for file in files:
        with translate_os_errors("read", file), file.open("rb") as opened:
            header = opened.read(_HEADER.size)
            size = file.stat().st_size
        if len(header) < _HEADER.size or not header.startswith(MAGIC):
            raise DataError(f"{file}: not a LITPKDS chunk; give a folder of only such files")
        _, version, code, n_ids = _HEADER.unpack(header)
        if version != 1 or code not in _DTYPES:
            raise DataError(f"{file}: version {version}, type {code}: only version 1 with integers is supported")
        dtype = np.dtype(_DTYPES[code])
        if size != _HEADER.size + n_ids * dtype.itemsize:
            raise DataError(f"{file}: {size} bytes, its header says {n_ids} ids of {dtype}; copy it again")
        with translate_os_errors("read", file):
            ids = np.memmap(file, dtype, "r", _HEADER.size) if n_ids else np.zeros(0, dtype)
        yield TokenBlock(ids, str(file), re.sub(r"_?\d+\.bin$", "", file.name))
