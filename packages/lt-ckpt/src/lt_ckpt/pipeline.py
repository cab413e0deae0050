"""Threads for work that must keep an order: reading ahead of its turn, and lanes whose tasks follow one another.

The disk, numpy's copies and the checksums let go of the interpreter's lock, so that threads are enough. An error in a
task comes out where its result is asked for.

Memory: what the tasks that are under way hold; the callers bound them (`ahead`, and how many futures they leave open).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import repeat
from typing import ParamSpec, TypeVar

from lt_ckpt.files import Progress

T = TypeVar("T")
P = ParamSpec("P")


def in_order(
    pool: Executor, tasks: Iterable[Callable[[], T]], *, ahead: int, sizes: Iterable[int] = repeat(1)
) -> Iterator[T]:
    """Yields the results of tasks in their order, while the pool works on the next ones.

    Args:
        pool: Does the tasks.
        tasks: What to do.
        ahead: As soon as the tasks under way are so large together, the first one's result is waited for.
        sizes: How large each task is: without them `ahead` is a number of tasks.
    """
    waiting: deque[tuple[int, Future[T]]] = deque()
    held = 0
    for task, size in zip(tasks, sizes, strict=False):
        waiting.append((size, pool.submit(task)))
        held += size
        while held >= ahead:
            first, future = waiting.popleft()
            held -= first
            yield future.result()
            del future
    while waiting:
        yield waiting.popleft()[1].result()


class Lanes:
    """Threads that each do their tasks one after the other: a context that leaves no task behind."""

    def __init__(self, n_lanes: int, name: str) -> None:
        self._lanes = [ThreadPoolExecutor(1, thread_name_prefix=name) for _ in range(n_lanes)]

    def submit(self, key: int, task: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Puts a task behind those of the same key."""
        return self._lanes[key % len(self._lanes)].submit(task, *args, **kwargs)

    def stop(self) -> None:
        """Drops the tasks that have not begun and waits for the others."""
        for lane in self._lanes:
            lane.shutdown(wait=False, cancel_futures=True)
        for lane in self._lanes:
            lane.shutdown(wait=True)

    def __enter__(self) -> "Lanes":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def finish(futures: Iterable[Future[None]]) -> None:
    """Waits for tasks; raises the first error, in their order."""
    for future in futures:
        future.result()


class Tally:
    """Adds up the bytes that are done and tells them."""

    def __init__(self, total: int, tell: Progress | None) -> None:
        self._done, self._total, self._tell = 0, total, tell
        self._lock = threading.Lock()

    def __call__(self, n_bytes: int) -> None:
        """So many bytes more; from any thread."""
        with self._lock:
            self._done += n_bytes
            if self._tell is not None:
                self._tell(self._done, self._total, "bytes")
