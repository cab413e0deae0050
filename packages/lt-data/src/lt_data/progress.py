"""Progress callback type: a plain function, so that the library itself prints nothing.

Called with `(done, total, unit)`; `total` is 0 when unknown. The command line draws progress bars from it.
"""

from collections.abc import Callable

Progress = Callable[[int, int, str], None]


def no_progress(done: int, total: int, unit: str) -> None:
    """Ignore progress reports."""
