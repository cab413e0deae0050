"""Callback types for progress and notices: plain functions, so that the library itself prints nothing.

Progress is called with `(done, total, unit)`; `total` is 0 when unknown. The command line draws progress bars from it.
"""

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
NoticeCallback = Callable[[str], None]


def no_progress(done: int, total: int, unit: str) -> None:
    """Ignore progress reports."""


def no_notice(message: str) -> None:
    """Ignore notices."""
