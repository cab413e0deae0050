"""The shape of a progress report: a plain function, so that the library draws nothing by itself.

Called with `(done, total, unit)`; `total` is 0 when it is not known. The command line turns it into bars.
"""

from collections.abc import Callable

Progress = Callable[[int, int, str], None]


def silent(done: int, total: int, unit: str) -> None:
    """The progress report of someone who does not want any."""
