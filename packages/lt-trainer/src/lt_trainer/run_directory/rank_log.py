"""Log file of one rank."""

from __future__ import annotations

import traceback
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from lt_trainer.errors import RunDirError
from lt_trainer.run_directory.jsonl import LogFile


class RankLog:
    """Log file of one rank in the run directory; on exit, also logs the traceback of an error.

    Raises:
        RunDirError: the file cannot be written.
    """

    def __init__(self, run: Path, rank: int) -> None:
        self.path = run / "logs" / f"rank{rank:05}.log"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise RunDirError(
                f"cannot create {self.path.parent}: {exc.strerror}; free space or fix its permissions, then rerun"
            ) from exc
        self._file = LogFile(self.path)

    def write(self, text: str) -> None:
        """Append lines with UTC timestamps."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._file.write("".join(f"{now} {line}\n" for line in text.splitlines()))

    def __enter__(self) -> RankLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            with suppress(RunDirError):  # do not mask the original error
                self.write("".join(traceback.format_exception(error)))
        self._file.close()
