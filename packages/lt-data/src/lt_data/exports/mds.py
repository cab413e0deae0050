"""MDS shards of MosaicML's `streaming` (format version 2), written and read without that library.

    index.json              the shards: columns, samples, bytes, hashes
    shard.00000.mds         u32 n; u32[n + 1] offsets of the samples, and the end; a JSON description; the samples

A sample is the u32 sizes of its variable-size columns, then the columns in the order of their names. Documents (no
`seq_len`) have the column tokens (`ndarray:uint16` or `ndarray:uint32`); rows have tokens and attention_mask
(`ndarray:uint8`, 0 in padding), both of fixed shape. Shards are split as by its own writer, at 64 MB by default, so
that offsets fit into 32 bits; a document of 4 GiB raises an error. Memory: one shard.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.exports.export_job import ExportJob, WriteResult
from lt_data.exports.files import OutputFiles
from lt_data.exports.input_files import MAX_DESCRIPTION_BYTES
from lt_data.exports.samples import document_batches, row_batches
from lt_data.file_names import is_plain_name
from lt_data.sources.decompression import decompress_stream
from lt_data.sources.hashing_reader import HashingCounter
from lt_data.sources.record import DamagedFileError
from lt_data.storage import read_file, translate_os_errors

FILE_BYTES = 1 << 26
INDEX_FILE = "index.json"
_HASH = "sha256"
_SUFFIXES = {"gz": ".gz", "zstd": ".zst"}
_MAX_SHARD_BYTES = 1 << 30  # of a compressed shard, which is held in memory; a usual one has 64 MiB
_READ_BYTES = 1 << 20
# Header of an array without a fixed shape: one byte for dimensions and width of the length, then the length.
_WIDTHS = ((1 << 8, "<B", 0), (1 << 16, "<H", 1), (1 << 32, "<I", 2))
_VALUE_TYPES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}


def min_bytes(job: ExportJob) -> int:
    """Return the bytes that the export needs."""
    itemsize = job.store.dtype.itemsize
    if job.options.seq_len is None:
        return job.store.n_tokens * itemsize + 10 * job.store.n_documents
    return job.n_rows * (job.options.seq_len * (itemsize + 1) + 4)


def write(job: ExportJob, files: OutputFiles) -> WriteResult:
    """Write the shards and the index."""
    seq_len, name = job.options.seq_len, job.store.manifest.dtype
    limit = job.options.file_bytes or FILE_BYTES
    if seq_len is None:
        columns = {"tokens": (f"ndarray:{name}", None)}
        samples = _document_samples(job)
    else:
        columns = {
            "attention_mask": (f"ndarray:uint8:{seq_len}", seq_len),
            "tokens": (f"ndarray:{name}:{seq_len}", seq_len * job.store.dtype.itemsize),
        }
        samples = _row_samples(job)
    config = {
        "version": 2,
        "format": "mds",
        "compression": None,
        "hashes": [_HASH],
        "size_limit": limit,
        "column_names": list(columns),
        "column_encodings": [encoding for encoding, _ in columns.values()],
        "column_sizes": [size for _, size in columns.values()],
    }
    description = json.dumps(config, sort_keys=True).encode()
    shards: list[dict[str, Any]] = []
    pending: list[bytes] = []
    size = empty_size = 8 + len(description)

    def close() -> None:
        nonlocal pending, size
        basename = f"shard.{len(shards):05d}.mds"
        _write_shard(files, basename, description, pending)
        file = files.completed[-1]
        raw = {"basename": basename, "bytes": file.bytes, "hashes": {_HASH: file.sha256}}
        shards.append({**config, "raw_data": raw, "samples": len(pending), "zip_data": None})
        pending, size = [], empty_size

    written = tokens = 0
    for sample, n_real in samples:
        if pending and size + len(sample) + 4 > limit:
            close()
        pending.append(sample)
        size += len(sample) + 4
        written += 1
        tokens += n_real
        job.progress(tokens, job.store.n_tokens, "tokens")
    close()
    files.add(INDEX_FILE, json.dumps({"shards": shards, "version": 2}, sort_keys=True).encode())
    padding = 0 if seq_len is None else written * seq_len - tokens
    return WriteResult(samples=written, tokens=tokens, padding=padding)


def _write_shard(files: OutputFiles, name: str, description: bytes, samples: list[bytes]) -> None:
    n = len(samples)
    offsets = np.cumsum([4 + 4 * (n + 1) + len(description), *map(len, samples)], dtype=np.int64)
    if int(offsets[-1]) >= 2**32:
        raise DataError(
            f"a shard of {int(offsets[-1])} bytes: MDS has 32-bit offsets; choose a smaller file_bytes, or give seq_len"
        )
    with files.create(name) as file:
        file.write(struct.pack("<I", n) + offsets.astype("<u4").tobytes() + description)
        for sample in samples:
            file.write(sample)


def _document_samples(job: ExportJob) -> Iterator[tuple[bytes, int]]:
    for batch in document_batches(job.store, 0, job.store.n_documents):
        begin = 0
        for length in batch.lengths.tolist():
            _, width, code = next(item for item in _WIDTHS if length < item[0])
            array = struct.pack("<B", 1 << 2 | code) + struct.pack(width, length)
            array += batch.tokens[begin : begin + length].tobytes()
            yield struct.pack("<I", len(array)) + array, length
            begin += length


def _row_samples(job: ExportJob) -> Iterator[tuple[bytes, int]]:
    for rows in row_batches(job.row_reader, 0, job.n_rows):
        mask = rows.doc_ids >= 0
        for row, real in zip(np.where(mask, rows.input_ids, job.pad_id), mask, strict=True):
            ids = row.astype(job.store.dtype)
            yield real.astype("u1").tobytes() + ids.tobytes(), int(real.sum())


@dataclass(frozen=True, kw_only=True)
class _MdsDescription:
    """Description of a shard file in the index: its totals and columns."""

    compression: str | None
    bytes: int
    samples: int
    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class _MdsShard(_MdsDescription):
    """Shard file and its columns."""

    path: Path


def read(path: Path, field: str) -> Iterator[tuple[np.ndarray, int, str]]:
    """Yield the samples of a folder of MDS shards.

    Args:
        path: the folder of index.json.
        field: column of the ids, an `ndarray` of any integer type. If there is an attention_mask, masked ids are left
            out.

    Yields:
        The ids of a sample, the number of masked ids, and its location.

    Raises:
        DataError: not such a folder, a column that is not an integer array, or a file that does not match the index.
    """
    for shard in _shards(path):
        for name in {field, "attention_mask"} & {*shard.names}:
            encoding = shard.encodings[shard.names.index(name)]
            if not encoding.startswith("ndarray"):
                raise DataError(f"{shard.path}: column {name!r} is {encoding}, not ndarray; name another column")
        if field not in shard.names:
            raise DataError(f"{shard.path}: no column {field!r} (found {', '.join(shard.names)}); name it")
        content = _read_shard(shard)
        try:
            yield from _samples(shard, content, field)
        except (struct.error, ValueError, IndexError, KeyError) as exc:
            if isinstance(exc, DataError):
                raise
            raise DataError(f"{shard.path}: does not match its index ({exc}); copy it again") from exc


def _samples(shard: _MdsShard, content: memoryview, field: str) -> Iterator[tuple[np.ndarray, int, str]]:
    (n,) = struct.unpack_from("<I", content)
    if n != shard.samples or len(content) != shard.bytes:
        raise ValueError(f"{n} samples in {len(content)} bytes, not {shard.samples} in {shard.bytes}")
    offsets = np.frombuffer(content, "<u4", n + 1, 4).tolist()
    for number, (begin, end) in enumerate(pairwise(offsets), start=1):
        if not 0 <= begin <= end <= len(content):
            raise ValueError(f"sample {number} is outside the file")
        values = _columns(shard, content[begin:end], {field, "attention_mask"})
        ids = values[field]
        location = f"{shard.path}:{number}"
        if "attention_mask" not in values:
            yield ids, 0, location
            continue
        kept = ids[values["attention_mask"] != 0]
        yield kept, ids.size - kept.size, location


def _columns(shard: _MdsShard, sample: memoryview, selected: set[str]) -> dict[str, np.ndarray]:
    position = 0
    sizes: list[int] = []
    for size in shard.sizes:
        if size is None:
            (size,) = struct.unpack_from("<I", sample, position)
            position += 4
        sizes.append(size)
    if position + sum(sizes) != len(sample):
        raise ValueError("its column sizes do not sum to its size")
    columns: dict[str, np.ndarray] = {}
    for name, encoding, size in zip(shard.names, shard.encodings, sizes, strict=True):
        if name in selected:
            columns[name] = _array(encoding, sample[position : position + size])
        position += size
    return columns


def _array(encoding: str, content: memoryview) -> np.ndarray:
    """Return the flat values of an `ndarray[:type[:shape]]`."""
    parts = encoding.split(":")
    dtype = parts[1] if len(parts) > 1 else None
    if dtype is None:
        dtype, content = _VALUE_TYPES[content[0]], content[1:]
    if len(parts) < 3:
        head = content[0]
        content = content[1 + (head >> 2) * (1 << (head & 3)) :]
    values = np.frombuffer(content, np.dtype(dtype).newbyteorder("<"))
    if values.dtype.kind not in "iu":
        raise ValueError(f"{encoding} is not an integer array")
    return values


def _shards(path: Path) -> list[_MdsShard]:
    file = path / INDEX_FILE
    with translate_os_errors("read the dataset's", file):
        content = read_file(file, max_bytes=MAX_DESCRIPTION_BYTES)
    index = strict_json.load_object(content, str(file), "write the shards again")
    try:
        shards = [_shard(path, values) for values in index["shards"]]
        version = index["version"]
    except (KeyError, TypeError, AttributeError) as exc:
        raise DataError(f"{file}: not the index of MDS shards ({exc!r}); write them again") from exc
    if version != 2:
        raise DataError(f"{file}: version {version!r}; only version 2 is supported")
    return shards


def _shard(path: Path, values: dict[str, Any]) -> _MdsShard:
    if values["format"] != "mds" or values["version"] != 2:
        raise DataError(f"{path / INDEX_FILE}: format {values['format']} {values['version']}; only mds 2 is supported")
    name = (values["zip_data"] or values["raw_data"])["basename"]
    if not isinstance(name, str) or not is_plain_name(name):
        raise DataError(f"{path / INDEX_FILE}: {name!r} is not a file of this folder; write the shards again")
    fields = {
        "compression": values["compression"] if values["zip_data"] else None,
        "bytes": values["raw_data"]["bytes"],
        "samples": values["samples"],
        "names": values["column_names"],
        "encodings": values["column_encodings"],
        "sizes": values["column_sizes"],
    }
    description = strict_json.parse(_MdsDescription, fields, str(path / INDEX_FILE), "write the shards again")
    return _MdsShard(path=path / name, **vars(description))


def _read_shard(shard: _MdsShard) -> memoryview:
    """Return the bytes of a shard: memory-mapped, or decompressed in memory, as many as the index says."""
    if shard.compression is None:
        with translate_os_errors("read", shard.path):
            return np.asarray(np.memmap(shard.path, np.uint8, "r")).data
    kind = shard.compression.partition(":")[0]
    if kind not in _SUFFIXES:
        raise DataError(f"{shard.path}: compressed with {kind}; only zstd and gz are supported: decompress it first")
    if shard.bytes > _MAX_SHARD_BYTES:
        raise DataError(
            f"{shard.path}: {shard.bytes} bytes without compression: decompress it first, or write smaller shards"
        )
    content = bytearray()
    try:
        with translate_os_errors("read", shard.path), shard.path.open("rb") as file:
            stream = decompress_stream(file, _SUFFIXES[kind], HashingCounter(), None)
            while len(content) <= shard.bytes and (chunk := stream.read(_READ_BYTES)):
                content += chunk
    except DamagedFileError as exc:
        raise DataError(f"{shard.path}: {exc}") from exc
    return memoryview(content)
