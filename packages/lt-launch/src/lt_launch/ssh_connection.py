"""A host as the launcher sees it: an ssh process that speaks JSON lines with `ssh_node`.

Nothing here waits: what cannot be written now is kept, what has not come is not there. Time is the launcher's clock.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from lt_launch.answers import is_record
from lt_launch.attempt import Unreachable
from lt_launch.policy import Table, code_name

__all__ = ["BOOT", "SshConnection"]

BEAT_S = 1.0
NEEDS_A_PERSON = re.compile(
    r"Permission denied|Host key verification failed|REMOTE HOST IDENTIFICATION|Could not resolve hostname|not found|"
    r"No such file|Bad configuration|Bad owner|no mutual|Too many authentication",
)
"""What ssh and shells complain of when trying again would not help."""
SAFE_PATH = "import sys\nsys.path = [path for path in sys.path if path]\n"
"""First lines of a program for `python -c`: no modules of the working directory. Python has -P since 3.11 only."""
BOOT = """
import json, os, signal, sys
signal.alarm(60)
data = b""
while b"\\n" not in data or len(data) < int(data.split(b"\\n")[0]) + data.index(b"\\n") + 1:
    piece = os.read(0, 1 << 16)
    if not piece: sys.exit(0)
    data += piece
order = json.loads(data[data.index(b"\\n") + 1:])
try:
    if order["cwd"]: os.chdir(order["cwd"])
    for name, text in order["files"].items():
        path = os.path.join(order["launch"], name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        part = "%s.%s.tmp" % (path, os.urandom(8).hex())
        with open(part, "x", encoding="utf-8") as file: file.write(text)
        os.replace(part, path)
except OSError as exc:
    print(json.dumps({"refused": "%s: %s" % (exc.filename, exc.strerror)}))
    sys.exit(64)
signal.alarm(0)
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(order["launch"], "nodes"))
from lt_launch.ssh_node import main
main()
""".strip()
"""Program that is started on a host: it writes the files of the launch there and becomes `ssh_node`."""


class SshConnection:
    """A connection to one host for one attempt.

    Args:
        name: the host's name.
        argv: command that starts `BOOT` there.
        spec: the stage.
        launch: path of the launch directory.
        files: what the host needs below it.
        link_timeout_s: silence after which the host is lost.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        spec: Mapping[str, Any],
        *,
        launch: str,
        files: Mapping[str, str],
        link_timeout_s: float,
    ) -> None:
        self.name, self._spec, self._link_timeout_s = name, spec, link_timeout_s
        self.left, self.lost = False, ""
        self.complaints: deque[str] = deque(maxlen=20)
        """Last lines that are no answers."""
        self._port = 0
        self._refused = ""
        self._waiting = self._partial = self._partial_error = b""
        self._beat_at = self._heard = time.monotonic()
        self._open, self._started = True, False
        try:
            # A session of its own: Ctrl-C at a terminal would else end it before it could be told what to do.
            self.process: subprocess.Popen[bytes] | None = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as exc:
            self.process = None
            self._refused = f"cannot run {argv[0]!r} here: {exc.strerror}"
            return
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
        body = json.dumps({"cwd": spec.get("cwd") or "", "launch": launch, "files": dict(files)}).encode()
        self._waiting = b"%d\n%s" % (len(body), body)
        self._flush()

    def port(self) -> int:
        """Return the free port that the host has reported, 0 if it has not answered yet."""
        self.poll()
        if self._refused:
            raise Unreachable(self._refused, needs_person=True)
        if not self._port and not self._open:
            code = self._end_process()
            said = self.complaints[-1].strip() if self.complaints else f"exit code {code}"
            needs_person = any(NEEDS_A_PERSON.search(line) for line in self.complaints)
            raise Unreachable(f"cannot start on host {self.name}: {said}", needs_person=needs_person)
        return self._port

    def start(self, orders: list[Table], shown_rank: int | None) -> None:
        """Start commands on the host."""
        self._started, self._heard = True, time.monotonic()
        values = {
            "orders": orders,
            "shown_rank": shown_rank,
            "spec": dict(self._spec),
            "token": secrets.token_hex(16),
            "link_timeout_s": self._link_timeout_s,
        }
        self._send({"start": values})

    def send(self, number: int) -> None:
        """Send a signal to every command of the host."""
        self._send({"signal": signal.Signals(number).name})

    def kill(self) -> None:
        """Kill every process of the host."""
        self._send({"kill": 1})

    def poll(self) -> list[Table]:
        """Return the events that have come."""
        events = self._read()
        now = time.monotonic()
        if self._started and now - self._beat_at >= BEAT_S:
            self._beat_at = now
            if not self._waiting:
                self._send({"beat": 1})
        self._flush()
        if self._started and not self.left and not self.lost:
            if not self._open:
                code = self._end_process()
                said = f" ({self.complaints[-1].strip()})" if self.complaints else ""
                self.lost = f"the connection ended with {code_name(code if code >= 0 else 128 - code)}{said}"
            elif now - self._heard > self._link_timeout_s:
                self.lost = f"no sign of life for {now - self._heard:.0f} s"
        return events

    def close(self) -> None:
        """End the connection, and with it what is left on the host."""
        self._end_process(0.0 if self.lost or not self.left else 5.0)

    def _send(self, values: Mapping[str, Any]) -> None:
        self._waiting += json.dumps(values).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        stream = self.process.stdin if self.process is not None else None
        while self._waiting and stream is not None and not stream.closed:
            try:
                self._waiting = self._waiting[os.write(stream.fileno(), self._waiting) :]
            except BlockingIOError:
                return
            except OSError:  # it is gone; its output says so
                self._waiting = b""

    def _read(self) -> list[Table]:
        if self.process is None:
            self._open = False
        found: list[Table] = []
        self._read_complaints()
        while self._open:
            assert self.process is not None
            assert self.process.stdout is not None
            try:
                data = os.read(self.process.stdout.fileno(), 1 << 16)
            except BlockingIOError:
                break
            if not data:
                self._open = False
                break
            self._heard = time.monotonic()
            *rows, self._partial = (self._partial + data).split(b"\n")
            for row in rows:
                found += self._record(row)
        return found

    def _record(self, row: bytes) -> list[Table]:
        """Return an event; what a login shell prints on its own is kept as a complaint."""
        try:
            values = json.loads(row)
        except (ValueError, RecursionError):
            values = None
        if not is_record(values):
            self.complaints.append(row.decode("utf-8", "replace"))
            return []
        if "refused" in values:
            self._refused = f"host {self.name}: {values['refused']}"
        elif "hello" in values:
            self._port = values["port"]
        elif "left" in values:
            self.left = True
        elif "beat" not in values:
            return [values]
        return []

    def _read_complaints(self) -> None:
        stream = self.process.stderr if self.process is not None else None
        with suppress(BlockingIOError):
            while stream is not None and not stream.closed:
                data = os.read(stream.fileno(), 1 << 16)
                if not data:
                    stream.close()
                    return
                *rows, self._partial_error = (self._partial_error + data).split(b"\n")
                self.complaints.extend(row.decode("utf-8", "replace") for row in rows if row.strip())

    def _end_process(self, timeout_s: float = 2.0) -> int:
        """End ssh if it still runs, and reap it; return its exit code."""
        if self.process is None:
            return 127
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
        self._read_complaints()
        self._open = False
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None and not stream.closed:
                stream.close()
        return code
