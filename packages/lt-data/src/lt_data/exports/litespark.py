"""Litespark's prepared data: `metadata.json` and `<split>/tokens_shard_000000.ds`, ids without a header.

All documents are joined and cut into rows of seq_len + 1 ids (the one more is the last label); a file holds whole rows
of little-endian uint16, or uint32 from a vocabulary of 65500 on. Its own preparation drops or pads the rest of each
batch and writes over its output at each interval; here every token of the store is in it, in order, and the numbers in
metadata.json are those of the files. The format keeps no borders of documents. Memory: one batch.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lt_data.errors import DataError
from lt_data.exports.blocks import Chunk, numbered
from lt_data.exports.files import Files
from lt_data.exports.job import Job, Written
from lt_data.exports.samples import block_batches
from lt_data.showing.bars import scaled
from lt_data.storage import os_errors

FILE_BYTES = 1 << 28
METADATA_FILE = "metadata.json"
SPLITS = ("train", "validation", "test")
_DTYPES = {2: "<u2", 4: "<u4"}


def at_least(job: Job) -> int:
    """Bytes that the export needs."""
    return job.n_blocks * job.block * job.store.dtype.itemsize


def write(job: Job, files: Files) -> Written:
    """Write the folder."""
    store, options = job.store, job.options
    rows = job.n_blocks
    rows_per_file = max(1, (options.file_bytes or FILE_BYTES) // (job.block * store.dtype.itemsize))
    done = 0
    for number, first in enumerate(range(0, rows, rows_per_file)):
        last = min(first + rows_per_file, rows)
        with files.new(f"{options.split}/tokens_shard_{number:06d}.ds") as file:
            for tokens in block_batches(store, first * job.block, last * job.block, job.pad_id):
                file.write(np.ascontiguousarray(tokens).view(np.uint8).data)
                job.progress(done := done + tokens.size, rows * job.block, "tokens")
    files.add(METADATA_FILE, (json.dumps(_metadata(job, files), indent=2) + "\n").encode())
    written = rows * job.block
    return Written(samples=rows, tokens=min(store.n_tokens, written), padding=max(0, written - store.n_tokens))


def _metadata(job: Job, files: Files) -> dict[str, Any]:
    manifest = job.store.manifest
    subset = {
        "files": len(files.listed),
        "total_size_bytes": files.bytes,
        "total_size_human": f"{scaled(files.bytes)}B",
    }
    return {
        "dataset": f"lt-data store {manifest.fingerprint[:16]}",
        "tokenizer": manifest.tokenizer.name,
        "vocab_size": manifest.tokenizer.vocab_size,
        "sequence_length": job.options.seq_len,
        "token_size_bytes": job.store.dtype.itemsize,
        "total_sequences": job.n_blocks,
        "total_tokens": job.n_blocks * job.block,
        "total_files_processed": manifest.sources.files,
        "subset_stats": {job.options.split: subset},
        "add_bos": manifest.bos,
        "add_eos": manifest.eos,
        "processing_time_seconds": 0.0,  # the same store gives the same bytes
        "processing_time_hours": 0.0,
    }


def read(path: Path, token_bytes: int | None) -> Iterator[Chunk]:
    """The files of prepared data in the order of their names.

    Args:
        path: the folder of metadata.json, the folder of one split, or one file.
        token_bytes: 2 or 4; None: as metadata.json says, in the folder or the one above.

    Yields:
        The ids of each file.

    Raises:
        DataError: no file, no word on the size of a token, or a file that holds no whole number of them.
    """
    with os_errors("read", path):
        files = [path] if path.is_file() else numbered(path.glob("*.ds")) or _of_splits(path)
    if not files:
        raise DataError(f"{path}: no .ds file; name a folder that Litespark's preparation wrote")
    dtype = _dtype(path, token_bytes)
    for file in files:
        with os_errors("read", file):
            size = file.stat().st_size
            if size % dtype.itemsize:
                raise DataError(f"{file}: {size} bytes are no whole number of {dtype.itemsize}-byte tokens")
            yield Chunk(np.memmap(file, dtype, "r") if size else np.zeros(0, dtype), str(file), str(file))


def row_tokens(path: Path) -> int | None:
    """Tokens in a row as metadata.json says; None without one."""
    metadata = _read_metadata(path)
    length = metadata.get("sequence_length") if metadata else None
    return length + 1 if isinstance(length, int) else None


def _of_splits(path: Path) -> list[Path]:
    found = [split for split in SPLITS if any((path / split).glob("*.ds"))]
    if len(found) > 1:
        raise DataError(f"{path} holds the splits {', '.join(found)}: name one, such as {path / found[0]}")
    return numbered((path / found[0]).glob("*.ds")) if found else []


def _dtype(path: Path, token_bytes: int | None) -> np.dtype:
    if token_bytes is None:
        metadata = _read_metadata(path)
        token_bytes = metadata.get("token_size_bytes") if metadata else None
        if token_bytes is None:
            raise DataError(f"{path}: no {METADATA_FILE} says how many bytes a token has: give token_bytes, 2 or 4")
    if token_bytes not in _DTYPES:
        raise DataError(f"token_bytes={token_bytes}: 2 or 4")
    return np.dtype(_DTYPES[token_bytes])


def _read_metadata(path: Path) -> dict[str, Any] | None:
    folder = path if path.is_dir() else path.parent
    file = next((found / METADATA_FILE for found in (folder, folder.parent) if (found / METADATA_FILE).is_file()), None)
    if file is None:
        return None
    with os_errors("read", file):
        content = file.read_bytes()
    try:
        values = json.loads(content)
    except ValueError as exc:
        raise DataError(f"{file}: not JSON ({exc}); correct it") from exc
    if not isinstance(values, dict):
        raise DataError(f"{file}: not an object; correct it")
    return values
