"""Scheduler of targets without a queue: allocates hosts to attempts in pipeline order.

A host has slots for processes, memory if known, and devices, which one attempt uses exclusively. An attempt acquires
all of its hosts at once or waits, so that two never deadlock. Priority is the position in the pipeline: a later attempt
never takes hosts that an earlier one waits for, so that small stages do not starve a wide one. A request larger than a
host gets the whole host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from lt_launch.errors import LaunchError
from lt_launch.hosts import Host
from lt_launch.job import Job

__all__ = ["HostScheduler", "ResourceRequest", "resource_request"]

POLL_S = 0.5
"""Interval in seconds at which a waiting request checks for a stop; freed hosts wake it immediately."""


@dataclass(frozen=True, kw_only=True)
class ResourceRequest:
    """Resources of an attempt on each of its hosts."""

    nodes: int = 1
    procs_per_node: int = 1
    """Processes per host; hosts with fewer slots are not used."""
    slots: int = 1
    memory_gib: float = 0.0
    devices: bool = False
    """True if it uses the host's devices, which attempts never share."""
    exclusive: bool = False
    """True if it excludes other attempts from its hosts."""
    array_index: int | None = None
    """Index of an array element, assigned to the usable hosts round-robin."""


def resource_request(job: Job, index: int | None = None) -> ResourceRequest:
    """Return the resources that an attempt of a job needs."""
    resources = job.resources
    return ResourceRequest(
        nodes=job.nodes,
        procs_per_node=job.procs_per_node,
        slots=job.procs_per_node * max(1, resources.cpus_per_proc),
        memory_gib=resources.memory_gib,
        devices=job.is_training or resources.gpus_per_node > 0 or resources.neuron_cores_per_node > 0,
        exclusive=resources.exclusive,
        array_index=index,
    )


@dataclass
class _HostUsage:
    slots: int = 0
    memory_gib: float = 0.0
    devices: int = 0
    exclusive: int = 0


@dataclass
class HostScheduler:
    """Allocator of the hosts of a launch.

    Args:
        hosts: in allocation order.
        slots: function that returns the slots of a host.
        memory_gib: memory of each host; infinite if unknown.
    """

    hosts: Sequence[Host]
    slots: Callable[[Host], int]
    memory_gib: float = float("inf")
    lost_hosts: set[str] = field(default_factory=set)
    """Names of hosts that are used only if too few others remain."""
    _usage: dict[str, _HostUsage] = field(default_factory=dict)
    _queue: list[tuple[tuple[int, int], ResourceRequest]] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def check_feasible(self, name: str, request: ResourceRequest) -> None:
        """Reject a request that can never be satisfied.

        Raises:
            LaunchError: there are too few hosts, or too few with enough slots.
        """
        capable = self._capable_hosts(request)
        if len(capable) < request.nodes:
            with_slots = "" if len(capable) == len(self.hosts) else f" with {request.procs_per_node} slots"
            raise LaunchError(
                f"stage {name} needs {request.nodes} hosts{with_slots} and there are {len(capable)}; "
                "lower nodes or add hosts"
            )

    @contextmanager
    def acquire(
        self, priority: tuple[int, int], request: ResourceRequest, should_stop: Callable[[], bool]
    ) -> Iterator[list[Host]]:
        """Acquire hosts for the duration of the context; none if stopped while waiting.

        Args:
            priority: unique position in the queue, lowest first.
            request: the resources.
            should_stop: returns True to stop waiting.
        """
        entry = (priority, request)
        with self._changed:
            self._queue = sorted([*self._queue, entry], key=lambda item: item[0])
            while not (hosts := self._allocate(entry)) and not should_stop():
                self._changed.wait(POLL_S)
            self._queue.remove(entry)
            self._add_usage(self._usage, request, hosts, 1)
            self._changed.notify_all()
        try:
            yield hosts
        finally:
            with self._changed:
                self._add_usage(self._usage, request, hosts, -1)
                self._changed.notify_all()

    def _allocate(self, entry: tuple[tuple[int, int], ResourceRequest]) -> list[Host]:
        """Return the hosts that a queued request may acquire now."""
        used = {name: _HostUsage(**vars(usage)) for name, usage in self._usage.items()}
        for other in self._queue:
            pool = self._candidate_hosts(other[1])
            free = [host for host in pool if self._fits(used.get(host.name, _HostUsage()), other[1], host)]
            allocated = free[: other[1].nodes] if len(free) >= other[1].nodes else []
            if other == entry:
                return allocated
            self._add_usage(used, other[1], allocated or pool[: other[1].nodes], 1)
        return []

    def _capable_hosts(self, request: ResourceRequest) -> list[Host]:
        return [host for host in self.hosts if not host.slots or host.slots >= request.procs_per_node]

    def _candidate_hosts(self, request: ResourceRequest) -> list[Host]:
        """Return the usable hosts in allocation order."""
        capable = self._capable_hosts(request)
        healthy = [host for host in capable if host.name not in self.lost_hosts]
        pool = healthy if len(healthy) >= request.nodes else capable
        return pool if request.array_index is None else [pool[request.array_index % len(pool)]]

    def _fits(self, used: _HostUsage, request: ResourceRequest, host: Host) -> bool:
        slots = max(1, self.slots(host))
        if used.exclusive or (request.exclusive and used.slots) or (request.devices and used.devices):
            return False
        memory = used.memory_gib + min(request.memory_gib, self.memory_gib)
        return used.slots + min(request.slots, slots) <= slots and memory <= self.memory_gib

    def _add_usage(
        self, used: dict[str, _HostUsage], request: ResourceRequest, hosts: Sequence[Host], sign: int
    ) -> None:
        for host in hosts:
            usage = used.setdefault(host.name, _HostUsage())
            usage.slots += sign * min(request.slots, max(1, self.slots(host)))
            usage.memory_gib += sign * min(request.memory_gib, self.memory_gib)
            usage.devices += sign * request.devices
            usage.exclusive += sign * request.exclusive
