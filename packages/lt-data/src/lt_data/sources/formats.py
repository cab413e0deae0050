"""The table: how a file's name ends → how it is read. A file with another ending is text."""

import io
from collections.abc import Callable, Iterator

from lt_data.sources.bytes_in import PACKED
from lt_data.sources.lines import read_json, read_lines
from lt_data.sources.options import ReadOptions
from lt_data.sources.plain import read_text
from lt_data.sources.record import Record

InOrder = Callable[[io.BufferedIOBase, ReadOptions, int], Iterator[Record]]

_IN_ORDER: dict[str, InOrder] = {".jsonl": read_lines, ".ndjson": read_lines, ".json": read_json}


def reader_of(name: str) -> InOrder:
    """How a file is read that is unpacked already."""
    for packed in PACKED:
        name = name.removesuffix(packed)
    return next((read for suffix, read in _IN_ORDER.items() if name.endswith(suffix)), read_text)
