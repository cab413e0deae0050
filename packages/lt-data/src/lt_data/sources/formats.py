"""Table of file formats by suffix. A file with another suffix is text.

With `on_bad = "skip"` a record of a compressed file is yielded only after the checksum of its member has confirmed it
(decompression.py); with "error" at once, since damage raises an error in the end.
"""

import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import BinaryIO

from lt_data.sources.decompression import COMPRESSIONS, decompress_stream
from lt_data.sources.hashing_reader import BUFFER_BYTES, HashingCounter, hash_stream, open_at, open_seekable
from lt_data.sources.json_lines import read_json, read_jsonl
from lt_data.sources.options import SourceOptions
from lt_data.sources.parquet import read_arrow, read_parquet
from lt_data.sources.pdf import read_pdf
from lt_data.sources.record import DamagedFileError, SourceRecord
from lt_data.sources.text import read_text

_StreamReader = Callable[[io.BufferedIOBase, SourceOptions, int], Iterator[SourceRecord]]
_STREAM_READERS: dict[str, tuple[str, _StreamReader]] = {
    ".jsonl": ("jsonl", read_jsonl),
    ".ndjson": ("jsonl", read_jsonl),
    ".json": ("json", read_json),
    ".pdf": ("pdf", read_pdf),
}
_TEXT: tuple[str, _StreamReader] = ("text", read_text)
_SEEKABLE_READERS: dict[str, Callable[[BinaryIO, SourceOptions, int, HashingCounter], Iterator[SourceRecord]]] = {
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}


def read_file(
    file: BinaryIO, name: str, options: SourceOptions, start: int, counter: HashingCounter, *, local: bool
) -> Iterator[SourceRecord]:
    """Yield the records of a file from index `start` on.

    Args:
        file: the file, at its beginning.
        name: its name in lower case.
        options: read options.
        start: index of the first record.
        counter: counts and hashes all bytes of the file, for any `start`, and is told of a format without checksums.
        local: whether it can be read twice.

    Raises:
        DamagedFileError: the rest cannot be read; `counter` has the whole file.
        ChangedFileError: it is not what it was when it was read before.
        DataError: a package is missing.
    """
    for suffix, read_table in _SEEKABLE_READERS.items():
        if name.endswith(suffix):
            with open_seekable(file, counter, local=local) as seekable:
                yield from read_table(seekable, options, start, counter)
            return
    compression = next((suffix for suffix in COMPRESSIONS if name.endswith(suffix)), None)
    kind, read = _stream_reader(name)
    confirm = compression is not None and options.on_bad == "skip"
    with ExitStack() as stack:
        if confirm and not local:  # a member may be read twice
            file = stack.enter_context(open_seekable(file, counter, local=False))
            stream = open_at(file, 0)
        else:
            stream = hash_stream(file, counter)
        content = stream
        if compression is None:
            counter.unchecked = kind
        else:
            content = decompress_stream(stream, compression, counter, file if confirm else None)
        try:
            yield from read(content, options, start)
            _drain(content)  # so that its checksums are compared
        except DamagedFileError:
            _drain(stream)
            raise
        _drain(stream)


def _drain(stream: io.BufferedIOBase) -> None:
    """Read the rest of the stream, so that it is hashed."""
    while stream.read(BUFFER_BYTES):
        pass


def _stream_reader(name: str) -> tuple[str, _StreamReader]:
    for suffix in COMPRESSIONS:
        name = name.removesuffix(suffix)
    return next((reader for suffix, reader in _STREAM_READERS.items() if name.endswith(suffix)), _TEXT)
