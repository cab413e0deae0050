"""A list of records that only grows and survives a kill or a power cut at any moment: one line each, hashed and synced.

A line is the first 16 hex digits of the SHA-256 of the JSON text, a space, the JSON text, a line end. `append` returns
when the line is on the disk. A last line that is cut off or broken was being written when the end came: it is taken
away when the journal is opened. A broken line with another one after it means that the file was damaged later.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from lt_data.errors import DataError
from lt_data.storage import fsync, open_at, os_errors, write


def encode_record(record: dict[str, Any]) -> bytes:
    """The line of a record."""
    content = json.dumps(record, separators=(",", ":")).encode()
    return hashlib.sha256(content).hexdigest()[:16].encode() + b" " + content + b"\n"


def decode_journal(content: bytes, source: str) -> tuple[list[dict[str, Any]], int]:
    """The records of a journal, and the bytes that they take; what follows those is a last line that was cut off.

    Raises:
        DataError: a broken line that is not the last one; `source` is named.
    """
    records: list[dict[str, Any]] = []
    begin = 0
    while (end := content.find(b"\n", begin) + 1) > 0:
        digest, _, text = content[begin : end - 1].partition(b" ")
        if hashlib.sha256(text).hexdigest()[:16].encode() != digest:
            if end < len(content):
                raise DataError(f"{source}: line {len(records) + 1} is damaged; start afresh (--fresh)")
            break
        records.append(json.loads(text))
        begin = end
    return records, begin


class Journal:
    """A journal on disk, open for appending. `records` are those that were in it."""

    def __init__(self, path: Path, *, even_damaged: bool = False) -> None:
        self._path = path
        with os_errors("open", path):
            content = path.read_bytes() if path.exists() else b""
            try:
                self.records, valid = decode_journal(content, str(path))
            except DataError:
                if not even_damaged:
                    raise
                self.records, valid = [], 0
            self._file = open_at(path, valid)
            if valid < len(content):
                fsync(self._file.fileno())

    def append(self, record: dict[str, Any]) -> None:
        """Add a record and wait until it is on the disk."""
        with os_errors("write", self._path):
            write(self._file, encode_record(record))
            self._file.flush()
            fsync(self._file.fileno())
        self.records.append(record)

    def clear(self) -> None:
        """Take all records away."""
        with os_errors("write", self._path):
            self._file.truncate(0)
            self._file.seek(0)
            fsync(self._file.fileno())
        self.records.clear()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
