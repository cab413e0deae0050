"""The table: how a file's name ends → how it is read. A file with another ending is text."""

import io
from collections.abc import Callable, Iterator
from typing import BinaryIO

from lt_data.sources.bytes_in import BUFFER_BYTES, PACKED, Tally, seekable, tallied, unpacked
from lt_data.sources.lines import read_json, read_lines
from lt_data.sources.options import ReadOptions
from lt_data.sources.parquet import read_arrow, read_parquet
from lt_data.sources.pdf import read_pdf
from lt_data.sources.plain import read_text
from lt_data.sources.record import Damaged, Record

_IN_ORDER: dict[str, Callable[[io.BufferedIOBase, ReadOptions, int], Iterator[Record]]] = {
    ".jsonl": read_lines,
    ".ndjson": read_lines,
    ".json": read_json,
    ".pdf": read_pdf,
}
_SEEKING: dict[str, Callable[[BinaryIO, ReadOptions, int], Iterator[Record]]] = {
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}


def read_file(
    file: BinaryIO, ending: str, options: ReadOptions, start: int, tally: Tally, *, local: bool
) -> Iterator[Record]:
    """The records of a file from number `start` on.

    Args:
        file: at its beginning.
        ending: its name in small letters.
        options: which field.
        start: index of the first record that is wanted.
        tally: told of all bytes of the file, from its beginning, whatever `start` is.
        local: whether it can be read twice.

    Raises:
        Damaged: it cannot be read on; the tally has all of it.
        DataError: a package is missing.
    """
    for suffix, read in _SEEKING.items():
        if ending.endswith(suffix):
            with seekable(file, tally, local=local) as whole:
                yield from read(whole, options, start)
            return
    stream = tallied(file, tally)
    try:
        with unpacked(stream, ending) as content:
            yield from _reader_of(ending)(content, options, start)
    except Damaged:
        _drain(stream)
        raise
    _drain(stream)


def _drain(stream: io.BufferedIOBase) -> None:
    """Let the tally see what nobody has read."""
    while stream.read(BUFFER_BYTES):
        pass


def _reader_of(ending: str) -> Callable[[io.BufferedIOBase, ReadOptions, int], Iterator[Record]]:
    for packed in PACKED:
        ending = ending.removesuffix(packed)
    return next((read for suffix, read in _IN_ORDER.items() if ending.endswith(suffix)), read_text)
