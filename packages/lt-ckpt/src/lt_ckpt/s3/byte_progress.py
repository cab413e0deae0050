"""Thread-safe byte progress that can stop a transfer."""

from collections.abc import Callable
from threading import Lock

from lt_ckpt import files


class ByteProgress:
    """Bytes done of a total.

    Attributes:
        done: Bytes so far.
        total: Bytes in all.
    """

    def __init__(
        self, total: int, progress: files.ProgressCallback | None = None, check_stop: Callable[[], None] = lambda: None
    ) -> None:
        """Start at zero.

        Args:
            total: Bytes in all.
            progress: Called with the bytes so far and in all.
            check_stop: Called with each addition; `add` raises what it raises.
        """
        self.done, self.total = 0, total
        self._progress, self._check_stop, self._lock = progress, check_stop, Lock()

    def add(self, n_bytes: int) -> None:
        """Add bytes."""
        self._check_stop()
        with self._lock:
            self.done += n_bytes
            if self._progress is not None:
                self._progress(self.done, self.total, "bytes")
