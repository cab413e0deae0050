"""JSON lines: one JSON value per line. Blank lines are no records; memory is one line.

A `.json` file is read the same way, and also as one array of records (which is parsed whole). A byte order mark is
taken away at the start of the file only; CRLF ends a line like LF.
"""

import io
import json
from collections.abc import Iterator
from typing import Any

from lt_data.sources.fields import text_of_json, value_of
from lt_data.sources.options import ReadOptions
from lt_data.sources.record import Bad, Damaged, Record, decode

BOM = b"\xef\xbb\xbf"


def read_lines(stream: io.BufferedIOBase, options: ReadOptions, start: int) -> Iterator[Record]:
    """The records of a file of JSON lines; record n stands in line n + 1."""
    for number, line in enumerate(stream):
        if number < start:
            continue
        if number == 0 and line.startswith(BOM):
            line = line[len(BOM) :]
        if line.strip():
            yield _record(line, options, number + 1)


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
    for number, value in enumerate(values):
        if number >= start:
            yield _of(value, content, options, number + 1)


def _record(line: bytes, options: ReadOptions, following: int) -> Record:
    text = decode(line)
    value = text if isinstance(text, Bad) else _parse(text)
    if isinstance(value, Bad):
        return Record(following, f":{following}", value)
    return _of(value, line, options, following)


def _of(value: Any, content: bytes, options: ReadOptions, following: int) -> Record:
    found, masked = value_of(value, options)
    if isinstance(found, str):
        found = text_of_json(found, content)
    return Record(following, f":{following}", found, masked)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:  # ValueError: also of numbers with thousands of digits
        return Bad("broken JSON line", f"not a JSON value: {exc}; correct or remove the line")
