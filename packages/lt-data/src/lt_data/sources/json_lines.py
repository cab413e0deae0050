"""JSON lines: one JSON value per line, without blank lines.

Memory: one line, at most `max_document_bytes`.

A `.json` file is read the same way, or as one array of records (parsed as a whole). A byte order mark is removed only
at the start of the file; lines end with LF or CRLF.
"""

import io
import json
from collections.abc import Iterator
from typing import Any

from lt_data.sources.fields import extract_value
from lt_data.sources.hashing_reader import BUFFER_BYTES
from lt_data.sources.options import SourceOptions
from lt_data.sources.record import BadRecord, DamagedFileError, SourceRecord, check_surrogates, decode_utf8, too_large

BOM = b"\xef\xbb\xbf"


def read_jsonl(
    stream: io.BufferedIOBase, options: SourceOptions, start: int, *, has_first: bool = True
) -> Iterator[SourceRecord]:
    """Yield the records of JSON lines; record n is line n + 1, the file's if `has_first`."""
    number = 0
    limit = options.max_document_bytes
    for line in _split_lines(stream, limit):
        number += 1
        if number <= start:
            continue
        if number == 1 and has_first and line.startswith(BOM):
            line = line[len(BOM) :]
        if line.isspace() or not line:
            continue
        text = too_large(limit, "line") if len(line) > limit else decode_utf8(line)
        line = b""  # free it: a document may be large
        value = text if isinstance(text, BadRecord) else _parse_json(text)
        text = ""
        yield (
            SourceRecord(number, number, value)
            if isinstance(value, BadRecord)
            else _make_record(value, options, number)
        )


def _split_lines(stream: io.BufferedIOBase, limit: int) -> Iterator[bytes | bytearray]:
    """Yield the lines without line ends, truncated after `limit` + 1 bytes or later.

    A long line grows in place, while readline would copy it.
    """
    partial = bytearray()
    while piece := _read_piece(stream):
        first, *rest = piece.split(b"\n")
        if len(partial) <= limit:
            partial += first
        if rest:
            line, partial = partial, bytearray()
            yield line
            del line
            yield from rest[:-1]
            partial += rest[-1]
    if partial:
        yield partial


def _read_piece(stream: io.BufferedIOBase) -> bytes:
    # read1, since read loses what it has read when an error follows
    try:
        return stream.read1(BUFFER_BYTES)
    except DamagedFileError as exc:
        exc.lost_records = exc.lost_lines
        raise


def read_whole(stream: io.BufferedIOBase, limit: int, what: str) -> bytearray | BadRecord:
    """Read a file that is parsed as a whole."""
    content = bytearray()
    while piece := stream.read1(BUFFER_BYTES):
        content += piece
        if len(content) > limit:
            return too_large(limit, what)
    return content


def remove_bom(content: bytearray) -> bytearray:
    """Remove a byte order mark at the start, in place."""
    if content.startswith(BOM):
        del content[: len(BOM)]
    return content


def read_json(stream: io.BufferedIOBase, options: SourceOptions, start: int) -> Iterator[SourceRecord]:
    """Yield the records of a `.json` file: JSON lines, or one array of records."""
    head = stream.peek(64) if isinstance(stream, io.BufferedReader) else b""
    if not head.removeprefix(BOM).lstrip().startswith(b"["):
        yield from read_jsonl(stream, options, start)
        return
    content = read_whole(stream, options.max_document_bytes, "JSON array, which is parsed as a whole,")
    if isinstance(content, BadRecord):
        if start == 0:
            yield SourceRecord(1, 0, content)
        return
    text = decode_utf8(remove_bom(content))
    if isinstance(text, BadRecord):
        raise DamagedFileError(text.message)
    values = _parse_json(text)
    if isinstance(values, BadRecord):
        raise DamagedFileError(values.message)
    for number, value in enumerate(values, start=1):
        if number > start:
            yield _make_record(value, options, number)


def _make_record(value: Any, options: SourceOptions, number: int) -> SourceRecord:
    fields = value if options.keep_fields and isinstance(value, dict) else None
    value, masked = extract_value(value, options)
    value = check_surrogates(value) if isinstance(value, str) else value
    return SourceRecord(number, number, value, masked, fields)


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:  # ValueError also for numbers with thousands of digits
        return BadRecord("broken JSON line", f"not a JSON value: {exc}; correct or remove the line")
