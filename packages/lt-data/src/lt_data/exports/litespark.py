"""Litespark's prepared data: `metadata.json` and `<split>/tokens_shard_000000.ds`, ids without header.

All documents are concatenated and cut into rows of seq_len + 1 ids (the last one is a label); a file holds whole rows
of little-endian uint16, or uint32 for vocabularies of 65500 or more. Litespark's own preparation drops or pads the rest
of each batch and overwrites its output at each interval; this export contains every token of the store, in order, and
the numbers in metadata.json match the files. The format has no document boundaries, so reading needs
a rule: a document begins at each BOS, after each EOS, at each row, or at each file. Memory: one batch.
"""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.exports.job import ExportJob
from lt_data.exports.options import ImportOptions
from lt_data.storage import read_file, translate_os_errors, write_file

FILE_BYTES = 1 << 28
METADATA_FILE = "metadata.json"
SPLITS = ("train", "validation", "test")
_DTYPES = {2: "<u2", 4: "<u4"}


def write(job: ExportJob) -> None:
    """Write the folder."""
    store, options = job.store, job.options
    for number, batches in job.files(store.dtype.itemsize, FILE_BYTES):
        with job.create(f"{options.split}/tokens_shard_{number:06d}.ds") as file:
            for batch in batches:
                file.write(batch.ids.astype(store.dtype).tobytes())
    files = [path.stat().st_size for path in (job.folder / options.split).iterdir()]
    metadata = {
        "dataset": f"lt-data store {store.manifest.fingerprint[:16]}",
        "tokenizer": store.manifest.tokenizer.name,
        "vocab_size": store.manifest.tokenizer.vocab_size,
        "sequence_length": options.seq_len,
        "token_size_bytes": store.dtype.itemsize,
        "total_sequences": job.report.samples,
        "total_tokens": job.report.samples * options.row_tokens,
        "total_files_processed": store.manifest.sources.files,
        "subset_stats": {options.split: {"files": len(files), "total_size_bytes": sum(files)}},
        "add_bos": store.manifest.bos,
        "add_eos": store.manifest.eos,
        "processing_time_seconds": 0.0,  # reproducible output
        "processing_time_hours": 0.0,
    }
    write_file(job.folder / METADATA_FILE, (json.dumps(metadata, indent=2) + "\n").encode())


def read_documents(
    path: Path, options: ImportOptions, *, marker: int, eos_id: int | None, n_tokens: int | None, left_out: Counter[str]
) -> Iterator[tuple[np.ndarray, str]]:
    """Yield the documents of prepared data; memory: one document, and half of a file.

    Args:
        path: the folder of metadata.json, the folder of one split, or one file.
        options: where documents begin, and how files are read.
        marker: id of BOS or EOS, if documents are found by it.
        eos_id: id of EOS.
        n_tokens: tokens before the padding at the end of the last files, if they are known; then the last document of a
            file goes on in the next one (unless each file is a document).
        left_out: counts `padding`.

    Yields:
        The ids of a document, and the file and position at which it begins.

    Raises:
        DataError: no file, an unknown token size or row length, a file that is not a whole number of tokens or rows, or
            other totals than in metadata.json.
    """
    kind = options.boundaries
    row_tokens = (options.seq_len or _read_metadata(path)[1].get("sequence_length", -1)) + 1
    if kind == "rows" and row_tokens < 1:
        raise DataError("boundaries = 'rows': unknown row length; give seq_len (--seq-len)")
    parts: list[np.ndarray] = []
    source, left = "", n_tokens
    for block, file in _read_files(path, options.token_bytes):
        if kind == "rows" and block.size % row_tokens:
            raise DataError(f"{file}: {block.size} ids, not a multiple of the row length {row_tokens}; check seq_len")
        end = _padding_begin(block, options.pad_id, eos_id) if left is None else min(left, block.size)
        left = None if left is None else left - end
        left_out["padding"] += block.size - end
        if parts and (kind == "files" or n_tokens is None):
            yield np.concatenate(parts), source
            parts = []
        ends = np.arange(row_tokens, end + 1, row_tokens) if kind == "rows" else np.zeros(0, np.int64)
        if kind in ("bos", "eos"):
            ends = np.flatnonzero(block[:end] == marker) + (kind == "eos")
        for number, (first, last) in enumerate(pairwise([0, *ends.tolist(), end])):
            if last > first:
                source = source if parts else f"{file} from id {first}"
                parts.append(block[first:last])
            if parts and number < ends.size:
                yield np.concatenate(parts), source
                parts = []
    if parts:
        yield np.concatenate(parts), source


