"""Text files: a file is one document, kept as it is (CRLF, NUL and all) but for a byte order mark at its start."""

import io
from collections.abc import Iterator

from lt_data.sources.lines import BOM
from lt_data.sources.options import ReadOptions
from lt_data.sources.record import Record, decode


def read_text(stream: io.BufferedIOBase, options: ReadOptions, start: int) -> Iterator[Record]:
    """The one record of a text file."""
    if start == 0:
        yield Record(1, "", decode(stream.read().removeprefix(BOM)))
