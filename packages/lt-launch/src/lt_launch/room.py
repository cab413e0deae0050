"""What runs side by side on targets without a queue: hosts with places, and who gets them.

A host has places for processes, memory where it is known, and devices, which one attempt has for itself. An attempt
takes all of its hosts at once or waits, so that two never wait for each other. Whoever stands first in the pipeline
comes first: what an earlier one waits for no later one takes, so that a wide stage is not kept out by small ones.
What needs more than a host has gets the whole host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from lt_launch.errors import LaunchError
from lt_launch.hosts import Host
from lt_launch.job import Job

__all__ = ["Need", "Room", "need_of"]

POLL_S = 0.5
"""How often who waits looks whether it was stopped; of room it is told at once."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """What an attempt takes of each of its hosts."""

    nodes: int = 1
    procs: int = 1
    """Processes on a host; a host that says it has fewer slots cannot be used."""
    places: int = 1
    memory_gib: float = 0.0
    devices: bool = False
    """Whether it uses the host's devices, which no two attempts share."""
    whole: bool = False
    """Whether nobody else may be on its hosts."""
    only: int | None = None
    """An array's element: the host of this number among those that can be used, round and round."""


def need_of(job: Job, index: int | None = None) -> Need:
    """What an attempt of a job takes."""
    resources = job.resources
    return Need(
        nodes=job.nodes,
        procs=job.procs_per_node,
        places=job.procs_per_node * max(1, resources.cpus_per_proc),
        memory_gib=resources.memory_gib,
        devices=job.trains or resources.gpus_per_node > 0 or resources.neuron_cores_per_node > 0,
        whole=resources.exclusive,
        only=index,
    )


@dataclass
class _Used:
    places: int = 0
    memory_gib: float = 0.0
    devices: int = 0
    whole: int = 0


@dataclass
class Room:
    """The hosts of a launch.

    Args:
        hosts: in allocation order.
        places: of a host.
        memory_gib: of each host; infinite where it is not known.
    """

    hosts: Sequence[Host]
    places: Callable[[Host], int]
    memory_gib: float = float("inf")
    lost: set[str] = field(default_factory=set)
    """Names of hosts that are used only where too few others are left."""
    _used: dict[str, _Used] = field(default_factory=dict)
    _waiting: list[tuple[tuple[int, int], Need]] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def check(self, name: str, need: Need) -> None:
        """Refuse what could never be placed.

        Raises:
            LaunchError: there are too few hosts, or too few with enough slots.
        """
        able = self._able(need)
        if len(able) < need.nodes:
            few = "" if len(able) == len(self.hosts) else f" with {need.procs} slots"
            raise LaunchError(
                f"stage {name} needs {need.nodes} hosts{few} and there are {len(able)}; lower nodes or add hosts"
            )

    @contextmanager
    def take(self, turn: tuple[int, int], need: Need, stopped: Callable[[], bool]) -> Iterator[list[Host]]:
        """Have hosts while this lasts; none when it was stopped before there was room.

        Args:
            turn: where it stands among those that wait, the lowest first; its own alone.
            need: what it takes.
            stopped: whether to wait no longer.
        """
        entry = (turn, need)
        with self._changed:
            self._waiting = sorted([*self._waiting, entry], key=lambda one: one[0])
            while not (hosts := self._placed(entry)) and not stopped():
                self._changed.wait(POLL_S)
            self._waiting.remove(entry)
            self._add(self._used, need, hosts, 1)
            self._changed.notify_all()
        try:
            yield hosts
        finally:
            with self._changed:
                self._add(self._used, need, hosts, -1)
                self._changed.notify_all()

    def _placed(self, entry: tuple[tuple[int, int], Need]) -> list[Host]:
        """The hosts that one of those who wait may take now."""
        used = {name: _Used(**vars(one)) for name, one in self._used.items()}
        for other in self._waiting:
            pool = self._pool(other[1])
            free = [host for host in pool if self._fits(used.get(host.name, _Used()), other[1], host)]
            found = free[: other[1].nodes] if len(free) >= other[1].nodes else []
            if other == entry:
                return found
            self._add(used, other[1], found or pool[: other[1].nodes], 1)
        return []

    def _able(self, need: Need) -> list[Host]:
        return [host for host in self.hosts if not host.slots or host.slots >= need.procs]

    def _pool(self, need: Need) -> list[Host]:
        """The hosts that may be used, in allocation order."""
        able = self._able(need)
        good = [host for host in able if host.name not in self.lost]
        pool = good if len(good) >= need.nodes else able
        return pool if need.only is None else [pool[need.only % len(pool)]]

    def _fits(self, used: _Used, need: Need, host: Host) -> bool:
        room = max(1, self.places(host))
        if used.whole or (need.whole and used.places) or (need.devices and used.devices):
            return False
        memory = used.memory_gib + min(need.memory_gib, self.memory_gib)
        return used.places + min(need.places, room) <= room and memory <= self.memory_gib

    def _add(self, used: dict[str, _Used], need: Need, hosts: Sequence[Host], sign: int) -> None:
        for host in hosts:
            one = used.setdefault(host.name, _Used())
            one.places += sign * min(need.places, max(1, self.places(host)))
            one.memory_gib += sign * min(need.memory_gib, self.memory_gib)
            one.devices += sign * need.devices
            one.whole += sign * need.whole
