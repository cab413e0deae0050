"""Threads of a transfer, and the count of what they have done."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from lt_data.progress import Progress


class Meter:
    """Adds up bytes from several threads for a progress report; what is sent twice counts once."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._done, self._total, self._progress, self._lock = 0, total, progress, threading.Lock()

    def add(self, n_bytes: int) -> None:
        """Count bytes."""
        with self._lock:
            self._done = min(self._done + n_bytes, self._total)
            self._progress(self._done, self._total, "bytes")


@contextmanager
def pool_of(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Threads; after an error what has not begun is not begun any more."""
    pool = ThreadPoolExecutor(threads)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=True, cancel_futures=True)
        raise
    pool.shutdown()
