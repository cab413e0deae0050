"""Text files: one document per file, unchanged (CRLF, NUL) except for a byte order mark at the start."""

import io
from collections.abc import Iterator

from lt_data.sources.json_lines import read_whole, remove_bom
from lt_data.sources.options import SourceOptions
from lt_data.sources.record import BadRecord, SourceRecord, decode_utf8


def read_text(stream: io.BufferedIOBase, options: SourceOptions, start: int) -> Iterator[SourceRecord]:
    """Yield the single record of a text file."""
    if start == 0:
        content = read_whole(stream, options.max_document_bytes, "text")
        yield SourceRecord(1, 0, content if isinstance(content, BadRecord) else decode_utf8(remove_bom(content)))
