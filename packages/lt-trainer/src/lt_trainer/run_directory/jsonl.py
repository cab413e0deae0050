"""Append-only files of whole lines, JSON and plain text; records as lines.

Non-finite numbers are written as the strings "nan", "inf" and "-inf", since JSON has no portable form for them. A
process killed while writing leaves a last line without its newline: readers skip it, and the next writer removes it.
Cost: one `write` per line, no buffer, no fsync.
"""

import json
import math
import os
import traceback
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from lt_trainer.errors import RunDirError

NON_FINITE = {text: float(text) for text in ("nan", "inf", "-inf")}
TAIL_BYTES = 65536


class LineFile:
    """Unbuffered append-only file, a context: a write that failed on a full disk is not retried on close.

    Raises:
        RunDirError: the file cannot be opened or written, for example because the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as exc:
            raise _io_error("open", path, exc) from exc

    def append(self, text: str) -> None:
        """Append text."""
        data = memoryview(text.encode("utf-8", errors="backslashreplace"))
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as exc:
            raise _io_error("write", self.path, exc) from exc

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close()


class RankLog(LineFile):
    """Log file of one rank in the run directory; on exit, also logs the traceback of an error."""

    def __init__(self, run: Path, rank: int) -> None:
        super().__init__(run / "logs" / f"rank{rank:05}.log")

    def write(self, text: str) -> None:
        """Append lines with UTC timestamps."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.append("".join(f"{now} {line}\n" for line in text.splitlines()))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            with suppress(RunDirError):  # do not mask the original error
                self.write("".join(traceback.format_exception(error)))
        self.close()


class JsonlWriter(LineFile):
    """Append-only JSON-lines file; removes an unfinished line of an earlier process."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(Path(path))
        if self.path.is_file():  # not /dev/full
            os.truncate(path, self.path.read_bytes().rfind(b"\n") + 1)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object."""
        self.append(json.dumps(_to_json(record), allow_nan=False) + "\n")


class JsonlReader:
    """Reader of a JSON-lines file that may grow.

    Raises:
        RunDirError: the file cannot be read, or a complete line is not a JSON object: names the line.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._offset, self._n_lines = path, 0, 0

    def read(self) -> list[dict[str, Any]]:
        """Return the objects of the lines that were completed since the last call."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                data = file.read().rpartition(b"\n")[0]
        except OSError as exc:
            raise RunDirError(f"cannot read {self.path}: {exc.strerror}; pass the folder in run.dir") from exc
        objects = []
        for line in data.split(b"\n") if data else ():
            self._n_lines += 1
            self._offset += len(line) + 1
            try:
                objects.append(dict(json.loads(line, object_hook=_with_numbers).items()))
            except (ValueError, AttributeError) as exc:
                raise RunDirError(f"{self.path}:{self._n_lines}: not a JSON object ({exc}); remove the line") from exc
        return objects


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON-lines file, with "nan", "inf" and "-inf" as numbers.

    Skips a last line without its newline: its writer was killed, or is still writing.

    Raises:
        RunDirError: the file cannot be read, or a complete line is not a JSON object.
    """
    return JsonlReader(Path(path)).read()


def read_last_object(path: Path) -> dict[str, Any]:
    """Read the last complete line of a JSON-lines file; {} if there is none or it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return json.loads(file.read().split(b"\n")[-2])
    except (OSError, ValueError, IndexError):
        return {}


def format_record(record: Mapping[str, Any]) -> str:
    """Format a record as one `key=value` line for people and log scrapers: six significant digits.

    Example:
        >>> format_record({"step": 20, "val_loss": 3.25, "val_tokens": 4096, "elapsed_s": 12.3456789})
        'step=20 val_loss=3.25 val_tokens=4096 elapsed_s=12.3457'
    """
    texts = {name: f"{value:.6g}" if isinstance(value, float) else str(value) for name, value in record.items()}
    texts |= {name: "null" for name, value in record.items() if value is None}
    return " ".join(f"{name}={text}" for name, text in texts.items())


def _io_error(action: str, path: Path, exc: OSError) -> RunDirError:
    return RunDirError(f"cannot {action} {path}: {exc.strerror}; free space or fix its permissions, then rerun")


def _to_json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _to_json(inner) for name, inner in value.items()}
    return [_to_json(inner) for inner in value] if isinstance(value, list | tuple) else value


def _with_numbers(values: dict[str, Any]) -> dict[str, Any]:
    return {name: NON_FINITE.get(value, value) if isinstance(value, str) else value for name, value in values.items()}
