"""The error class for everything that a user can fix, and errors of the system that are of that kind.

The message names the file or field, its value and the remedy. Any other exception that escapes is a bug.
"""

import errno

_REMEDIES_OF_PATHS = {
    errno.EACCES: "check the owner and the mode of it and of the folders above it",
    errno.EPERM: "check the owner and the mode of it and of the folders above it",
    errno.ENAMETOOLONG: "check the path",
}


class DataError(ValueError):
    """Bad input, bad configuration or a file system error; the message names the cause and the remedy."""

    exit_code: int = 64


def describe_unusable_path(exc: Exception) -> str:
    """Return the text for a path that may not be looked at or has too long a name; "" for another error.

    Commands end with it where such an error of the system reaches them: any look at a path may raise one, long before
    a reader of the file could name it.
    """
    if not isinstance(exc, OSError) or exc.filename is None or exc.errno not in _REMEDIES_OF_PATHS:
        return ""
    return f"{exc.filename}: {exc.strerror}; {_REMEDIES_OF_PATHS[exc.errno]}"