def _padding_begin(ids: np.ndarray, pad_id: int | None, eos_id: int | None) -> int:
    """Return the begin of the padding at the end of a file."""
    if pad_id is None or not ids.size:
        return ids.size
    is_text = ids[::-1] != pad_id
    end = ids.size - int(is_text.argmax()) if is_text.any() else 0
    return end + (pad_id == eos_id and 0 < end < ids.size)


def _read_files(path: Path, token_bytes: int | None) -> Iterator[tuple[np.ndarray, Path]]:
    """Yield the ids of each file in the order of their names, and its path."""
    files = [path] if path.is_file() else sorted(path.glob("*.ds")) or _split_files(path)
    if not files:
        raise DataError(f"{path}: no .ds file; give a folder that Litespark's preparation wrote")
    source, metadata = _read_metadata(path)
    token_bytes = metadata.get("token_size_bytes") if token_bytes is None else token_bytes
    if token_bytes not in _DTYPES:
        raise DataError(f"token_bytes = {token_bytes} ({source}): give 2 or 4")
    if path.is_dir():
        _check_totals(files, token_bytes, source, metadata)
    for file in files:
        size = file.stat().st_size
        if not file.is_file() or size % token_bytes:
            raise DataError(f"{file}: {size} bytes, not a file of {token_bytes}-byte tokens; check token_bytes")
        yield np.memmap(file, _DTYPES[token_bytes], "r") if size else np.zeros(0, np.uint16), file


def _check_totals(files: list[Path], token_bytes: int, source: Path, metadata: dict[str, Any]) -> None:
    """Compare the files of a split, and the tokens of all splits, with metadata.json.

    Sizes of splits are those at the end of a preparation, `total_tokens` is what it has written: they differ where
    Litespark's own preparation has overwritten its output.
    """
    root = source.parent
    split = "" if files[0].parent == root else files[0].parent.name
    n_bytes = {name: sum(file.stat().st_size for file in (root / name).glob("*.ds")) for name in ("", *SPLITS)}
    try:
        stated = {name: stats["total_size_bytes"] for name, stats in metadata.get("subset_stats", {}).items()}
        n_tokens = sum((n_bytes | stated).values()) // token_bytes
    except (AttributeError, KeyError, TypeError) as exc:
        raise DataError(f"{source}: not the description of Litespark's data ({exc!r}); correct it") from exc
    for name, value, found in (
        (f"total_size_bytes of {split}", stated.get(split), n_bytes.get(split)),
        ("total_tokens", metadata.get("total_tokens"), n_tokens),
    ):
        if split in n_bytes and value not in (None, found):
            raise DataError(
                f"{source}: {name} is {value}, but there are {found}; copy or prepare the files again, or write the "
                "true number there to import what is left"
            )


def _split_files(path: Path) -> list[Path]:
    splits = [split for split in SPLITS if any((path / split).glob("*.ds"))]
    if len(splits) > 1:
        raise DataError(f"{path}: holds the splits {', '.join(splits)}; give one, such as {path / splits[0]}")
    return sorted((path / splits[0]).glob("*.ds")) if splits else []


def _read_metadata(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the path of metadata.json, in the folder or its parent, and its values; none without one."""
    folder = path if path.is_dir() else path.parent
    file = next((path for path in (folder / METADATA_FILE, folder.parent / METADATA_FILE) if path.is_file()), None)
    if file is None:
        return folder / METADATA_FILE, {}
    with translate_os_errors("read", file):
        return file, strict_json.load_object(read_file(file, max_bytes=2**28), str(file), "correct it")
