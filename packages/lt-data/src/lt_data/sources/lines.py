"""Files of text and of JSON: lines of one value each, one array of values, or one text.

Line ends are LF or CRLF; a byte order mark is removed at the start of a file. Memory: one line, text or array, at most
`max_document_bytes`.
"""

import io
import json
from collections.abc import Iterator
from typing import Any

from lt_data.sources.options import SourceOptions
from lt_data.sources.record import (
    BadRecord,
    SourceRecord,
    check_text,
    decode_utf8,
    make_record,
    too_large,
)

BOM = b"\xef\xbb\xbf"
_SKIPPED_BYTES = 1 << 20


def read_lines(stream: io.BufferedIOBase, options: SourceOptions) -> Iterator[SourceRecord]:
    """Yield the records of JSON lines; blank lines are none, but are counted as lines."""
    limit, number = options.max_document_bytes, 0
    while line := stream.readline(limit + 2):
        number += 1
        content = line.removesuffix(b"\n")
        is_long = len(content) > limit
        while not line.endswith(b"\n") and (line := stream.readline(_SKIPPED_BYTES)):
            is_long = True
        if number == 1:
            content = content.removeprefix(BOM)
        if is_long:
            yield SourceRecord(number, too_large(limit, "line"))
        elif content and not content.isspace():
            yield make_record(_parse(content, "line"), options, number)


def read_json(stream: "io.BufferedReader[Any]", options: SourceOptions) -> Iterator[SourceRecord]:
    """Yield the records of a `.json` file: JSON lines, or one array of records."""
    if not stream.peek(64).removeprefix(BOM).lstrip().startswith(b"["):
        yield from read_lines(stream, options)
        return
    content = read_whole(stream, options.max_document_bytes, "JSON array, which is parsed as a whole,")
    values = content if isinstance(content, BadRecord) else _parse(content.removeprefix(BOM), "array")
    if isinstance(values, BadRecord):
        yield SourceRecord(0, values)
        return
    for number, value in enumerate(values, start=1):
        yield make_record(value, options, number)


def read_text(stream: io.BufferedIOBase, options: SourceOptions) -> Iterator[SourceRecord]:
    """Yield the single record of a text file, unchanged (CRLF, NUL) but for a byte order mark."""
    content = read_whole(stream, options.max_document_bytes, "text")
    text = content if isinstance(content, BadRecord) else decode_utf8(content.removeprefix(BOM))
    yield SourceRecord(0, check_text(text, options.max_document_bytes) if isinstance(text, str) else text)


def read_whole(stream: io.BufferedIOBase, limit: int, what: str) -> bytes | BadRecord:
    """Read a file that is parsed as a whole."""
    content = stream.read(limit + 1)
    return too_large(limit, what) if len(content) > limit else content


def _parse(content: bytes, what: str) -> Any:
    text = decode_utf8(content)
    if isinstance(text, BadRecord):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:  # ValueError also for numbers with thousands of digits
        return BadRecord(f"broken JSON {what}", f"not a JSON value: {exc}; correct or remove the {what}")
