"""Batches made ahead in a thread, at most so many at a time.

The thread walks a stream and puts what `work` makes of each batch into a bounded queue. What the prefetcher reports as
its state is that of the last batch handed out, never that of the thread, so saving it loses and repeats nothing. An
error of the stream or of `work` comes out of `next` in the place of the batch that it belongs to, and of every `next`
after it.

Cost: memory of `depth` + 1 batches. The thread shares the interpreter with the caller: it works while that waits for a
device, a disk or a network.
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
class _Made(Generic[T]):
    value: T
    state: StreamState


@dataclass(frozen=True)
class _Failed:
    error: BaseException


class Prefetcher(Generic[T]):
    """Makes the next batches of a stream ahead. Use it as a context manager, or close it.

    Args:
        stream: is walked by the thread: use only the prefetcher from here on.
        depth: batches made ahead, at least 1.
        work: runs in the thread on each batch, such as widening it or copying it into pinned memory.

    Attributes:
        stream: as given; it stands some batches ahead.

    Raises:
        DataError: `depth` is below 1.
    """

    @overload
    def __init__(self: "Prefetcher[StreamBatch]", stream: Stream, *, depth: int = 2) -> None: ...
    @overload
    def __init__(self, stream: Stream, *, depth: int = 2, work: Callable[[StreamBatch], T]) -> None: ...
    def __init__(self, stream: Stream, *, depth: int = 2, work: Callable[[StreamBatch], Any] | None = None) -> None:
        if depth < 1:
            raise DataError(f"depth={depth}: at least 1")
        self.stream = stream
        self._work = work
        self._depth = depth
        self._state = stream.state
        self._failed: _Failed | None = None
        self._thread: threading.Thread | None = None
        self._start()

    @property
    def state(self) -> StreamState:
        """After the last batch that was handed out."""
        return self._state

    def next(self) -> T:
        """The next batch, or what `work` made of it.

        Raises:
            DataError: the prefetcher is closed.
        """
        if self._failed is not None:
            raise self._failed.error
        if self._thread is None:
            raise DataError("this prefetcher is closed; make a new one over the stream")
        made = self._queue.get()
        if isinstance(made, _Failed):
            self._failed = made
            raise made.error
        self._state = made.state
        return made.value

    def skip(self, n_rows: int) -> None:
        """Jump over the rows behind the last batch handed out, as `Stream.skip` does; what was made ahead is lost."""
        self._stop()
        self.stream.state = self._state
        self.stream.skip(n_rows)
        self._state = self.stream.state
        self._failed = None
        self._start()

    def close(self) -> None:
        """End the thread and put the stream back behind the last batch that was handed out. May be called twice."""
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
        # Each thread has its own queue and its own word to stop, so that an old one can never disturb a new one.
        self._queue: Queue[_Made[T] | _Failed] = Queue(self._depth)
        self._stopping = threading.Event()
        arguments = (self.stream, self._work, self._queue, self._stopping)
        # A daemon: a program that forgets to close it can still end.
        self._thread = threading.Thread(target=_make, args=arguments, name="lt-data prefetch", daemon=True)
        self._thread.start()

    def _stop(self) -> None:
        if self._thread is None:
            return
        self._stopping.set()
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=0.01)  # makes room for a thread that waits to put
            except Empty:
                continue
        self._thread.join()
        self._thread = None


def _make(
    stream: Stream, work: Callable[[StreamBatch], Any] | None, queue: "Queue[Any]", stopping: threading.Event
) -> None:
    while not stopping.is_set():
        try:
            batch = stream.next()
            made = _Made(batch if work is None else work(batch), batch.state)
        except BaseException as exc:  # noqa: BLE001 - raised again where the batch is asked for
            queue.put(_Failed(exc))
            return
        queue.put(made)
