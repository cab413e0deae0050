"""The one error that this package raises for what a person can put right.

Its message names the file or field, the value found and the remedy. Anything else that escapes is a defect of ours.
"""


class DataError(ValueError):
    """Bad input, bad configuration or a file system that refuses: the message says which, and what to do."""

    exit_code: int = 64
