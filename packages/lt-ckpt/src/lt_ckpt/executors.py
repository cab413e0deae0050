"""Thread executors that keep an order: results in task order, and tasks of one key one after another.

Disk access, numpy copies and checksums release the interpreter lock, so threads suffice. A task's error is raised where
its result is requested.

Memory: what the tasks in flight hold; the callers bound it (`max_in_flight`, and the number of unfinished futures).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import repeat
from typing import ParamSpec, TypeVar

from lt_ckpt.files import ProgressCallback

T = TypeVar("T")
P = ParamSpec("P")


def iter_in_order(
    pool: Executor, tasks: Iterable[Callable[[], T]], *, max_in_flight: int, sizes: Iterable[int] = repeat(1)
) -> Iterator[T]:
    """Yield the results of tasks in their order, while the pool works on the next ones.

    Args:
        pool: Executes the tasks.
        tasks: The tasks.
        max_in_flight: Wait for the first result once the sizes of the tasks in flight add up to this.
        sizes: Size of each task; by default 1, so that `max_in_flight` is a number of tasks.
    """
    waiting: deque[tuple[int, Future[T]]] = deque()
    in_flight = 0
    for task, size in zip(tasks, sizes, strict=False):
        waiting.append((size, pool.submit(task)))
        in_flight += size
        while in_flight >= max_in_flight:
            first, future = waiting.popleft()
            in_flight -= first
            yield future.result()
            del future
    while waiting:
        yield waiting.popleft()[1].result()


class KeyedExecutor:
    """Executor that runs the tasks of one key one after another; a context that leaves no task running."""

    def __init__(self, n_workers: int, name: str) -> None:
        self._executors = [ThreadPoolExecutor(1, thread_name_prefix=name) for _ in range(n_workers)]

    def submit(self, key: int, task: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a task behind those of the same key."""
        return self._executors[key % len(self._executors)].submit(task, *args, **kwargs)

    def shutdown(self) -> None:
        """Cancel the tasks that have not begun and wait for the others."""
        for executor in self._executors:
            executor.shutdown(wait=False, cancel_futures=True)
        for executor in self._executors:
            executor.shutdown(wait=True)

    def __enter__(self) -> "KeyedExecutor":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def wait_all(futures: Iterable[Future[None]]) -> None:
    """Wait for tasks; raise the first error in task order."""
    for future in futures:
        future.result()


class ByteCounter:
    """Thread-safe counter of processed bytes that reports progress."""

    def __init__(self, total: int, progress: ProgressCallback | None) -> None:
        self._done, self._total, self._progress = 0, total, progress
        self._lock = threading.Lock()

    def __call__(self, n_bytes: int) -> None:
        """Add `n_bytes`."""
        with self._lock:
            self._done += n_bytes
            if self._progress is not None:
                self._progress(self._done, self._total, "bytes")
