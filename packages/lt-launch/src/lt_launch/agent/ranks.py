"""The processes of one node: started, listened to, signalled, and buried with their exit codes.

Each is the head of a session of its own. A signal goes to all of its process group; when the head has ended, what is
left of the group is killed while the head is still unburied, so that the group's number cannot mean anybody else. The
kernel kills the head when the agent dies (PR_SET_PDEATHSIG, Linux).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from .policy import log_file

TAIL = 30
"""Lines that are kept of each process, for the report of a failure."""
PR_SET_PDEATHSIG = 1
Show = Callable[[int, bytes], None]


def dies_with_parent() -> Callable[[], None] | None:
    """What a new process calls so that it is killed when this one ends; None where the system has no such thing."""
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def tie() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the tie was made
            os._exit(137)

    return tie


class Rank:
    """One process and what it writes."""

    def __init__(self, rank: int, argv: Sequence[str], env: dict[str, str], cwd: str, attempt: Path) -> None:
        self.rank = rank
        self.tail: deque[bytes] = deque(maxlen=TAIL)
        self.code: int | None = None
        """Exit code; -n when signal n has ended it."""
        self.told = False
        """Whether it was asked to stop before it ended."""
        self._partial = b""
        self._log = _open_log(log_file(attempt, rank))
        self.process = subprocess.Popen(
            argv,
            env=env,
            cwd=cwd or None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=dies_with_parent(),
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout.fileno()
        os.set_blocking(self.output, False)
        self.open = True

    @property
    def pid(self) -> int:
        """Process number, and that of its group."""
        return self.process.pid

    @property
    def ended(self) -> bool:
        """Whether it has ended and was buried."""
        return self.code is not None

    def send(self, number: int) -> None:
        """A signal to all of its group."""
        if not self.ended:
            self.told = True
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def bury(self) -> bool:
        """Take its exit code if it has just ended; whether it has."""
        if self.ended or os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.code = self.process.wait()
        return True

    def read(self, show: Show | None) -> None:
        """Take what it has written; `show` gets whole lines."""
        while self.open:
            try:
                data = os.read(self.output, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self.finish(show)
                return
            self._take(data, show)

    def finish(self, show: Show | None) -> None:
        """No more of its output is wanted, or there is none."""
        if self.open:
            self.open = False
            if self._partial:
                self._take(b"\n", show)
            assert self.process.stdout is not None
            self.process.stdout.close()
            if self._log is not None:
                os.close(self._log)

    def _take(self, data: bytes, show: Show | None) -> None:
        if self._log is not None:
            try:
                os.write(self._log, data)
            except OSError:  # a full disk: training is worth more than its log
                os.close(self._log)
                self._log = None
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > 1 << 16:  # a line without an end
            lines, self._partial = [*lines, self._partial], b""
        self.tail.extend(line.rpartition(b"\r")[2] for line in lines)
        if show is not None and lines:
            show(self.rank, b"".join(line + b"\n" for line in lines))

    def last_lines(self) -> list[str]:
        """What it wrote last."""
        return [line.decode("utf-8", "replace") for line in self.tail if line.strip()]


def _open_log(path: Path) -> int | None:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError:
        return None
