"""Far end of an ssh connection: starts a host's commands, and ends them when the connection is gone.

Why ssh alone needs it: a client cannot send a signal to a command, sshd tells a command without a terminal nothing when
the connection is lost, and one with a terminal stands still once nobody reads it. Whether sshd notices a cut link
depends on its own settings (ClientAliveInterval). So orders come as lines of JSON, and where they stop coming, with the
connection or without, the commands get SIGTERM and the grace time to save. It also tells exit codes, rank 0's output
and progress, since a host need not share the launcher's folder.

    {"start": {...}}  {"signal": "SIGTERM"}  {"kill": 1}  {"beat": 1}          orders
    {"hello": host, "port"}  {"ended": rank, ...}  {"lines": text, ...}  {"progress": {...}}  {"left": 1}  {"beat": 1}

Standard library only and Python 3.9: it is sent to the hosts with `node_processes`, `node_guard` and `policy`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from typing import Any

from lt_launch.node_guard import STOP_SIGNALS
from lt_launch.node_processes import NodeProcesses, free_port
from lt_launch.policy import Table, run_progress, run_start

POLL_S, BEAT_S = 0.05, 1.0
NOISE = (signal.SIGHUP, signal.SIGPIPE)


class SshNode:
    """One connection's worth of processes.

    Args:
        orders: descriptor that orders come from.
        answers: descriptor that answers go to.
    """

    def __init__(self, orders: int = 0, answers: int = 1) -> None:
        self._orders, self._answers = orders, answers
        for descriptor in (orders, answers):
            os.set_blocking(descriptor, False)
        self._partial = self._waiting = b""
        self._heard = time.monotonic()
        self._alone = False
        self._kill_at = 0.0
        self._processes: NodeProcesses | None = None
        self._spec: Table = {}
        self._start: Table = {}
        self._link_timeout_s = 60.0
        """Until the start, in which the launcher may wait for other hosts."""

    def run(self) -> None:
        """Serve until no process is left, or the launcher is gone before one was started."""
        self._say({"hello": socket.gethostname(), "port": free_port()})
        beat = 0.0
        while True:
            self._read()
            processes, now = self._processes, time.monotonic()
            if processes is None:
                if self._alone:
                    return
            else:
                for event in processes.poll(lines=not self._waiting):
                    self._say(event)
                if self._kill_at and now >= self._kill_at:
                    processes.kill()
                if processes.left and (self._alone or not self._waiting):
                    self._finish(processes)
                    return
            if now - beat >= BEAT_S:
                beat = now
                self._say({"beat": 1})
            self._flush()
            select.select([] if self._alone else [self._orders], [], [], POLL_S)
            if self._alone:
                time.sleep(POLL_S)

    def _finish(self, processes: NodeProcesses) -> None:
        while events := processes.poll():
            for event in events:
                self._say(event)
        processes.close()
        self._say({"progress": run_progress(self._spec, self._start)})
        self._say({"left": 1})
        os.set_blocking(self._answers, True)
        signal.alarm(10)  # nobody reads it
        self._flush()

    def _say(self, values: Table) -> None:
        if not self._alone:
            self._waiting += json.dumps(values).encode() + b"\n"

    def _flush(self) -> None:
        while self._waiting and not self._alone:
            try:
                self._waiting = self._waiting[os.write(self._answers, self._waiting) :]
            except BlockingIOError:
                return
            except OSError:
                self._lose()

    def _read(self) -> None:
        if self._alone:
            return
        try:
            data = os.read(self._orders, 1 << 16)
        except BlockingIOError:
            if time.monotonic() - self._heard > self._link_timeout_s:
                self._lose()
            return
        except OSError:
            data = b""
        if not data:
            self._lose()
            return
        self._heard = time.monotonic()
        *rows, self._partial = (self._partial + data).split(b"\n")
        for row in rows:
            self._obey(json.loads(row))

    def _obey(self, order: dict[str, Any]) -> None:
        processes = self._processes
        if "start" in order:
            given = order["start"]
            self._spec, self._link_timeout_s = given["spec"], float(given["link_timeout_s"])
            self._start = run_start(self._spec)
            self._processes = NodeProcesses(given["token"], float(self._spec["grace_s"]))
            for command in given["orders"]:
                os.makedirs(os.path.join(command["folder"], "notes"), exist_ok=True)
            self._processes.start(given["orders"], given["shown_rank"])
        elif "signal" in order and processes is not None:
            processes.send(signal.Signals[order["signal"]])
        elif "kill" in order and processes is not None:
            processes.kill()

    def _lose(self) -> None:
        """Save and end: the launcher is gone."""
        if not self._alone:
            self._alone, self._waiting = True, b""
            if self._processes is not None:
                self._processes.send(signal.SIGTERM)
                self._kill_at = time.monotonic() + float(self._spec["grace_s"])


def main() -> None:
    """Serve the connection on standard input and output."""
    for number in (*STOP_SIGNALS, *NOISE):  # what ends it is the end of the connection
        signal.signal(number, signal.SIG_IGN)
    SshNode().run()
