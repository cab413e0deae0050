"""The processes of one node: started, listened to, signalled, and ended with all that they started.

A stage that trains is one command, `lt train torchrun`, whose ranks write their output and exit codes into the folder
of the attempt; another stage is one command per process. Each writes into a file, so that nobody who stops reading
stops it. When a command has ended, what is left of its process group is killed while the command is not yet reaped, so
that the group's number cannot mean anybody else; a rank that outlives its torchrun has the grace time to save.

Standard library only and Python 3.9: the target ssh sends this file to its hosts. Cost: a few system calls per call of
`poll`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from lt_launch import node_guard
from lt_launch.policy import Table, last_lines, log_file, open_for_appending, open_regular, read_notes

NOT_FOUND = 127
SCAN_S = 0.5
"""Interval between looks for processes that outlive their commands, and for exit codes that ranks have noted."""
LINES_BYTES = 1 << 16
STUCK_S = 10.0
"""After this time processes that cannot be killed, since they wait for a device, are left alone."""


class Command:
    """A started command.

    Args:
        order: see `NodeProcesses.start`.
    """

    def __init__(self, order: Table, token: str) -> None:
        self.ranks: list[int] = order["ranks"]
        self.folder = Path(order["folder"])
        self.notes = order["notes"]
        self.code: int | None = None
        """Exit code, 128 + n for signal n; None while it runs."""
        self.reported: set[int] = set()
        """Ranks whose end was returned."""
        env = {**order["defaults"], **os.environ, **order["env"], node_guard.TOKEN: token}
        if order["bin"]:  # commands of the interpreter's own environment (lt) before others
            env["PATH"] = f"{order['bin']}{os.pathsep}{env.get('PATH', os.defpath)}"
        path = log_file(self.folder, self.ranks[0])
        with os.fdopen(open_for_appending(path), "ab") as log:
            try:
                self.process = subprocess.Popen(
                    order["argv"],
                    env=env,
                    cwd=order["cwd"] or None,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as exc:
                where = order["cwd"] or os.getcwd()
                log.write(f"cannot run {order['argv'][0]!r} in {where}: {exc.strerror}\n".encode())
                self.code = NOT_FOUND

    def reap(self) -> bool:
        """Return True if it has ended, after killing what is left of its group."""
        if self.code is None and os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            node_guard.signal_groups([self.process.pid], signal.SIGKILL)
            code = self.process.wait()
            self.code = code if code >= 0 else 128 - code
        return self.code is not None


class NodeProcesses:
    """The processes of an attempt on one node.

    Args:
        token: marks them and what they start; unique to the attempt and node.
        grace_period_s: what processes have to leave by themselves when their command, or who started it, is gone.
    """

    def __init__(self, token: str, grace_period_s: float) -> None:
        self.token, self.grace_period_s = token, grace_period_s
        self.left = False
        """True when no process is left."""
        self.commands: list[Command] = []
        self._killed = False
        self._log: Path | None = None
        self._offset = 0
        self._read_at = self._scanned_at = self._leftovers_since = 0.0
        words = [sys.executable, "-I", "-S", node_guard.__file__, token, str(grace_period_s)]
        env = {name: value for name, value in os.environ.items() if name != node_guard.TOKEN}
        self._guard = subprocess.Popen(
            words,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def start(self, orders: list[Table], shown_rank: int | None) -> None:
        """Start commands.

        Args:
            orders: of each command: ranks, argv, folder (for logs), notes (whether its ranks note their exit codes
                there), env, defaults (variables that are set only if they are not), bin (first folder of PATH), cwd.
            shown_rank: the rank whose output `poll` returns; None for none.
        """
        for order in orders:
            command = Command(order, self.token)
            self.commands.append(command)
            if command.code is None:
                self._tell_guard(f"{command.process.pid}\n".encode())
            if shown_rank in command.ranks:
                self._log = log_file(command.folder, shown_rank or 0)

    def poll(self, *, lines: bool = True) -> list[Table]:
        """Return what has happened: {"ended": rank, "code", "tail"}, {"lines": text, "rank"}.

        Args:
            lines: False to leave output in its file for now.
        """
        found, now = [], time.monotonic()
        for command in self.commands:
            is_over = command.reap()
            if is_over or not command.notes or now - self._read_at >= SCAN_S:
                found += self._ended_ranks(command)
        if now - self._read_at >= SCAN_S:
            self._read_at = now
        if not self.left and all(command.code is not None for command in self.commands):
            self._end_leftovers()
            if self.left:
                for command in self.commands:
                    found += self._ended_ranks(command)
        return found + (self._lines() if lines else [])

    def send(self, number: int) -> None:
        """Send a signal to the group of each command."""
        node_guard.signal_groups((one.process.pid for one in self.commands if one.code is None), number)

    def kill(self) -> None:
        """Kill every process. Exit codes of ranks that are still there are not reported: not their own."""
        self._killed = True
        self.send(signal.SIGKILL)
        node_guard.kill_processes(self.token)

    def close(self) -> None:
        """End what is left, and the guard."""
        deadline = time.monotonic() + STUCK_S
        while not self.left and time.monotonic() < deadline:
            self.kill()
            self.poll(lines=False)
        self._tell_guard(node_guard.DONE)
        assert self._guard.stdin is not None
        with suppress(OSError):
            self._guard.stdin.close()
        self._guard.wait()

    def _ended_ranks(self, command: Command) -> list[Table]:
        """Return ends of ranks not reported yet: their own notes, else the command's code once all are gone."""
        codes: dict[int, int] = {}
        if command.notes:
            codes = {rank: note[0] for rank, note in read_notes(command.folder / "notes").items()}
        if command.code is not None and not self._killed and (self.left or not command.notes):
            codes = {**dict.fromkeys(command.ranks, command.code), **codes}
        found = []
        for rank in command.ranks:
            if rank in codes and rank not in command.reported:
                command.reported.add(rank)
                tail = last_lines(log_file(command.folder, rank)) if codes[rank] else []
                found.append({"ended": rank, "code": codes[rank], "tail": tail})
        return found

    def _end_leftovers(self) -> None:
        """End what outlives its command, as ranks do whose torchrun was killed."""
        now = time.monotonic()
        if now - self._scanned_at < SCAN_S and not self._killed:
            return
        self._scanned_at, pids = now, node_guard.find_processes(self.token)
        if not pids:
            self.left = True
        elif self._killed:
            node_guard.kill_processes(self.token)
        elif not self._leftovers_since:
            self._leftovers_since = now
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        elif now - self._leftovers_since > self.grace_period_s:
            node_guard.kill_processes(self.token)

    def _lines(self) -> list[Table]:
        """Return whole lines that the shown rank has written since the last call."""
        if self._log is None:
            return []
        try:
            with os.fdopen(open_regular(self._log), "rb") as file:
                file.seek(self._offset)
                data = file.read(LINES_BYTES)
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        if (self.left and len(data) < LINES_BYTES) or (not end and len(data) == LINES_BYTES):
            end = len(data)  # the last line has no end, or is a long one
        self._offset += end
        return [{"lines": data[:end].decode("utf-8", "replace"), "rank": 0}] if end else []

    def _tell_guard(self, words: bytes) -> None:
        assert self._guard.stdin is not None
        with suppress(OSError):  # somebody killed it; the processes end as ever, but for this
            self._guard.stdin.write(words)
            self._guard.stdin.flush()


def free_port() -> int:
    """Return a port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
