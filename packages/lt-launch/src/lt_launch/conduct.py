"""One attempt of one stage over its nodes, from the launcher's side: start, listen, tell, judge.

All nodes are reached before any process starts: each says hello with a free port; node 0's is where ranks meet. Then
the agents run (`agent.node`), and everything they note comes here in the order in which it happened, which is what
names the first failure. A beat goes to every agent each second, and theirs come back; a host that is silent for
`link_timeout_s` is lost, and its processes there end themselves for the same reason.

Time is the launcher's own clock throughout.
"""

from __future__ import annotations

import re
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lt_launch.agent import verdict
from lt_launch.agent.node import FAILED_S, SETTLE_S
from lt_launch.agent.policy import Place, record_file
from lt_launch.channel import Channel
from lt_launch.hosts import Host

__all__ = ["Attempt", "Stop", "Transport"]

BEAT_S = 1.0
NEEDS_A_PERSON = re.compile(
    r"Permission denied|Host key verification failed|REMOTE HOST IDENTIFICATION|Could not resolve hostname|not found|"
    r"No such file|Bad configuration|Bad owner|no mutual|Too many authentication",
)
"""What ssh and shells complain of when trying again would not help."""


class Stop:
    """What the person, or whoever started the launcher, wants: set by signal handlers, read by loops."""

    def __init__(self) -> None:
        self.number = 0
        self.kill = False

    def note(self, number: int, frame: object = None) -> None:
        """A stop signal; the second Ctrl-C ends everything at once."""
        if self.number and number == signal.SIGINT:
            self.kill = True
        self.number = self.number or number


class Transport(Protocol):
    """How a host is reached."""

    link_timeout_s: float
    """Silence after which a host is lost; 0 = never."""
    connect_timeout_s: float
    copies_files: bool
    """Whether the launch directory has to be sent there."""

    memory_gib: float
    """Of each host; infinite where it is not known."""

    def argv(self, host: Host) -> list[str]:
        """The command that starts `boot` on a host."""
        ...

    def slots(self, host: Host) -> int:
        """How many processes may run side by side on a host."""
        ...


