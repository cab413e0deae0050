"""One node seen from the launcher: a process (the agent itself, or ssh to it) that speaks JSON lines.

Nothing here waits: what cannot be written now is kept, what has not come is not there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from lt_launch.answers import is_record

__all__ = ["Channel"]


class Channel:
    """A started process with its two streams and its complaints."""

    def __init__(self, name: str, argv: Sequence[str]) -> None:
        self.name = name
        self.heard = time.monotonic()
        self.open = True
        self.complaints: deque[str] = deque(maxlen=20)
        """The last lines of its standard error."""
        self._waiting, self._partial, self._partial_error = b"", b"", b""
        # A session of its own: Ctrl-C at a terminal would else end it before it could be told what to do.
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)

    @property
    def output(self) -> int:
        """The descriptor that records come from."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    @property
    def waiting(self) -> bool:
        """Whether something is still to be written."""
        return bool(self._waiting)

    def send_message(self, values: Mapping[str, Any]) -> None:
        """A message with its length in front, as `boot` reads it."""
        body = json.dumps(values).encode()
        self._waiting += b"%d\n%s" % (len(body), body)
        self.flush()

    def send(self, values: Mapping[str, Any]) -> None:
        """An order to the agent; beats are left out while others wait."""
        if self._waiting and "beat" in values:
            return
        self._waiting += json.dumps(values).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write what can be written."""
        stream = self.process.stdin
        assert stream is not None
        while self._waiting and not stream.closed:
            try:
                self._waiting = self._waiting[os.write(stream.fileno(), self._waiting) :]
            except BlockingIOError:
                return
            except OSError:  # it is gone; its output says so
                self._waiting = b""

    def read(self) -> list[dict[str, Any]]:
        """The records that have come; `open` is False when no more will."""
        found: list[dict[str, Any]] = []
        self._read_complaints()
        while self.open:
            try:
                data = os.read(self.output, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                self.open = False
                break
            self.heard = time.monotonic()
            *rows, self._partial = (self._partial + data).split(b"\n")
            for row in rows:
                found += self._record(row)
        return found

    def _record(self, row: bytes) -> list[dict[str, Any]]:
        """A record in a line; what a login shell prints on its own is kept as a complaint."""
        try:
            values = json.loads(row)
        except (ValueError, RecursionError):
            values = None
        if is_record(values):
            return [values]
        self.complaints.append(row.decode("utf-8", "replace"))
        return []

    def _read_complaints(self) -> None:
        stream = self.process.stderr
        assert stream is not None
        with suppress(BlockingIOError):
            while not stream.closed:
                data = os.read(stream.fileno(), 1 << 16)
                if not data:
                    stream.close()
                    return
                *rows, self._partial_error = (self._partial_error + data).split(b"\n")
                self.complaints.extend(row.decode("utf-8", "replace") for row in rows if row.strip())

    def close(self, timeout_s: float = 2.0) -> int:
        """End the process if it still runs, and bury it; its exit code."""
        stream = self.process.stdin
        if stream is not None and not stream.closed:
            with suppress(OSError):
                stream.close()
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            code = self.process.wait()
        self.read()
        self.open = False
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None and not stream.closed:
                stream.close()
        return code
