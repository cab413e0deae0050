"""Source of each document of a shard, `shards/NAME.src`: 8 bytes per document, in its order.

Each is a little-endian u64: in the upper 24 bits the index of the file in the store's source files, in the lower 40
the number of the record as the reader counts, from 1: the line of JSON lines, the row of a table or hub dataset, the
element of a JSON array; 0 is a file that is one document. Records that were left out keep their numbers. A range of a
large file (lt_data.sources.pieces) is a file of its own, with its own lines.

The manifest lists up to 1000 source files; a store of more has them in `sources.jsonl`, one JSON object per line.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.file_names import find_compression
from lt_data.store.source_files import SourceFile

SOURCES_FILE = "sources.jsonl"
SOURCE_DTYPE = np.dtype("<u8")
MAX_SOURCE_FILES = 1 << 24
_RECORD_BITS = 40
_LINE_FORMATS = (".jsonl", ".ndjson", ".json")
_RANGE = re.compile(r"\[\d+:\d+\]$")  # of a file (lt_data.sources.pieces)
_REMEDY = "copy it again or prepare it again"


@dataclass(frozen=True, kw_only=True)
class DocumentSource:
    """Source of a document: its file and the number of its record, 0 if the file is one document."""

    path: str
    record: int

    def __str__(self) -> str:
        return format_source(self.path, self.record)


def format_source(path: str, record: int) -> str:
    """Return `path:line` of a JSON file, `path#row` of a table, and `path` for a whole file."""
    if not record:
        return path
    name = _RANGE.sub("", path.lower().partition("?")[0])
    name = name.removesuffix(find_compression(name))
    return f"{path}{':' if name.endswith(_LINE_FORMATS) else '#'}{record}"


def encode_source(file_index: int, record: int) -> int:
    """Return the 64 bits of a source."""
    assert 0 <= file_index < MAX_SOURCE_FILES
    if not 0 <= record < 1 << _RECORD_BITS:
        raise DataError(f"record {record}: a store numbers at most {(1 << _RECORD_BITS) - 1} of a file; split the file")
    return file_index << _RECORD_BITS | record


def decode_source(value: int) -> tuple[int, int]:
    """Return the file index and the record of 64 bits."""
    return value >> _RECORD_BITS, value & ((1 << _RECORD_BITS) - 1)


def decode_sources(content: bytes, *, documents: int, files: int, path: str) -> np.ndarray:
    """Return the sources in a `.src` file (u64 [documents]).

    Args:
        content: the file.
        documents: documents of its shard.
        files: source files of the store.
        path: its path, for messages.

    Raises:
        DataError: another number of documents, or a file that the store does not have.
    """
    if len(content) != 8 * documents:
        raise DataError(f"{path}: {len(content)} bytes for {documents} documents; {_REMEDY}")
    sources = np.frombuffer(content, SOURCE_DTYPE)
    if sources.size and (highest := int(sources.max()) >> _RECORD_BITS) >= files:
        raise DataError(f"{path}: names source file {highest}, the manifest has {files}; {_REMEDY}")
    return sources


def shift_files(sources: np.ndarray, files: int) -> np.ndarray:
    """Return the sources with `files` added to each file index."""
    return (sources + np.uint64(files << _RECORD_BITS)).astype(SOURCE_DTYPE, copy=False)


def encode_source_files(files: Sequence[SourceFile]) -> bytes:
    """Return the lines that list source files."""
    return "".join(f"{json.dumps(asdict(file))}\n" for file in files).encode()


def decode_source_files(content: bytes, path: str, remedy: str) -> tuple[SourceFile, ...]:
    """Read the lines that list source files.

    Raises:
        DataError: a line is broken; the message names it.
    """
    return tuple(
        strict_json.parse(SourceFile, strict_json.loads(line, at, remedy), at, remedy)
        for at, line in ((f"{path}:{number}", line) for number, line in enumerate(content.splitlines(), start=1))
    )
