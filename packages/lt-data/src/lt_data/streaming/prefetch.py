"""Prefetching of batches in a thread: a few are always being made ahead.

The thread takes batches from a stream and applies `transform`. The prefetcher's state is that of the last batch
returned, never that of the thread, so saving it neither loses nor repeats a batch. `next` raises an error of the stream
or of `transform` in place of the batch it belongs to, and so does every later `next`.

Cost: memory of `depth` batches. The thread shares the interpreter with the caller: it runs while the caller waits for a
device, a disk or a network.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Self, TypeVar

from lt_data.errors import DataError
from lt_data.streaming.stream import Stream, StreamBatch, StreamState

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Prefetcher of the batches of a stream. Use it as a context manager, or close it.

    Args:
        stream: its batches are taken by the thread; do not use it while the prefetcher is open.
        transform: called in the thread on each batch, such as a conversion or a copy into pinned memory. It reads the
            rows that it asks for (`StreamBatch.tokens` or `read`).
        depth: batches to prefetch, at least 1.

    Attributes:
        stream: as given; it is some batches ahead.
        state: state after the last batch that was returned.

    Raises:
        DataError: `depth` is below 1.
    """

    def __init__(self, stream: Stream, transform: Callable[[StreamBatch], T], *, depth: int = 2) -> None:
        if depth < 1:
            raise DataError(f"depth = {depth}: at least 1")
        self.stream = stream
        self.state = stream.state
        self._transform = transform
        self._is_closed = False
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="lt-data prefetch")
        self._made: deque[Future[tuple[T, StreamState]]] = deque(
            self._executor.submit(self._make) for _ in range(depth)
        )

    def _make(self) -> tuple[T, StreamState]:
        batch = self.stream.take()
        return self._transform(batch), batch.state

    def next(self) -> T:
        """Return `transform` of the next batch.

        Raises:
            DataError: the prefetcher is closed.
        """
        if self._is_closed:
            raise DataError("this prefetcher is closed; make a new one for the stream")
        value, self.state = self._made[0].result()  # a failed one stays the first
        self._made.popleft()
        self._made.append(self._executor.submit(self._make))
        return value

    def close(self) -> None:
        """Stop the thread and reset the stream to after the last batch returned; idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._executor.shutdown(cancel_futures=True)
            self.stream.state = self.state

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        return self.next()
