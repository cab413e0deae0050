"""Work in threads, and the count of the bytes that it has done.

Threads help because reading, writing, hashing and casting release the interpreter lock.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lt_ckpt.files import ProgressCallback

T = TypeVar("T")

THREADS = 4


def iter_in_threads(task: Callable[..., T], arguments: Iterable[tuple[object, ...]]) -> Iterator[T]:
    """Run a task for each arguments in threads and yield what they return, in order.

    After an error, of a task or of the caller, no further one begins.
    """
    with ThreadPoolExecutor(THREADS, "lt-ckpt") as pool:
        try:
            for future in [pool.submit(task, *item) for item in arguments]:
                yield future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class ByteCounter:
    """Thread-safe counter of bytes of a known total, which reports progress."""

    def __init__(self, total: int, progress: ProgressCallback | None) -> None:
        self._done, self._total, self._progress = 0, total, progress
        self._lock = threading.Lock()

    def __call__(self, n_bytes: int) -> None:
        """Add `n_bytes`."""
        with self._lock:
            self._done += n_bytes
            if self._progress is not None:
                self._progress(self._done, self._total, "bytes")