@dataclass(kw_only=True)
class Attempt:
    """One start of all processes of a stage or of an array's element."""

    spec: Mapping[str, Any]
    place: Place
    number: int
    hosts: Sequence[Host]
    transport: Transport
    files: Mapping[str, str]
    """What hosts need below the launch directory."""
    env: Mapping[str, str]
    """Variables that are handed on and stand in no file."""
    stop: Stop
    show: Callable[[int, str], None]
    """Takes a rank and lines that it wrote."""
    records: list[list[dict[str, Any]]] = field(default_factory=list)
    _channels: list[Channel] = field(default_factory=list)
    _failed_at: float = 0.0
    _told: int = 0

    def run(self) -> dict[str, Any]:
        """The exit record of the attempt."""
        self.records = [[] for _ in self.hosts]
        try:
            self._channels = [Channel(host.name, self.transport.argv(host)) for host in self.hosts]
        except OSError as exc:
            return self._refusal(f"cannot run {exc.filename!r} here: {exc.strerror}", person=True)
        try:
            hellos = self._meet()
            if isinstance(hellos, dict):
                return hellos
            self._start(hellos)
            self._listen()
        finally:
            for channel in self._channels:
                channel.close(0.0)
        self._keep()
        return verdict.judge(dict(self.spec), self.records)

    # --- meeting

    def _meet(self) -> list[dict[str, Any]] | dict[str, Any]:
        """Every host's hello, or the exit record when one cannot be reached."""
        launch = self.place.folder.parent.parent
        files = dict(self.files) if self.transport.copies_files else {}
        for channel in self._channels:
            channel.send_message({"cwd": self.spec.get("cwd") or "", "launch": str(launch), "files": files})
        hellos: list[dict[str, Any] | None] = [None] * len(self._channels)
        deadline = time.monotonic() + self.transport.connect_timeout_s
        while None in hellos:
            for node, channel in enumerate(self._channels):
                for record in channel.read():
                    if "refused" in record:
                        return self._refusal(f"host {channel.name}: {record['refused']}", person=True)
                    hellos[node] = hellos[node] or record
                channel.flush()
                if hellos[node] is None and not channel.open:
                    return self._unreachable(channel)
            missing = [c.name for c, hello in zip(self._channels, hellos, strict=True) if hello is None]
            if missing and time.monotonic() > deadline:
                waited = self.transport.connect_timeout_s
                return self._refusal(f"no answer from {', '.join(missing[:8])} within {waited:g} s", hosts=missing)
            if self.stop.number:
                return self._stopped()
            if missing:
                time.sleep(0.01)
        return [hello for hello in hellos if hello is not None]

    def _unreachable(self, channel: Channel) -> dict[str, Any]:
        code = channel.close()
        said = channel.complaints[-1].strip() if channel.complaints else f"exit code {code}"
        person = any(NEEDS_A_PERSON.search(line) for line in channel.complaints)
        return self._refusal(f"cannot start on host {channel.name}: {said}", person=person, hosts=[channel.name])

    def _refusal(self, reason: str, *, person: bool = False, hosts: Sequence[str] = ()) -> dict[str, Any]:
        return {
            "kind": verdict.FAILED if person else verdict.LOST,
            "code": 64 if person else verdict.REQUEUE,
            "reason": reason,
            "first": None,
            "hosts": list(hosts),
            "step_before": -1,
            "step": -1,
        }

    def _stopped(self) -> dict[str, Any]:
        return self._refusal("stopped before it began") | {"kind": verdict.STOPPED}

    def _start(self, hellos: Sequence[Mapping[str, Any]]) -> None:
        port = int(self.spec.get("master_port") or hellos[0]["port"])
        address = self.hosts[0].address if self.transport.copies_files else "127.0.0.1"
        spec_path = str(self.place.stage / "spec.json")
        for node, (channel, host) in enumerate(zip(self._channels, self.hosts, strict=True)):
            agent = [str(self.place.folder.parent.parent / "agent"), "node", spec_path, "--attempt", str(self.number)]
            agent += ["--node-rank", str(node), "--master-addr", address, "--master-port", str(port), "--control"]
            if self.place.index is not None:
                agent += ["--index", str(self.place.index)]
            channel.send_message({"exec": agent, "env": {**self.env, **host.env}})
            channel.heard = time.monotonic() + self.transport.connect_timeout_s  # until its first record

    # --- listening

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for channel in self._channels:
                selector.register(channel.output, selectors.EVENT_READ, channel)
            beat = 0.0
            while any(channel.open for channel in self._channels):
                ready = selector.select(timeout=0.05 if any(c.waiting for c in self._channels) else 0.2)
                for key, _ in ready:
                    self._take(key.data)
                    if not key.data.open:
                        selector.unregister(key.fd)
                now = time.monotonic()
                if now - beat >= BEAT_S:
                    beat = now
                    self._tell({"beat": 1})
                for channel in self._channels:
                    channel.flush()
                    if channel.open and self.transport.link_timeout_s:
                        silent = now - channel.heard
                        if silent > self.transport.link_timeout_s:
                            selector.unregister(channel.output)
                            self._gone(channel, f"no sign of life for {silent:.0f} s")
                self._orders()
                if self._failed_at and now > self._failed_at + SETTLE_S + FAILED_S + 5:
                    self._give_up(selector)

    def _take(self, channel: Channel) -> None:
        node = self._channels.index(channel)
        for record in channel.read():
            if "lines" in record:
                self.show(int(record["rank"]), record["lines"])
            elif "event" in record:
                record["sent"], record["time"] = record["time"], time.time()
                record["host"] = channel.name
                self.records[node].append(record)
                if record["event"] == "ended" and record["code"] not in (0, 75) and not record["told"]:
                    self._fail()
        if not channel.open and not self._has_left(node):
            self._gone(channel, "")

    def _has_left(self, node: int) -> bool:
        return any(record["event"] == "left" for record in self.records[node])

    def _gone(self, channel: Channel, why: str) -> None:
        node = self._channels.index(channel)
        heard = time.time() - max(0.0, time.monotonic() - channel.heard)
        code = channel.close(0.0 if why else 2.0)
        said = f" ({channel.complaints[-1].strip()})" if channel.complaints else ""
        first = node * int(self.spec["procs_per_node"])
        self.records[node].append(
            {
                "time": heard,
                "event": "gone",
                "node": node,
                "host": channel.name,
                "ranks": list(range(first, first + int(self.spec["procs_per_node"]))),
                "reason": why or f"its agent ended without a word, with {verdict.code_name(code)}{said}",
            }
        )
        self._fail()

    def _fail(self) -> None:
        if not self._failed_at:
            self._failed_at = time.monotonic()
            self._tell({"failed": 1})

    def _give_up(self, selector: selectors.BaseSelector) -> None:
        """Agents that have not ended long after a failure are cut off, which ends what they hold."""
        for node, channel in enumerate(self._channels):
            if channel.open:
                selector.unregister(channel.output)
                channel.close(0.0)
                self.records[node].append({"time": time.time(), "event": "closed", "node": node, "host": channel.name})

    def _orders(self) -> None:
        if self.stop.number and not self._told:
            self._told = self.stop.number
            self._tell({"signal": signal.Signals(self.stop.number).name})
        if self.stop.kill:
            self._tell({"kill": 1})

    def _tell(self, order: Mapping[str, Any]) -> None:
        for channel in self._channels:
            if channel.open:
                channel.send(order)

    def _keep(self) -> None:
        """Keep the records of hosts that do not share the launch directory."""
        import json

        for node, records in enumerate(self.records):
            path = record_file(self.place.attempt(self.number), node)
            if not path.exists():
                path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
