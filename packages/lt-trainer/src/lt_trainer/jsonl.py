"""Files that grow by whole lines: JSON objects one a line, and plain text.

A number that is not finite is written as the string "nan", "inf" or "-inf", since JSON has no other way that every
reader takes. Whoever was killed while writing leaves a last line without its newline: readers leave it out, and the
next writer cuts it off. Cost: one `write` per line, no buffer, no fsync.
"""

import json
import math
from pathlib import Path
from typing import Any

from lt_trainer.errors import RunDirError
from lt_trainer.records import as_dict

__all__ = ["JsonlSink", "LogFile", "last_object", "read_jsonl"]


class LogFile:
    """A file that is appended to, unbuffered: what a full disk did not take is not tried again when it is closed.

    Raises:
        RunDirError: the file cannot be opened or written, for example because the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as exc:
            raise _cannot("open", path, exc) from exc

    def write(self, text: str) -> None:
        """Append text."""
        data = memoryview(text.encode("utf-8", errors="backslashreplace"))
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as exc:
            raise _cannot("write", self.path, exc) from exc

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError as exc:
            raise _cannot("write", self.path, exc) from exc


class JsonlSink:
    """One JSON object per line, appended to a file; a line that an earlier process left unfinished is cut off first.

    Raises:
        RunDirError: the file cannot be opened or written, for example because the disk is full.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            _cut_unfinished_line(self.path)
        except OSError as exc:
            raise _cannot("open", self.path, exc) from exc
        self._file = LogFile(self.path)

    def write(self, record: Any) -> None:
        """Append one object."""
        text = json.dumps({name: _json_value(value) for name, value in as_dict(record).items()}, allow_nan=False)
        self._file.write(text + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "JsonlSink":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _cannot(action: str, path: Path, exc: OSError) -> RunDirError:
    return RunDirError(f"cannot {action} {path}: {exc.strerror}; free space or mend its permissions, then start again")


def _cut_unfinished_line(path: Path) -> None:
    """Cut off what follows the last newline: the torn line of a process that was killed while writing it."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
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
    return value


NOT_FINITE = {text: float(text) for text in ("nan", "inf", "-inf")}


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, with "nan", "inf" and "-inf" as numbers again.

    A last line without its newline is left out: its writer was stopped in the middle, or is still at it.

    Raises:
        RunDirError: the file cannot be read, or a finished line is not a JSON object.
    """
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as exc:
        raise RunDirError(f"cannot read {path}: {exc.strerror}; give the path of a run's JSON-lines file") from exc
    found = []
    for number, row in enumerate(text.split("\n")[:-1], start=1):
        try:
            values = json.loads(row)
        except ValueError as exc:
            raise RunDirError(f"{path}:{number}: not a JSON object ({exc}); remove the line") from exc
        if not isinstance(values, dict):
            raise RunDirError(f"{path}:{number}: not a JSON object; remove the line")
        found.append({name: NOT_FINITE.get(v, v) if isinstance(v, str) else v for name, v in values.items()})
    return found


TAIL = 65536
"""Bytes at the end of a file in which its last finished line is looked for."""


def last_object(path: Path) -> dict[str, Any]:
    """The last finished line of a JSON-lines file; empty where there is none that can be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL))
            rows = file.read().split(b"\n")[:-1]
        values = json.loads(rows[-1]) if rows else {}
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
