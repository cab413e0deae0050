"""`/opt/ml/output/failure`: its first 1024 characters become the job's FailureReason.

The cause comes first, so that it is not what is cut off. The file is written once: what failed first is why it failed.
"""

import os
from pathlib import Path

__all__ = ["LIMIT", "failure_text", "write_failure"]

LIMIT = 1024


def failure_text(cause: str, lines: list[str]) -> str:
    """The cause, then as many of the last lines of output as fit.

    Args:
        cause: one sentence: rank, host, exit code, or what is wrong with the input.
        lines: the end of the failed rank's output, oldest first.
    """
    text = cause if len(cause) <= LIMIT else cause[: LIMIT - 3] + "..."
    kept: list[str] = []
    room = LIMIT - len(text)
    for line in reversed(lines):
        if len(line) + 1 > room:
            break
        kept.insert(0, line)
        room -= len(line) + 1
    return "\n".join([text, *kept])


def write_failure(path: Path, text: str) -> bool:
    """Write the file unless there is one; returns whether it was written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return True
