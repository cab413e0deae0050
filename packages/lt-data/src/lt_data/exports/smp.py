"""JSON lines of ids for SageMaker model parallel recipes: `.json`, or `.json.gz` (`--zipped_data 1`).

    {"input_ids":[1,5,7],"attention_mask":[1,1,1]}

One document or one row per line; padding has mask 0. Files are `part-00000.json.gz` and so on, each about `file_bytes`
of text; the recipe loads one at a time into memory and crops lines longer than its context at random, so give
`seq_len`. The folder contains nothing else, as the recipe reads every file of that suffix. The output is reproducible
(gzip without time and name). Memory: one batch; long lines are written in chunks.
"""

import gzip
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np

from lt_data.errors import DataError
from lt_data.exports.export_job import ExportJob, WriteResult
from lt_data.exports.files import OutputFile, OutputFiles
from lt_data.exports.samples import document_batches, row_batches, split_by_size
from lt_data.storage import translate_os_errors

FILE_BYTES = 1 << 28
_CHUNK_IDS = 1 << 16  # ids converted to text at a time
_GZIP_LEVEL = 6


def min_bytes(job: ExportJob) -> int:
    """Return a lower bound of the export's size: a digit, a comma and `1,` of the mask per token.

    If it is compressed, half of the estimate from the first tokens, as the rest may compress better.
    """
    if not job.options.gz:
        return 4 * job.store.n_tokens
    sample = job.store.tokens(0, min(_CHUNK_IDS, job.store.n_tokens))
    text: list[bytes] = []
    _write_line(text.append, sample, sample.size)
    compressed = len(gzip.compress(b"".join(text), _GZIP_LEVEL))
    return compressed * job.store.n_tokens // (2 * sample.size)


def write(job: ExportJob, files: OutputFiles) -> WriteResult:
    """Write the files."""
    file_bytes = job.options.file_bytes or FILE_BYTES
    per_token = len(str(job.store.vocab_size - 1)) + 3
    seq_len = job.options.seq_len
    sizes = job.store.lengths.astype(np.int64) if seq_len is None else np.full(job.n_rows, seq_len)
    boundaries = split_by_size(per_token * sizes, file_bytes)
    padding = done = 0
    suffix = ".json.gz" if job.options.gz else ".json"
    for number, (first, last) in enumerate(pairwise(boundaries.tolist())):
        with files.create(f"part-{number:05d}{suffix}") as file, _open_output(file, gz=job.options.gz) as add:
            if seq_len is None:
                for batch in document_batches(job.store, first, last):
                    end = 0
                    for length in batch.lengths.tolist():
                        _write_line(add, batch.tokens[end : end + length], length)
                        end += length
                    job.progress(done := done + batch.tokens.size, job.store.n_tokens, "tokens")
                continue
            for rows in row_batches(job.row_reader, first, last):
                mask = rows.doc_ids >= 0
                for row, n in zip(rows.input_ids, mask.sum(axis=1).tolist(), strict=True):
                    row[n:] = job.pad_id
                    _write_line(add, row, n)
                padding += mask.size - int(mask.sum())
                job.progress(done := done + int(mask.sum()), job.store.n_tokens, "tokens")
    return WriteResult(samples=int(boundaries[-1]), tokens=done, padding=padding)


@contextmanager
def _open_output(file: OutputFile, *, gz: bool) -> Iterator[Callable[[bytes], object]]:
    if not gz:
        yield file.write
        return
    # Not gzip.GzipFile, which after a failed write writes again on garbage collection (with a warning in 3.13). The
    # header (RFC 1952) has no time and no system, while zlib's names the operating system.
    compressor, checksum, size = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS), 0, 0
    file.write(b"\x1f\x8b\x08\0\0\0\0\0\0\xff")

    def add(content: bytes) -> None:
        nonlocal checksum, size
        checksum, size = zlib.crc32(content, checksum), size + len(content)
        if compressed := compressor.compress(content):
            file.write(compressed)

    yield add
    file.write(compressor.flush() + struct.pack("<II", checksum, size % 2**32))


def _write_line(add: Callable[[bytes], object], ids: np.ndarray, n_real: int) -> None:
    add(b'{"input_ids":[')
    for begin in range(0, ids.size, _CHUNK_IDS):
        add((b"," if begin else b"") + ",".join(map(str, ids[begin : begin + _CHUNK_IDS].tolist())).encode())
    mask = b"1," * n_real + b"0," * (ids.size - n_real)
    add(b'],"attention_mask":[' + mask[:-1] + b"]}\n")


def read(path: Path, field: str) -> Iterator[tuple[np.ndarray, int, str]]:
    """Yield the lines of a file, or of the files of a folder in the order of their names.

    Args:
        path: a `.json` or `.jsonl` file, or one of these with `.gz`; or a folder of them.
        field: field of the ids. If there is an attention_mask, masked ids are left out.

    Yields:
        The ids of a line (int64), the number of masked ids, and its location.

    Raises:
        DataError: no file, or a line that is not an object with such a field.
    """
    for file in _list_files(path):
        with translate_os_errors("read", file), gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
            number = 0
            try:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield _parse(line, field, f"{file}:{number}")
            except (EOFError, gzip.BadGzipFile, zlib.error) as exc:
                raise DataError(f"{file}: broken after line {number} ({exc}); copy it again") from exc


def _parse(line: bytes, field: str, location: str) -> tuple[np.ndarray, int, str]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise DataError(f"{location}: not a JSON value ({exc}); correct or remove the line") from exc
    if not isinstance(record, dict) or field not in record:
        found = f"fields {', '.join(map(repr, record))}" if isinstance(record, dict) else type(record).__name__
        raise DataError(f"{location}: no field {field!r} (found {found}); name the field of the ids")
    ids = _integers(record[field], f"{location}: {field}")
    if "attention_mask" not in record:
        return ids, 0, location
    mask = _integers(record["attention_mask"], f"{location}: attention_mask")
    if mask.size != ids.size:
        raise DataError(f"{location}: {ids.size} ids and {mask.size} mask values; correct or remove the line")
    kept = ids[mask != 0]
    return kept, ids.size - kept.size, location


def _integers(values: object, location: str) -> np.ndarray:
    if isinstance(values, list) and {*map(type, values)} <= {int}:  # no bool
        try:
            return np.array(values, np.int64)
        except OverflowError as exc:
            raise DataError(f"{location}: an id beyond 64 bits; correct or remove the line") from exc
    raise DataError(f"{location}: not a list of integers; correct or remove the line")


def _list_files(path: Path) -> list[Path]:
    suffixes = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
    with translate_os_errors("read", path):
        if not path.is_dir():
            return [path]
        files = sorted((entry for entry in path.iterdir() if entry.name.endswith(suffixes)), key=lambda file: file.name)
    if not files:
        raise DataError(f"{path}: no file with one of {' '.join(suffixes)}")
    return files
