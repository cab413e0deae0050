"""The node without its GPUs: CPU, memory, the disk of the run directory, and this run's processes. All from psutil.

Rates are over the time since the sample before, so the first sample has none. What a system does not tell is left out.
In a container, CPU and memory are the machine's, not the container's share.

Cost: a fifth of a millisecond of CPU per sample, and a tenth more per process (tools/bench/monitor.py measures it).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

GIB, MIB = 2**30, 2**20


class Host:
    """Samples this machine.

    Args:
        folder: the run directory; its disk is the one that is looked at.
        clock: seconds, only differences count.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._disk = disk_of(folder)
        self._processes: dict[int, psutil.Process] = {}
        self._before: dict[str, tuple[float, float]] = {}
        psutil.cpu_percent()  # the first answer means nothing

    def sample(self, pids: Mapping[int, int]) -> dict[str, Any]:
        """What the machine does now.

        Args:
            pids: the processes of this run on this machine, by rank.
        """
        memory = psutil.virtual_memory()
        return {
            "cpu_percent": psutil.cpu_percent(),
            "memory_used_gib": round((memory.total - memory.available) / GIB, 3),
            "memory_available_gib": round(memory.available / GIB, 3),
            **self._disk_sample(),
            "ranks": {str(rank): found for rank, pid in pids.items() if (found := self._process(rank, pid))},
        }

    def _disk_sample(self) -> dict[str, Any]:
        found: dict[str, Any] = {"disk_free_gib": round(shutil.disk_usage(self._folder).free / GIB, 3)}
        counters = psutil.disk_io_counters(perdisk=True) or {}
        if self._disk not in counters:
            return found
        now = counters[self._disk]
        return (
            found
            | {"disk": self._disk}
            | self._rate("disk_read_mib_s", "disk_read", now.read_bytes / MIB)
            | self._rate("disk_write_mib_s", "disk_write", now.write_bytes / MIB)
        )

    def _process(self, rank: int, pid: int) -> dict[str, float]:
        """One process; empty when it is gone."""
        try:
            if rank not in self._processes or self._processes[rank].pid != pid:
                self._processes[rank] = psutil.Process(pid)
            process = self._processes[rank]
            with process.oneshot():
                times = process.cpu_times()
                found = {"rss_gib": round(process.memory_info().rss / GIB, 3)}
                found |= self._rate("cpu_percent", f"cpu {pid}", 100 * (times.user + times.system))
        except psutil.Error:  # it is gone, or not ours to see
            return {}
        try:
            io = process.io_counters()
        except (psutil.Error, AttributeError):  # not ours to see, or a system without such counters
            return found
        found |= self._rate("read_mib_s", f"read {pid}", io.read_bytes / MIB)
        return found | self._rate("write_mib_s", f"write {pid}", io.write_bytes / MIB)

    def _rate(self, name: str, key: str, count: float) -> dict[str, float]:
        """What a growing count has grown by per second since it was last seen; empty the first time."""
        now = self._clock()
        before = self._before.get(key)
        self._before[key] = (now, count)
        if before is None or now <= before[0]:
            return {}
        return {name: round((count - before[1]) / (now - before[0]), 3)}


def disk_of(folder: Path) -> str:
    """The block device that holds a folder, as the system's disk counters name it; empty for a network file system."""
    number = os.stat(folder).st_dev
    try:
        return os.path.basename(os.readlink(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}"))
    except OSError:
        return ""
