"""Append-only journal that survives a kill or power failure: one hashed, synced line per record.

A line is the first 16 hex digits of the SHA-256 of the JSON text, a space, the JSON text and a newline. `append`
returns when the line is on disk. An incomplete or broken last line was being written at the failure and is removed when
the journal is opened. A broken line before another line means that the file was damaged later.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.storage import fsync, open_truncated, read_regular, translate_os_errors, write


def encode_record(record: dict[str, Any]) -> bytes:
    """Return the line of a record."""
    content = json.dumps(record, separators=(",", ":")).encode()
    return hashlib.sha256(content).hexdigest()[:16].encode() + b" " + content + b"\n"


def decode_journal(content: bytes, source: str) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a journal and their length in bytes, without a truncated last line.

    Raises:
        DataError: a broken line before the last; the message names `source`.
    """
    records: list[dict[str, Any]] = []
    begin = 0
    while (end := content.find(b"\n", begin) + 1) > 0:
        digest, _, text = content[begin : end - 1].partition(b" ")
        if hashlib.sha256(text).hexdigest()[:16].encode() != digest:
            if end < len(content):
                raise DataError(f"{source}: line {len(records) + 1} is damaged; start over (--no-resume)")
            break
        records.append(strict_json.load_object(text, f"{source}:{len(records) + 1}", "start over (--no-resume)"))
        begin = end
    return records, begin


class Journal:
    """Journal on disk, open for appending; `records` holds its records."""

    def __init__(self, path: Path, *, ignore_damage: bool = False) -> None:
        self._path = path
        with translate_os_errors("open", path):
            content = read_regular(path) if path.exists() else b""
            try:
                self.records, valid = decode_journal(content, str(path))
            except DataError:
                if not ignore_damage:
                    raise
                self.records, valid = [], 0
            self._file = open_truncated(path, valid)
            if valid < len(content):
                fsync(self._file.fileno())

    def append(self, record: dict[str, Any]) -> None:
        """Append a record and sync it."""
        with translate_os_errors("write", self._path):
            write(self._file, encode_record(record))
            self._file.flush()
            fsync(self._file.fileno())
        self.records.append(record)

    def clear(self) -> None:
        """Remove all records."""
        with translate_os_errors("write", self._path):
            self._file.truncate(0)
            self._file.seek(0)
            fsync(self._file.fileno())
        self.records.clear()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
