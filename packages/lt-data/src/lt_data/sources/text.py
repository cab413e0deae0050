"""Text files: one document per file, unchanged (CRLF, NUL) except for a byte order mark at the start."""

import io
from collections.abc import Iterator

from lt_data.sources.json_lines import BOM
from lt_data.sources.options import ReadOptions
from lt_data.sources.record import SourceRecord, decode_utf8


def read_text(stream: io.BufferedIOBase, options: ReadOptions, start: int) -> Iterator[SourceRecord]:
    """Yield the single record of a text file."""
    if start == 0:
        yield SourceRecord(1, "", decode_utf8(stream.read().removeprefix(BOM)))
