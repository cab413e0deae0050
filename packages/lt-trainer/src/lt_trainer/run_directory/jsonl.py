"""Append-only files of whole lines: JSON lines and plain text.

Non-finite numbers are written as the strings "nan", "inf" and "-inf", since JSON has no portable form for them. A
process killed while writing leaves a last line without its newline: readers skip it, and the next writer removes it.
Cost: one `write` per line, no buffer, no fsync.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lt_trainer.errors import RunDirError
from lt_trainer.files import open_for_appending, open_lock_file, open_regular, parse_json, read_text
from lt_trainer.run_directory.records import record_to_dict


class LogFile:
    """Unbuffered append-only file: a write that failed on a full disk is not retried on close.

    Raises:
        RunDirError: the file cannot be opened or written, for example because the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.fdopen(open_for_appending(path), "ab", buffering=0)
        except OSError as exc:
            raise _io_error("open", path, exc) from exc

    def write(self, text: str) -> None:
        """Append text."""
        data = memoryview(text.encode("utf-8", errors="backslashreplace"))
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as exc:
            raise _io_error("write", self.path, exc) from exc

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError as exc:
            raise _io_error("write", self.path, exc) from exc


class JsonlWriter:
    """Append-only JSON-lines file; removes an unfinished line of an earlier process.

    Raises:
        RunDirError: the file cannot be opened or written, for example because the disk is full.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            _cut_unfinished_line(self.path)
        except OSError as exc:
            raise _io_error("open", self.path, exc) from exc
        self._file = LogFile(self.path)

    def write(self, record: Any) -> None:
        """Append one object."""
        text = json.dumps({name: _json_value(value) for name, value in record_to_dict(record).items()}, allow_nan=False)
        self._file.write(text + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "JsonlWriter":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _io_error(action: str, path: Path, exc: OSError) -> RunDirError:
    return RunDirError(f"cannot {action} {path}: {exc.strerror}; free space or fix its permissions, then rerun")


def _cut_unfinished_line(path: Path) -> None:
    """Remove what follows the last newline: the torn line of a process that was killed while writing."""
    if not path.exists():
        return
    with os.fdopen(open_lock_file(path), "r+b") as file:
        end = file.seek(0, 2)
        tail = b""
        while len(tail) < end and b"\n" not in tail:
            size = min(4096, end - len(tail))
            file.seek(end - len(tail) - size)
            tail = file.read(size) + tail
        keep = end - len(tail) + tail.rfind(b"\n") + 1
        if keep < end:
            file.truncate(keep)


def _json_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _json_value(inner) for name, inner in value.items()}
    return [_json_value(inner) for inner in value] if isinstance(value, list | tuple) else value


NON_FINITE = {text: float(text) for text in ("nan", "inf", "-inf")}


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON-lines file, with "nan", "inf" and "-inf" as numbers.

    Skips a last line without its newline: its writer was killed, or is still writing.

    Raises:
        RunDirError: the file cannot be read, or a complete line is not a JSON object.
    """
    try:
        text = read_text(path, errors="replace")
    except OSError as exc:
        raise RunDirError(f"cannot read {path}: {exc.strerror}; pass the path of a run's JSON-lines file") from exc
    objects = []
    for number, row in enumerate(text.split("\n")[:-1], start=1):
        try:
            values = parse_json(row)
        except ValueError as exc:
            raise RunDirError(f"{path}:{number}: not a JSON object ({exc}); remove the line") from exc
        if not isinstance(values, dict):
            raise RunDirError(f"{path}:{number}: not a JSON object; remove the line")
        objects.append({name: _from_json(value) for name, value in values.items()})
    return objects


def _from_json(value: Any) -> Any:
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {name: _from_json(inner) for name, inner in value.items()}
    return [_from_json(inner) for inner in value] if isinstance(value, list) else value


TAIL_BYTES = 65536
"""Number of bytes at the end of a file that are searched for its last complete line."""


def read_last_object(path: Path) -> dict[str, Any]:
    """Read the last complete line of a JSON-lines file; {} if there is none or it cannot be read."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            rows = file.read().split(b"\n")[:-1]
        values = parse_json(rows[-1]) if rows else {}
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
