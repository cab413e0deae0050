"""The error class for everything that a user can fix.

The message names the file or field, its value and the remedy. Any other exception that escapes is a bug.
"""


class DataError(ValueError):
    """Bad input, bad configuration or a file system error; the message names the cause and the remedy."""

    exit_code: int = 64
