"""User errors of the package.

`CheckpointError` covers every wrong input, damaged file and full disk; its message names the object, the place and the
remedy. `translate_os_errors` turns an `OSError` at the edge into one, with the original as the cause. Any other
exception that escapes from this package is a bug.
"""

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_REMEDIES = {
    errno.ENOSPC: "free some space on that disk or save to another one",
    errno.EDQUOT: "free some of the quota there or save to another disk",
    errno.EACCES: "check the owner and the mode of that path",
    errno.EPERM: "check the owner and the mode of that path",
    errno.EROFS: "the file system is mounted read-only: remount it or choose another path",
    errno.ENOENT: "check that the path is right and that every machine sees the same shared folder",
    errno.ENOTDIR: "a file exists where a folder is needed: choose another path",
    errno.EEXIST: "a file of that name already exists: choose another path",
    errno.EIO: "the disk or its server failed: check the system log before writing anything else there",
    errno.EMFILE: "too many open files: raise the limit with ulimit -n",
    errno.ESTALE: "the network file system lost that folder: remount it",
    errno.ENAMETOOLONG: "check the path",
    errno.ENOMEM: "there is too little memory: free some, or raise the limit (ulimit -v, or that of the container)",
}


_NO_THREAD = "can't start new thread"
"""Python's own error, which has no class of its own."""


class CheckpointError(ValueError):
    """User error: a damaged checkpoint, a wrong argument, a full disk."""

    exit_code: int = 64


class OptionError(CheckpointError):
    """Options that are wrong or do not fit together.

    Args:
        problem: Problem, as half a sentence; here and in the remedy `{name}` stands for the option of that name.
        values: Values of the options that are shown in front, by name.
        remedy: Remedy.
    """

    def __init__(self, problem: str, *, values: Mapping[str, object] | None = None, remedy: str = "") -> None:
        self.problem, self.values, self.remedy = problem, dict(values or {}), remedy
        super().__init__(self.message({}))

    def message(self, names: Mapping[str, str]) -> str:
        """Return the message with other names for some options, such as flags."""
        known = _Names(names)
        shown = ", ".join(f"{known[name]} = {value!r}" for name, value in self.values.items())
        text = "; ".join(part.format_map(known) for part in (self.problem, self.remedy) if part)
        return f"{shown}: {text}" if shown else text


class _Names(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return name


class AlreadySavedError(CheckpointError):
    """Valid checkpoint of this step that already exists; the caller decides how to handle it.

    Attributes:
        path: The folder of the existing checkpoint.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path}: a valid checkpoint of this step already exists; resume from it, save to another folder, "
            "or commit with overwrite=True"
        )
        self.path = path


class SaveCancelledError(CheckpointError):
    """Save cancelled by its own process because it could no longer succeed."""


def storage_error(exc: OSError, operation: str, path: str | os.PathLike[str]) -> CheckpointError:
    """Make the CheckpointError of an `OSError` raised during `operation` at `path`."""
    reason = exc.strerror or type(exc).__name__
    remedy = _REMEDIES.get(exc.errno or 0, "check the path and its file system")
    return CheckpointError(f"{os.fspath(path)}: {operation} failed: {reason}; {remedy}")


def describe_unusable_path(exc: Exception) -> str:
    """Return the text for a path that may not be looked at or has too long a name; "" for another error.

    Commands end with it where such an error of the system reaches them: any look at a path may raise one, long before
    a reader of the file could name it.
    """
    known = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
    if not isinstance(exc, OSError) or exc.filename is None or exc.errno not in known:
        return ""
    return str(storage_error(exc, "reading", exc.filename))


@contextmanager
def translate_os_errors(operation: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors of the system in the block into a `CheckpointError` with operation, path and remedy."""
    try:
        yield
    except OSError as exc:
        raise storage_error(exc, operation, path) from exc
    except MemoryError as exc:
        raise storage_error(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), operation, path) from exc
    except RuntimeError as exc:
        if str(exc) != _NO_THREAD:
            raise
        raise CheckpointError(
            f"{os.fspath(path)}: {operation} failed: no thread could be started; there is too little memory for its "
            "stack, or there are too many processes: free some, or raise the limit (ulimit -v, ulimit -u)"
        ) from exc
    except UnicodeEncodeError as exc:
        raise CheckpointError(
            f"{os.fspath(path)}: {operation} failed: under this locale file names are {exc.encoding}, which cannot "
            "express this one; set LC_ALL=C.UTF-8"
        ) from exc
