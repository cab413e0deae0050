"""The errors that a person can act on.

`CheckpointError` is every wrong input, broken file and full disk; its message names what, where and the remedy.
`storage` turns an `OSError` at the edge into one, with the original kept as the cause. Anything else that escapes from
this package is a bug.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_REMEDIES = {
    errno.ENOSPC: "free some space on that disk or save to another one",
    errno.EDQUOT: "free some of the quota there or save to another disk",
    errno.EACCES: "check the owner and the mode of that path",
    errno.EPERM: "check the owner and the mode of that path",
    errno.EROFS: "the file system is mounted read-only: remount it or choose another path",
    errno.ENOENT: "check that the path is right and that every machine sees the same shared folder",
    errno.ENOTDIR: "a file stands where a folder is needed: choose another path",
    errno.EEXIST: "a file of that name is there already: choose another path",
    errno.EIO: "the disk or its server failed: look at the system log before anything else is written there",
    errno.EMFILE: "too many open files: raise the limit with ulimit -n",
    errno.ESTALE: "the network file system lost that folder: remount it",
}


class CheckpointError(ValueError):
    """Something that the user can put right: a broken checkpoint, a wrong argument, a full disk."""

    exit_code: int = 64


class AlreadySavedError(CheckpointError):
    """A valid checkpoint of this step stands there already; the caller decides what that means.

    Attributes:
        path: The folder of the checkpoint that is there.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path}: a valid checkpoint of this step is there already; resume from it, save to another folder, "
            "or commit with replace=True"
        )
        self.path = path


class GivenUpError(CheckpointError):
    """A save that its own process has given up, because it could not succeed any more."""


def storage_error(exc: OSError, doing: str, path: str | os.PathLike[str]) -> CheckpointError:
    """Makes the error message for an `OSError` met while `doing` something at `path`."""
    reason = exc.strerror or type(exc).__name__
    remedy = _REMEDIES.get(exc.errno or 0, "check the path and its file system")
    return CheckpointError(f"{os.fspath(path)}: {doing} failed: {reason}; {remedy}")


@contextmanager
def storage(doing: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns an `OSError` in the block into a `CheckpointError` that says what was done, where, and the remedy."""
    try:
        yield
    except OSError as exc:
        raise storage_error(exc, doing, path) from exc
    except UnicodeEncodeError as exc:
        raise CheckpointError(
            f"{os.fspath(path)}: {doing} failed: under this locale file names are {exc.encoding}, which cannot express "
            "this one; set LC_ALL=C.UTF-8"
        ) from exc
