"""Table of file formats by suffix. A file with another suffix is text."""

import io
from collections.abc import Callable, Iterator
from typing import BinaryIO

from lt_data.sources.hashing_reader import (
    BUFFER_BYTES,
    COMPRESSED_SUFFIXES,
    HashingCounter,
    decompress_stream,
    hash_stream,
    open_seekable,
)
from lt_data.sources.json_lines import read_json, read_jsonl
from lt_data.sources.options import ReadOptions
from lt_data.sources.parquet import read_arrow, read_parquet
from lt_data.sources.pdf import read_pdf
from lt_data.sources.record import DamagedFileError, SourceRecord
from lt_data.sources.text import read_text

_STREAM_READERS: dict[str, Callable[[io.BufferedIOBase, ReadOptions, int], Iterator[SourceRecord]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".pdf": read_pdf,
}
_SEEKABLE_READERS: dict[str, Callable[[BinaryIO, ReadOptions, int], Iterator[SourceRecord]]] = {
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}


def read_file(
    file: BinaryIO, name: str, options: ReadOptions, start: int, counter: HashingCounter, *, local: bool
) -> Iterator[SourceRecord]:
    """Yield the records of a file from index `start` on.

    Args:
        file: the file, at its beginning.
        name: its name in lower case.
        options: read options.
        start: index of the first record.
        counter: counts and hashes all bytes of the file, for any `start`.
        local: whether it can be read twice.

    Raises:
        DamagedFileError: the rest cannot be read; `counter` has the whole file.
        DataError: a package is missing.
    """
    for suffix, read in _SEEKABLE_READERS.items():
        if name.endswith(suffix):
            with open_seekable(file, counter, local=local) as seekable:
                yield from read(seekable, options, start)
            return
    stream = hash_stream(file, counter)
    try:
        with decompress_stream(stream, name) as content:
            yield from _stream_reader(name)(content, options, start)
    except DamagedFileError:
        _drain(stream)
        raise
    _drain(stream)


def _drain(stream: io.BufferedIOBase) -> None:
    """Read the rest of the stream, so that it is hashed."""
    while stream.read(BUFFER_BYTES):
        pass


def _stream_reader(name: str) -> Callable[[io.BufferedIOBase, ReadOptions, int], Iterator[SourceRecord]]:
    for suffix in COMPRESSED_SUFFIXES:
        name = name.removesuffix(suffix)
    return next((read for suffix, read in _STREAM_READERS.items() if name.endswith(suffix)), read_text)
