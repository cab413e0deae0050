"""User errors of the package.

`CheckpointError` covers every wrong input, damaged file and full disk; its message names the object, the place and the
problem. `translate_os_errors` turns an `OSError` at the edge into one, with the original as the cause. Any other
exception that escapes from this package is a bug.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager


class CheckpointError(ValueError):
    """User error: a damaged checkpoint, a wrong argument, a full disk."""

    exit_code: int = 64


class SaveCancelledError(CheckpointError):
    """Save cancelled by its own process because it could no longer succeed."""


def storage_error(exc: OSError, operation: str, path: str | os.PathLike[str]) -> CheckpointError:
    """Make the CheckpointError of an `OSError` raised during `operation` at `path`."""
    return CheckpointError(f"{os.fspath(path)}: {operation} failed: {exc.strerror or exc}")


@contextmanager
def translate_os_errors(operation: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors of the system in the block into a `CheckpointError` with operation and path."""
    try:
        yield
    except OSError as exc:
        raise storage_error(exc, operation, path) from exc
