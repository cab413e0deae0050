"""Prefetching of batches in a thread, with a bounded queue.

The thread iterates a stream and puts `transform` of each batch into the queue. The prefetcher's state is that of the
last batch returned, never that of the thread, so saving it neither loses nor repeats a batch. `next` raises an error of
the stream or of `transform` in place of the batch it belongs to, and so does every later `next`.

Cost: memory of `depth` + 1 batches. The thread shares the interpreter with the caller: it runs while the caller waits
for a device, a disk or a network.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, Queue
from types import TracebackType
from typing import Any, Generic, TypeVar, overload

from lt_data.errors import DataError
from lt_data.streaming.stream import Stream, StreamBatch, StreamState

T = TypeVar("T")


@dataclass(frozen=True)
class _PrefetchedItem(Generic[T]):
    value: T
    state: StreamState


@dataclass(frozen=True)
class _PrefetchFailure:
    error: BaseException


class Prefetcher(Generic[T]):
    """Prefetcher of the batches of a stream. Use it as a context manager, or close it.

    Args:
        stream: iterated by the thread; do not use it while the prefetcher is open.
        depth: batches to prefetch, at least 1.
        transform: called in the thread on each batch, such as a conversion or a copy into pinned memory.

    Attributes:
        stream: as given; it is some batches ahead.

    Raises:
        DataError: `depth` is below 1.
    """

    @overload
    def __init__(self: "Prefetcher[StreamBatch]", stream: Stream, *, depth: int = 2) -> None: ...
    @overload
    def __init__(self, stream: Stream, *, depth: int = 2, transform: Callable[[StreamBatch], T]) -> None: ...
    def __init__(
        self, stream: Stream, *, depth: int = 2, transform: Callable[[StreamBatch], Any] | None = None
    ) -> None:
        if depth < 1:
            raise DataError(f"depth = {depth}: at least 1")
        self.stream = stream
        self._transform = transform
        self._depth = depth
        self._state = stream.state
        self._failure: _PrefetchFailure | None = None
        self._thread: threading.Thread | None = None
        self._start()

    @property
    def state(self) -> StreamState:
        """State after the last batch that was returned."""
        return self._state

    def next(self) -> T:
        """Return the next batch, or `transform` of it.

        Raises:
            DataError: the prefetcher is closed.
        """
        if self._failure is not None:
            raise self._failure.error
        if self._thread is None:
            raise DataError("this prefetcher is closed; make a new one for the stream")
        item = self._queue.get()
        if isinstance(item, _PrefetchFailure):
            self._failure = item
            raise item.error
        self._state = item.state
        return item.value

    def skip(self, n_rows: int) -> None:
        """Skip rows after the last batch returned, as `Stream.skip` does; drop the prefetched batches."""
        self._stop()
        self.stream.state = self._state
        self.stream.skip(n_rows)
        self._state = self.stream.state
        self._failure = None
        self._start()

    def close(self) -> None:
        """Stop the thread and reset the stream to after the last batch returned; idempotent."""
        if self._thread is not None:
            self._stop()
            self.stream.state = self._state

    def __enter__(self) -> "Prefetcher[T]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> "Prefetcher[T]":
        return self

    def __next__(self) -> T:
        return self.next()

    def _start(self) -> None:
        # each thread has its own queue and stop event, so that an old one cannot disturb a new one
        self._queue: Queue[_PrefetchedItem[T] | _PrefetchFailure] = Queue(self._depth)
        self._stopping = threading.Event()
        arguments = (self.stream, self._transform, self._queue, self._stopping)
        # daemon: a program that does not close it can still exit
        self._thread = threading.Thread(target=_run_prefetch, args=arguments, name="lt-data prefetch", daemon=True)
        self._thread.start()

    def _stop(self) -> None:
        if self._thread is None:
            return
        self._stopping.set()
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=0.01)  # unblock a thread that waits to put
            except Empty:
                continue
        self._thread.join()
        self._thread = None


def _run_prefetch(
    stream: Stream, transform: Callable[[StreamBatch], Any] | None, queue: "Queue[Any]", stopping: threading.Event
) -> None:
    while not stopping.is_set():
        try:
            batch = stream.next()
            item = _PrefetchedItem(batch if transform is None else transform(batch), batch.state)
        except BaseException as exc:  # noqa: BLE001 - raised again in next()
            queue.put(_PrefetchFailure(exc))
            return
        queue.put(item)
