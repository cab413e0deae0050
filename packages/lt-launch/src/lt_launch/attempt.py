"""One attempt of one stage over its nodes: start, watch, end together, judge.

How it ends the processes:

    a stop signal to the launcher       goes on to all of them, once; after the grace time SIGKILL
    one has failed, or a node is lost   the others may find out themselves (SETTLE_S), then SIGTERM, and SIGKILL after
                                        the grace time
    one has left with 75 unasked        the others have the grace time to do the same, then SIGKILL

Exit codes become notes in the folder of the attempt, as ranks of `lt train torchrun` and tasks of Slurm leave them, and
`policy` judges by them. Cost: one thread that wakes up every POLL_S.
"""

from __future__ import annotations

import math
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lt_launch import policy
from lt_launch.job_output import LogTail
from lt_launch.node import Host, Node, is_training, node_commands
from lt_launch.policy import Place, Table

POLL_S, SETTLE_S = 0.05, 3.0
TORCHRUN_S = 5.0
"""What torchrun takes beyond the grace time of its ranks."""
STUCK_S = 15.0
"""After this time a node whose processes cannot be killed is given up."""


class Stop:
    """Stop request of the user: set by signal handlers, read by loops."""

    def __init__(self) -> None:
        self.number = 0
        self._interrupts = 0

    @property
    def kill(self) -> bool:
        """Whether Ctrl-C was pressed twice. Another signal is none: two that come together have no order in Python."""
        return self._interrupts > 1

    def note(self, number: int, frame: object = None) -> None:
        """Note a stop signal; the second Ctrl-C ends everything at once."""
        self._interrupts += number == signal.SIGINT
        self.number = self.number or number


@contextmanager
def handle_stop_signals(stop: Stop) -> Iterator[None]:
    """Forward stop signals to `stop` for the duration of the context; one that is ignored (nohup) stays so."""
    previous = {number: signal.getsignal(number) for number in policy.STOPS}
    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, stop.note)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@dataclass(kw_only=True)
class Attempt:
    """One start of all processes of a stage or of an array's element."""

    spec: Mapping[str, Any]
    place: Place
    number: int
    hosts: Sequence[Host]
    first_node: int = 0
    """Index of the first of these hosts among those of the stage; the launcher of a SageMaker host has one."""
    master: tuple[str, int] | None = None
    """Address of the stage's first node and a port there; None = of the first host, and a port that is free here."""
    env: Mapping[str, str]
    """Variables that are handed on and stand in no file."""
    stop: Stop
    show: Callable[[str], None]
    """Takes lines of the first rank."""
    nodes: list[Node] = field(default_factory=list)
    _lost: Table | None = None
    _term_at: float = math.inf
    _kill_at: float = math.inf
    _give_up_at: float = math.inf
    _is_told_to_stop: bool = False

    def run(self) -> Table:
        """Run it to its end and write exit.json; return its content.

        A host on which the first attempt of a launch cannot start at all is the user's to mend: exit code 64.
        """
        folder = self.place.attempt(self.number)
        log = LogTail(policy.log_file(folder, self._ranks(0)[0]))
        master = self.master or (self.hosts[0].address, free_port())
        try:
            for number, host in enumerate(self.hosts):
                commands = node_commands(self.spec, self.place, self.number, self.first_node + number, master, self.env)
                self.nodes.append(Node(host, self.spec, self.place, self.number, commands))
            while any(not (node.left or node.lost) for node in self.nodes) and time.monotonic() < self._give_up_at:
                self._poll()
                self._end()
                self._show(log, is_last=False)
                time.sleep(POLL_S)
            self._poll()
            self._show(log, is_last=True)
        finally:
            for node in self.nodes:
                node.close()
        hosts = {rank: host.name for node, host in enumerate(self.hosts) for rank in self._ranks(node)}
        result = policy.conclude(
            dict(self.spec), self.place, self.number, ranks=list(hosts), hosts=hosts, lost=self._lost
        )
        is_first = (folder / policy.LAUNCHED).exists()
        if is_first and result["kind"] == policy.LOST and not all(node.began for node in self.nodes):
            result |= {"kind": policy.FAILED, "code": policy.USER}
            policy.write_table(folder / "exit.json", result)
        return result

    def _ranks(self, node: int) -> list[int]:
        procs = int(self.spec["procs_per_node"])
        return list(range((self.first_node + node) * procs, (self.first_node + node + 1) * procs))

    def _show(self, log: LogTail, *, is_last: bool) -> None:
        while lines := log.read(is_last=is_last):
            self.show("".join(f"{line}\n" for line in lines))

    def _poll(self) -> None:
        """Take what has happened on the nodes."""
        for number, node in enumerate(self.nodes):
            for rank, code in node.poll():
                note = self.place.attempt(self.number) / "notes" / str(rank)
                if not note.exists():
                    note.write_text(f"{code} {node.host.name}\n", encoding="utf-8")
                if code == policy.REQUEUE:
                    self._kill_by(time.monotonic() + self._grace_period_s())
                elif code:
                    self._fail()
            if node.lost and not self._lost:
                self._lost = {"host": node.host.name, "ranks": self._ranks(number), "why": node.lost}
                self._fail()

    def _fail(self) -> None:
        now = time.monotonic()
        self._term_at = min(self._term_at, now + SETTLE_S)
        self._kill_by(now + SETTLE_S + self._grace_period_s())

    def _kill_by(self, when: float) -> None:
        if self._give_up_at == math.inf:
            self._kill_at = min(when, self._kill_at)

    def _grace_period_s(self) -> float:
        return float(self.spec["grace_s"]) + (TORCHRUN_S if is_training(self.spec) else 0.0)

    def _end(self) -> None:
        """Do what is due."""
        now, folder = time.monotonic(), self.place.attempt(self.number)
        if self.stop.number and not self._is_told_to_stop:
            (folder / policy.SIGNALED).write_text(signal.Signals(self.stop.number).name, encoding="ascii")
            self._send(self.stop.number)
            self._kill_by(now + self._grace_period_s())
        if now >= self._term_at and not self._is_told_to_stop:
            self._send(signal.SIGTERM)
        if self.stop.kill:
            self._kill_by(now)
        if now >= self._kill_at:
            (folder / policy.KILLED_FILE).touch()
            for node in self.nodes:
                if not node.left:
                    node.kill()
            self._kill_at, self._give_up_at = math.inf, now + STUCK_S

    def _send(self, number: int) -> None:
        self._is_told_to_stop = True
        for node in self.nodes:
            node.send(number)


def free_port() -> int:
    """Return a port that nobody uses on this machine now; on another one it may be taken, seldom."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
