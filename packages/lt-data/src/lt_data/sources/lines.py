"""JSON lines: one JSON value per line. Blank lines are no records; memory is one line.

A `.json` file is read the same way, and also as one array of records (which is parsed whole). A byte order mark is
taken away at the start of the file only; CRLF ends a line like LF.
"""

import io
import json
from collections.abc import Iterator
from typing import Any

from lt_data.sources.bytes_in import BUFFER_BYTES
from lt_data.sources.fields import value_of
from lt_data.sources.options import ReadOptions
from lt_data.sources.record import Bad, Damaged, Record, decode, whole

BOM = b"\xef\xbb\xbf"


def read_lines(stream: io.BufferedIOBase, options: ReadOptions, start: int) -> Iterator[Record]:
    """The records of a file of JSON lines; record n stands in line n + 1."""
    number = 0
    for line in _lines(stream):
        number += 1
        if number <= start:
            continue
        if number == 1 and line.startswith(BOM):
            line = line[len(BOM) :]
        if line.isspace() or not line:
            continue
        text = decode(line)
        line = b""  # a document may be big: two copies of it at a time are enough
        value = text if isinstance(text, Bad) else _parse(text)
        text = ""
        yield Record(number, f":{number}", value) if isinstance(value, Bad) else _of(value, options, number)


def _lines(stream: io.BufferedIOBase) -> Iterator[bytes | bytearray]:
    """The lines without their ends, as bytes; a long one grows in place, where readline would hold it twice."""
    begun = bytearray()
    while piece := stream.read(BUFFER_BYTES):
        first, *rest = piece.split(b"\n")
        begun += first
        if rest:
            line, begun = begun, bytearray()
            yield line
            del line
            yield from rest[:-1]
            begun += rest[-1]
    if begun:
        yield begun


def read_json(stream: io.BufferedIOBase, options: ReadOptions, start: int) -> Iterator[Record]:
    """The records of a `.json` file: JSON lines, or one array of records."""
    head = stream.peek(64) if isinstance(stream, io.BufferedReader) else b""
    if not head.removeprefix(BOM).lstrip().startswith(b"["):
        yield from read_lines(stream, options, start)
        return
    content = stream.read()
    text = decode(content.removeprefix(BOM))
    if isinstance(text, Bad):
        raise Damaged(text.message)
    values = _parse(text)
    if isinstance(values, Bad):
        raise Damaged(values.message)
    for number, value in enumerate(values, start=1):
        if number > start:
            yield _of(value, options, number)


def _of(value: Any, options: ReadOptions, number: int) -> Record:
    found, masked = value_of(value, options)
    return Record(number, f":{number}", whole(found) if isinstance(found, str) else found, masked)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:  # ValueError: also of numbers with thousands of digits
        return Bad("broken JSON line", f"not a JSON value: {exc}; correct or remove the line")
