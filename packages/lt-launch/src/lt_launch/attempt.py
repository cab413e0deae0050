"""One attempt of one stage over its nodes: start, watch, end together, judge.

All nodes answer before any process starts. How it ends the processes:

    a stop signal to the launcher       goes on to all of them, once; after the grace time SIGKILL
    one has failed, or a node is lost   the others may find out themselves (SETTLE_S), then SIGTERM, and SIGKILL after
                                        the grace time
    one has left with 75 unasked        the others have the grace time to do the same, then SIGKILL

Exit codes become notes in the folder of the attempt, as ranks of `lt train torchrun` and tasks of Slurm leave them, and
`policy` judges by them. Cost: one thread that wakes up every POLL_S.
"""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt_launch import policy
from lt_launch.hosts import Host
from lt_launch.node import Node
from lt_launch.node_commands import is_training, node_commands, ranks_of
from lt_launch.policy import Place, Table

POLL_S, SETTLE_S = 0.05, 3.0
TORCHRUN_S = 5.0
"""What torchrun takes beyond the grace time of its ranks."""
NEEDS_A_PERSON = re.compile(
    r"Permission denied|Host key verification failed|REMOTE HOST IDENTIFICATION|Could not resolve hostname|not found|"
    r"No such file|Bad configuration|Bad owner|no mutual|Too many authentication",
)
"""What ssh and shells complain of when trying again would not help."""
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
    """Forward stop signals to `stop` for the duration of the context."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    previous = {n: signal.signal(n, stop.note) for n in numbers if not (ignored and n == signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Transport:
    """Access to the nodes of a target; this one is that of this machine.

    Args:
        slots: processes that may run side by side; 0 = one per core.
    """

    connect_timeout_s = 60.0

    def __init__(self, slots: int = 0) -> None:
        self._slots = slots or os.cpu_count() or 1

    def slots(self, host: Host) -> int:
        """Return how many processes may run side by side on a host."""
        return self._slots

    def address(self, host: Host) -> str:
        """Return the address at which other nodes reach a host."""
        return "127.0.0.1"

    def open_node(self, host: Host, spec: Mapping[str, Any], folder: Path) -> Node:
        """Open a node for one attempt of a stage, with the attempt's folder."""
        return Node(["bash", "-s"], folder, float(spec["grace_s"]))


@dataclass(kw_only=True)
class Attempt:
    """One start of all processes of a stage or of an array's element."""

    spec: Mapping[str, Any]
    place: Place
    number: int
    hosts: Sequence[Host]
    nodes: Sequence[Node]
    """In the order of the hosts."""
    first_node: int = 0
    """Index of the first of these nodes among those of the stage; the launcher of a SageMaker host has one."""
    address: str = "127.0.0.1"
    """Of the stage's first node."""
    master_port: int = 0
    """Port there; 0 = a free one."""
    connect_timeout_s: float = math.inf
    env: Mapping[str, str]
    """Variables that are handed on and stand in no file."""
    stop: Stop
    show: Callable[[int, str], None]
    """Takes a rank and lines that it wrote."""
    _lost: Table | None = None
    _term_at: float = math.inf
    _kill_at: float = math.inf
    _give_up_at: float = math.inf
    _is_told_to_stop: bool = False

    def run(self) -> Table:
        """Run it to its end and write exit.json; return its content."""
        try:
            if not (result := self._meet()):
                self._start()
                self._watch()
        finally:
            for node in self.nodes:
                node.close()
        if result:
            policy.write_table(self.place.attempt(self.number) / "exit.json", result)
            return result
        hosts = {rank: host.name for node, host in enumerate(self.hosts) for rank in self._ranks(node)}
        return policy.conclude(
            dict(self.spec),
            self.place,
            self.number,
            ranks=list(hosts),
            hosts=hosts,
            lost=self._lost,
        )

    def _ranks(self, node: int) -> list[int]:
        return ranks_of(self.spec, self.first_node + node)

    def _meet(self) -> Table | None:
        """Wait for every node; return the exit record if one does not come up."""
        deadline = time.monotonic() + self.connect_timeout_s
        while True:
            for host, node in zip(self.hosts, self.nodes, strict=True):
                node.poll()
                if node.lost:
                    needs_person = any(NEEDS_A_PERSON.search(line) for line in node.complaints)
                    said = node.complaints[-1].strip() if node.complaints else node.lost
                    text = f"cannot start on host {host.name}: {said}"
                    return _refusal(text, needs_person=needs_person, hosts=[host.name])
            if self.stop.number:
                return _refusal("stopped before it began") | {"kind": policy.STOPPED}
            missing = [host.name for host, node in zip(self.hosts, self.nodes, strict=True) if not node.port]
            if not missing:
                self.master_port = self.master_port or self.nodes[0].port
                return None
            if time.monotonic() > deadline:
                text = f"no answer from {', '.join(missing[:8])} within {self.connect_timeout_s:g} s"
                return _refusal(text, hosts=missing)
            time.sleep(POLL_S)

    def _start(self) -> None:
        for number, (host, node) in enumerate(zip(self.hosts, self.nodes, strict=True)):
            master, index = (self.address, self.master_port), self.first_node + number
            orders = node_commands(self.spec, self.place, self.number, index, master, {**self.env, **host.env})
            node.start(orders, self._ranks(number)[0] if number == 0 else None)

    def _watch(self) -> None:
        while any(not (node.left or node.lost) for node in self.nodes) and time.monotonic() < self._give_up_at:
            for number in range(len(self.nodes)):
                self._poll(number)
            self._end()
            time.sleep(POLL_S)
        while any(self._poll(number) for number in range(len(self.nodes))):
            pass  # the rest of the output

    def _poll(self, number: int) -> bool:
        """Take what has happened on a node; return False if nothing has."""
        events = self.nodes[number].poll()
        for event in events:
            if "ended" in event and event["ended"] in self._ranks(number):
                self._ended(self.hosts[number].name, event)
            elif "lines" in event:
                self.show(0, event["lines"])
        if self.nodes[number].lost and not self._lost:
            self._lost = {
                "host": self.hosts[number].name,
                "ranks": self._ranks(number),
                "why": self.nodes[number].lost,
            }
            self._fail()
        return bool(events)

    def _ended(self, host: str, event: Table) -> None:
        rank, code = event["ended"], event["code"]
        note = self.place.attempt(self.number) / "notes" / str(rank)
        if not note.exists():
            note.write_text(f"{code} {host}\n", encoding="utf-8")
        if code == policy.REQUEUE:
            self._kill_by(time.monotonic() + self._grace_period_s())
        elif code:
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


def _refusal(reason: str, *, needs_person: bool = False, hosts: Sequence[str] = ()) -> Table:
    return {
        "kind": policy.FAILED if needs_person else policy.LOST,
        "code": policy.USER if needs_person else policy.REQUEUE,
        "reason": reason,
        "first": None,
        "hosts": list(hosts),
        "step_before": -1,
        "step": -1,
    }
