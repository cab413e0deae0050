"""JSON lines of ids, as the SageMaker model parallel recipes read them: `.json`, or `.json.gz` (`--zipped_data 1`).

    {"input_ids":[1,5,7],"attention_mask":[1,1,1]}

One document or one row per line; padding has mask 0. Files are `part-00000.json.gz` and so on, each about
`file_bytes` of text; the recipe holds one in memory at a time and crops lines longer than its context at random, so
give `seq_len`. Nothing else lies in the folder, as the recipe takes every file of that suffix. The bytes are the same
each time (gzip without time and name). Memory: one batch; long lines are written in parts.
"""

import gzip
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from lt_data.errors import DataError
from lt_data.exports.files import Files, NewFile
from lt_data.exports.job import Job, Written
from lt_data.exports.samples import document_batches, row_batches, runs
from lt_data.storage import os_errors

FILE_BYTES = 1 << 28
_PART = 1 << 16  # ids turned into text at a time
_LEVEL = 6


def at_least(job: Job) -> int:
    """Bytes that the export needs, from below: a digit, a comma and `1,` of the mask per token.

    Where it is packed, half of what the first tokens say, as the rest may pack better.
    """
    if not job.options.gz:
        return 4 * job.store.n_tokens
    sample = job.store.tokens(0, min(_PART, job.store.n_tokens))
    text: list[bytes] = []
    _line(text.append, sample, sample.size)
    packed = len(gzip.compress(b"".join(text), _LEVEL))
    return packed * job.store.n_tokens // (2 * sample.size)


def write(job: Job, files: Files) -> Written:
    """Write the files."""
    file_bytes = job.options.file_bytes or FILE_BYTES
    per_token = len(str(job.store.vocab_size - 1)) + 3
    seq_len = job.options.seq_len
    sizes = job.store.lengths.astype(np.int64) if seq_len is None else np.full(job.n_rows, seq_len)
    borders = runs(per_token * sizes, file_bytes)
    padding = done = 0
    suffix = ".json.gz" if job.options.gz else ".json"
    for number, (first, last) in enumerate(zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True)):
        with files.new(f"part-{number:05d}{suffix}") as file, _packed(file, gz=job.options.gz) as add:
            if seq_len is None:
                for batch in document_batches(job.store, first, last):
                    end = 0
                    for length in batch.lengths.tolist():
                        _line(add, batch.tokens[end : end + length], length)
                        end += length
                    job.progress(done := done + batch.tokens.size, job.store.n_tokens, "tokens")
                continue
            for rows in row_batches(job.rows, first, last):
                mask = rows.doc_ids >= 0
                for row, n in zip(rows.input_ids, mask.sum(axis=1).tolist(), strict=True):
                    row[n:] = job.pad_id
                    _line(add, row, n)
                padding += mask.size - int(mask.sum())
                job.progress(done := done + int(mask.sum()), job.store.n_tokens, "tokens")
    return Written(samples=int(borders[-1]), tokens=done, padding=padding)


@contextmanager
def _packed(file: NewFile, *, gz: bool) -> Iterator[Callable[[bytes], object]]:
    if not gz:
        yield file.write
        return
    # Not gzip.GzipFile: what a failed write leaves of it writes again when it is collected; 3.13 tells so. Its header
    # (RFC 1952: no time, no system), because zlib's own names the system that wrote it.
    packer, checksum, size = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS), 0, 0
    file.write(b"\x1f\x8b\x08\0\0\0\0\0\0\xff")

    def add(content: bytes) -> None:
        nonlocal checksum, size
        checksum, size = zlib.crc32(content, checksum), size + len(content)
        if packed := packer.compress(content):
            file.write(packed)

    yield add
    file.write(packer.flush() + struct.pack("<II", checksum, size % 2**32))


def _line(add: Callable[[bytes], object], ids: np.ndarray, n_real: int) -> None:
    add(b'{"input_ids":[')
    for begin in range(0, ids.size, _PART):
        add((b"," if begin else b"") + ",".join(map(str, ids[begin : begin + _PART].tolist())).encode())
    mask = b"1," * n_real + b"0," * (ids.size - n_real)
    add(b'],"attention_mask":[' + mask[:-1] + b"]}\n")


def read(path: Path, field: str) -> Iterator[tuple[np.ndarray, int, str]]:
    """The lines of a file, or of the files of a folder in the order of their names.

    Args:
        path: a `.json`, `.jsonl` or such a file with `.gz`; of a folder, all of them.
        field: the field of the ids. Where there is an attention_mask, what it masks is left out.

    Yields:
        The ids of a line (int64), how many were masked, and where it stands.

    Raises:
        DataError: no file, or a line that is no object with such a field.
    """
    for file in _files(path):
        with os_errors("read", file), gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
            number = 0
            try:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield _parse(line, field, f"{file}:{number}")
            except (EOFError, gzip.BadGzipFile, zlib.error) as exc:
                raise DataError(f"{file}: broken after line {number} ({exc}); copy it again") from exc


def _parse(line: bytes, field: str, where: str) -> tuple[np.ndarray, int, str]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise DataError(f"{where}: not a JSON value ({exc}); correct or remove the line") from exc
    if not isinstance(record, dict) or field not in record:
        found = f"fields {', '.join(map(repr, record))}" if isinstance(record, dict) else type(record).__name__
        raise DataError(f"{where}: no field {field!r} (found {found}); name the field of the ids")
    ids = _integers(record[field], f"{where}: {field}")
    if "attention_mask" not in record:
        return ids, 0, where
    mask = _integers(record["attention_mask"], f"{where}: attention_mask")
    if mask.size != ids.size:
        raise DataError(f"{where}: {ids.size} ids and {mask.size} mask values; correct or remove the line")
    kept = ids[mask != 0]
    return kept, ids.size - kept.size, where


def _integers(values: object, where: str) -> np.ndarray:
    if isinstance(values, list) and {*map(type, values)} <= {int}:  # a bool is no id
        try:
            return np.array(values, np.int64)
        except OverflowError as exc:
            raise DataError(f"{where}: an id beyond 64 bits; correct or remove the line") from exc
    raise DataError(f"{where}: not a list of integers; correct or remove the line")


def _files(path: Path) -> list[Path]:
    suffixes = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
    with os_errors("read", path):
        if not path.is_dir():
            return [path]
        found = sorted((entry for entry in path.iterdir() if entry.name.endswith(suffixes)), key=lambda file: file.name)
    if not found:
        raise DataError(f"{path}: no file with one of {' '.join(suffixes)}")
    return found
