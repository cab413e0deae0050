"""Adds up bytes for a progress display, from several threads, and is where a transfer can be stopped."""

from collections.abc import Callable
from threading import Lock

from lt_ckpt import files


class Meter:
    """Bytes done of a total.

    Attributes:
        done: Bytes so far.
        total: Bytes in all.
    """

    def __init__(
        self, total: int, progress: files.Progress | None = None, stop: Callable[[], None] = lambda: None
    ) -> None:
        """Begins at none.

        Args:
            total: Bytes in all.
            progress: Told the bytes so far and in all.
            stop: Called with each addition; what it raises comes out of `add`.
        """
        self.done, self.total = 0, total
        self._progress, self._stop, self._lock = progress, stop, Lock()

    def add(self, n_bytes: int) -> None:
        """Adds bytes."""
        self._stop()
        with self._lock:
            self.done += n_bytes
            if self._progress is not None:
                self._progress(self.done, self.total, "bytes")
