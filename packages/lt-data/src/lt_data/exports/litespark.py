"""Litespark's prepared data: `metadata.json` and `<split>/tokens_shard_000000.ds`, ids without header.

All documents are concatenated and cut into rows of seq_len + 1 ids (the last one is a label); a file holds whole rows
of little-endian uint16, or uint32 for vocabularies of 65500 or more. Litespark's own preparation drops or pads the rest
of each batch and overwrites its output at each interval; this export contains every token of the store, in order, and
the numbers in metadata.json match the files. The format has no document boundaries. Memory: one batch.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lt_data import strict_json
from lt_data.display.progress_bars import format_si
from lt_data.errors import DataError
from lt_data.exports.export_job import ExportJob, WriteResult
from lt_data.exports.files import OutputFiles
from lt_data.exports.input_files import MAX_DESCRIPTION_BYTES
from lt_data.exports.samples import block_batches
from lt_data.storage import read_file, translate_os_errors

FILE_BYTES = 1 << 28
METADATA_FILE = "metadata.json"
SPLITS = ("train", "validation", "test")
_DTYPES = {2: "<u2", 4: "<u4"}


def min_bytes(job: ExportJob) -> int:
    """Return the bytes that the export needs."""
    return job.n_blocks * job.block_tokens * job.store.dtype.itemsize


def write(job: ExportJob, files: OutputFiles) -> WriteResult:
    """Write the folder."""
    store, options = job.store, job.options
    rows = job.n_blocks
    rows_per_file = max(1, (options.file_bytes or FILE_BYTES) // (job.block_tokens * store.dtype.itemsize))
    done = 0
    for number, first in enumerate(range(0, rows, rows_per_file)):
        last = min(first + rows_per_file, rows)
        with files.create(f"{options.split}/tokens_shard_{number:06d}.ds") as file:
            for tokens in block_batches(store, first * job.block_tokens, last * job.block_tokens, job.pad_id):
                file.write(np.ascontiguousarray(tokens).view(np.uint8).data)
                job.progress(done := done + tokens.size, rows * job.block_tokens, "tokens")
    files.add(METADATA_FILE, (json.dumps(_metadata(job, files), indent=2) + "\n").encode())
    written = rows * job.block_tokens
    return WriteResult(samples=rows, tokens=min(store.n_tokens, written), padding=max(0, written - store.n_tokens))


def _metadata(job: ExportJob, files: OutputFiles) -> dict[str, Any]:
    manifest = job.store.manifest
    subset = {
        "files": len(files.completed),
        "total_size_bytes": files.bytes,
        "total_size_human": f"{format_si(files.bytes)}B",
    }
    return {
        "dataset": f"lt-data store {manifest.fingerprint[:16]}",
        "tokenizer": manifest.tokenizer.name,
        "vocab_size": manifest.tokenizer.vocab_size,
        "sequence_length": job.options.seq_len,
        "token_size_bytes": job.store.dtype.itemsize,
        "total_sequences": job.n_blocks,
        "total_tokens": job.n_blocks * job.block_tokens,
        "total_files_processed": manifest.sources.files,
        "subset_stats": {job.options.split: subset},
        "add_bos": manifest.bos,
        "add_eos": manifest.eos,
        "processing_time_seconds": 0.0,  # reproducible output
        "processing_time_hours": 0.0,
    }


def read(path: Path, token_bytes: int | None) -> Iterator[tuple[np.ndarray, str]]:
    """Yield the files of prepared data in the order of their names.

    Args:
        path: the folder of metadata.json, the folder of one split, or one file.
        token_bytes: 2 or 4; None: from metadata.json, in the folder or its parent.

    Yields:
        The ids of each file, and its path.

    Raises:
        DataError: no file, an unknown token size, a file that is not a whole number of tokens, or other totals than
            in metadata.json.
    """
    with translate_os_errors("read", path):
        files = [path] if path.is_file() else sorted(path.glob("*.ds")) or _split_files(path)
    if not files:
        raise DataError(f"{path}: no .ds file; give a folder that Litespark's preparation wrote")
    dtype = _dtype(path, token_bytes)
    if path.is_dir():
        _check_totals(files, dtype.itemsize)
    for file in files:
        with translate_os_errors("read", file):
            size = file.stat().st_size
            if size % dtype.itemsize:
                raise DataError(
                    f"{file}: {size} bytes, not a multiple of {dtype.itemsize}-byte tokens; check token_bytes"
                )
            yield np.memmap(file, dtype, "r") if size else np.zeros(0, dtype), str(file)


def _check_totals(files: list[Path], token_bytes: int) -> None:
    """Compare the files of a split, and the tokens of all splits, with metadata.json.

    The numbers of each split are of the files at the end of a preparation, `total_tokens` is what it has written: they
    differ where Litespark's own preparation has overwritten its output.
    """
    source, metadata = _read_metadata(files[0])
    root, split = source.parent, files[0].parent

    def count_bytes(folder: Path) -> int:
        return sum(file.stat().st_size for file in folder.glob("*.ds"))

    try:
        stated = {root / name: stats["total_size_bytes"] for name, stats in metadata.get("subset_stats", {}).items()}
        with translate_os_errors("read", root):
            n_bytes = {root / name: count_bytes(root / name) for name in ("", *SPLITS)}
        totals = [(f"total_size_bytes of {split.name}", stated.get(split), n_bytes.get(split))]
        totals += [("total_tokens", metadata.get("total_tokens"), sum((n_bytes | stated).values()) // token_bytes)]
    except (AttributeError, KeyError, TypeError) as exc:
        raise DataError(f"{source}: not the description of Litespark's data ({exc!r}); correct it") from exc
    for name, value, found in totals:
        if split in n_bytes and value not in (None, found):
            raise DataError(
                f"{source}: {name} is {value}, but there are {found}; copy or prepare the files again, or write the "
                "true number there to import what is left"
            )


def read_row_tokens(path: Path) -> int | None:
    """Return the tokens in a row by metadata.json; None without one."""
    length = _read_metadata(path)[1].get("sequence_length")
    return length + 1 if isinstance(length, int) else None


def _split_files(path: Path) -> list[Path]:
    splits = [split for split in SPLITS if any((path / split).glob("*.ds"))]
    if len(splits) > 1:
        raise DataError(f"{path}: holds the splits {', '.join(splits)}; give one, such as {path / splits[0]}")
    return sorted((path / splits[0]).glob("*.ds")) if splits else []


def _dtype(path: Path, token_bytes: int | None) -> np.dtype:
    if token_bytes is None:
        token_bytes = _read_metadata(path)[1].get("token_size_bytes")
        if token_bytes is None:
            raise DataError(f"{path}: no {METADATA_FILE} with the size of a token; give token_bytes, 2 or 4")
    if token_bytes not in _DTYPES:
        raise DataError(f"token_bytes = {token_bytes}: give 2 or 4")
    return np.dtype(_DTYPES[token_bytes])


def _read_metadata(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the path of metadata.json, in the folder or its parent, and its values; none without one."""
    folder = path if path.is_dir() else path.parent
    file = next((path for path in (folder / METADATA_FILE, folder.parent / METADATA_FILE) if path.is_file()), None)
    if file is None:
        return folder / METADATA_FILE, {}
    with translate_os_errors("read", file):
        content = read_file(file, max_bytes=MAX_DESCRIPTION_BYTES)
    return file, strict_json.load_object(content, str(file), "correct it")
