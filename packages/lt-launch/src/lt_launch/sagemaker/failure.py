"""`/opt/ml/output/failure`: its first 1024 characters become the job's FailureReason.

The cause comes first, so that truncation does not remove it. The file is written once, for the first failure.
"""

import os
from pathlib import Path

FAILURE_REASON_LIMIT = 1024


def failure_text(cause: str, lines: list[str]) -> str:
    """Return the cause, followed by as many of the last output lines as fit.

    Args:
        cause: one sentence: rank, host and exit code, or the problem of the input.
        lines: last output lines of the failed rank, oldest first.
    """
    text = cause if len(cause) <= FAILURE_REASON_LIMIT else cause[: FAILURE_REASON_LIMIT - 3] + "..."
    included: list[str] = []
    remaining = FAILURE_REASON_LIMIT - len(text)
    for line in reversed(lines):
        if len(line) + 1 > remaining:
            break
        included.insert(0, line)
        remaining -= len(line) + 1
    return "\n".join([text, *included])


def write_failure(path: Path, text: str) -> bool:
    """Write the file unless it exists or cannot be made; return True if it was written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except OSError:  # the failure itself is printed on standard error, which an error here must not hide
        return False
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return True
