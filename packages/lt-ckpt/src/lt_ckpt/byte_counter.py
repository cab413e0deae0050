"""Thread-safe counter of processed bytes that reports progress."""

import threading

from lt_ckpt.files import ProgressCallback


class ByteCounter:
    """Counter of bytes of a known total."""

    def __init__(self, total: int, progress: ProgressCallback | None) -> None:
        self._done, self._total, self._progress = 0, total, progress
        self._lock = threading.Lock()

    def __call__(self, n_bytes: int) -> None:
        """Add `n_bytes`."""
        with self._lock:
            self._done += n_bytes
            if self._progress is not None:
                self._progress(self._done, self._total, "bytes")
