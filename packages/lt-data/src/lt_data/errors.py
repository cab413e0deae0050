"""The error class for everything that a user can fix, and errors of the system that are of that kind.

The message names the file or field, its value and the remedy. Any other exception that escapes is a bug.
"""

import errno

_PERMISSIONS = "check the owner and the mode of it and of the folders above it"
_OTHER_WRITER = "another process wrote there: choose another place"
_REMEDIES = {
    errno.EACCES: _PERMISSIONS,
    errno.EPERM: _PERMISSIONS,
    errno.ENOSPC: "free some space or write to another disk",
    errno.EDQUOT: "the disk quota is used up: free some space or write to another disk",
    errno.EROFS: "the file system is read-only: choose another place",
    errno.ENOTEMPTY: _OTHER_WRITER,
    errno.EEXIST: _OTHER_WRITER,
    errno.EIO: "the disk reports an error: check it or use another one",
}


class DataError(ValueError):
    """Bad input, bad configuration or a file system error; the message names the cause and the remedy.

    >>> TokenStore("nowhere")
    Traceback (most recent call last):
    lt_data.errors.DataError: cannot read the token store's nowhere/manifest.json: ...
    """

    exit_code: int = 64


def describe_os_error(exc: OSError, path: object = None) -> str:
    """Return `PATH: reason; remedy` of an error of the system; default: the path that it names."""
    reason = exc.strerror or str(exc) or type(exc).__name__
    return f"{exc.filename if path is None else path}: {reason}; {_REMEDIES.get(exc.errno or 0, 'check the path')}"


def describe_unusable_path(exc: Exception) -> str:
    """Return the text for an error of the system that names a path; "" for another error.

    Commands end with it where such an error reaches them.
    """
    return describe_os_error(exc) if isinstance(exc, OSError) and exc.filename is not None else ""
