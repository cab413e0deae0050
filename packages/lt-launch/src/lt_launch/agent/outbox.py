"""Standard output of an agent: written by a thread, so that a reader who has stopped reading never stops training.

Lines of processes are dropped while more than a mebibyte waits (their log files have them); records never are.
"""

from __future__ import annotations

import os
import threading
from collections import deque

ROOM = 1 << 20


class Outbox:
    """Lines on their way to a file descriptor."""

    def __init__(self, descriptor: int = 1) -> None:
        self._descriptor, self._size = descriptor, 0
        self._waiting: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._closed = self._broken = False
        self.dropped = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to write: not before all processes were forked, for a fork with threads around is a risk."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, daemon=True)
            self._thread.start()

    def put(self, data: bytes, *, may_drop: bool) -> None:
        """Hand over whole lines; never waits."""
        with self._changed:
            if self._broken or (may_drop and self._size > ROOM):
                self.dropped += 1
                return
            self._waiting.append(data)
            self._size += len(data)
            self._changed.notify()

    def close(self, timeout_s: float = 5.0) -> None:
        """Wait until all is written, but not for ever."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self.start()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                data = b"".join(self._waiting)
                self._waiting.clear()
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(self._descriptor, view) :]
            except OSError:
                with self._changed:
                    self._broken = True
                    self._waiting.clear()
                return
            with self._changed:
                self._size -= len(data)
