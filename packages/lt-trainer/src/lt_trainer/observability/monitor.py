"""Node monitor: a thread of local rank 0 that samples its node; its errors never stop the run.

Each sample is a line of `<run>/monitor/node00000.jsonl`:

    time, node, host, cpu_percent, memory_used_gib, memory_available_gib,
    disk_free_gib, disk_read_mib_s, disk_write_mib_s,
    ranks: {"0": {rss_gib, cpu_percent}, ...}
    gpus: [{gpu, utilization_percent, memory_used_gib, memory_total_gib, power_w, temperature_c}, ...]
    energy_j: joules of this node's GPUs since the run's first start
    monitor_cpu_s: CPU time of this thread

Rates are averages since the previous sample, so the first one has none. What is not available is left out. In a
container, CPU and memory are the machine's. Rank 0's thread also reads the last lines of the other nodes, for the
energy of the whole run. Problems are written once to the rank's log.

The main thread only reads the thread's fields: it never waits for a driver or a disk. Cost of a sample: 0.2 ms of CPU
plus 0.1 ms per process.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from lt_trainer.constants import GIB, MIB
from lt_trainer.engine import World
from lt_trainer.errors import RunDirError
from lt_trainer.observability.gpu_sampler import GpuSampler, GpusUnavailableError
from lt_trainer.run_directory.jsonl import JsonlWriter, read_last_object

JOIN_TIMEOUT_S = 5.0
"""Maximum wait for the thread at the end of a run: a hanging driver must not block the exit."""


def node_paths(run: Path) -> list[Path]:
    """Return the sample files of all nodes that ever took part in a run."""
    return sorted((run / "monitor").glob("node*.jsonl"))


class HostSampler:
    """Sampler of this machine and of the run's processes on it.

    Args:
        folder: run directory, whose disk is sampled.
        pids: processes by rank.
        clock: monotonic clock in seconds.
    """

    def __init__(self, folder: Path, pids: Mapping[int, int], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._previous: tuple[float, float, float] | None = None
        """Time, and bytes that all disks read and wrote."""
        self._processes = {rank: psutil.Process(pid) for rank, pid in pids.items() if psutil.pid_exists(pid)}
        for source in (psutil, *self._processes.values()):
            source.cpu_percent()  # the first call returns 0

    def sample(self) -> dict[str, Any]:
        """Return one sample."""
        memory = psutil.virtual_memory()
        sample: dict[str, Any] = {
            "cpu_percent": psutil.cpu_percent(),
            "memory_used_gib": round((memory.total - memory.available) / GIB, 3),
            "memory_available_gib": round(memory.available / GIB, 3),
            "disk_free_gib": round(shutil.disk_usage(self._folder).free / GIB, 3),
            "ranks": {},
        }
        if disk := psutil.disk_io_counters():
            now = (self._clock(), disk.read_bytes / MIB, disk.write_bytes / MIB)
            if self._previous is not None and now[0] > self._previous[0]:
                seconds, read, written = (new - old for new, old in zip(now, self._previous, strict=True))
                sample |= {"disk_read_mib_s": round(read / seconds, 3), "disk_write_mib_s": round(written / seconds, 3)}
            self._previous = now
        for rank, process in self._processes.items():
            with suppress(psutil.Error):  # it has exited
                rss_gib = round(process.memory_info().rss / GIB, 3)
                sample["ranks"][str(rank)] = {"rss_gib": rss_gib, "cpu_percent": process.cpu_percent()}
        return sample


class NodeMonitor:
    """Context manager that samples this node in a thread.

    Args:
        run: run directory.
        world: ranks of this process; it is local rank 0 of its node.
        pids: processes of this node's ranks by rank.
        interval_s: time between samples.
        log: writes a line to the rank's log, for problems.
        nvml: loads NVML (`load_nvml`); None if the ranks do not compute on NVIDIA's GPUs.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self,
        run: Path,
        *,
        world: World,
        pids: Mapping[int, int],
        interval_s: float,
        log: Callable[[str], None],
        nvml: Callable[[], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._world, self._interval_s, self._log, self._clock = run, world, interval_s, log, clock
        self._node = world.rank // world.local_size
        self._path = run / "monitor" / f"node{self._node:05}.jsonl"
        self._nvml = nvml
        self._gpus: GpuSampler | None = None
        self._host = HostSampler(run, pids, clock=clock)
        self._file: JsonlWriter | None = None
        self._previous_starts_j = 0.0
        """Joules of this node in earlier starts of the run."""
        self._energy: tuple[float, float, float] | None = None
        """Time, joules of the whole run until then, and watts of this node's GPUs."""
        self._newest: dict[str, Any] = {}
        self._problems: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_stopped, name="monitor", daemon=True)

    def energy_joules(self) -> float | None:
        """Return joules of all GPUs of the run since its first start; None if not measured.

        Extrapolates from the newest sample with its power, since only the thread calls the driver.
        """
        if self._energy is None:
            return None
        sampled_s, joules, watts = self._energy
        return joules + watts * max(self._clock() - sampled_s, 0.0)

    def scalars(self) -> dict[str, float]:
        """Return the newest sample by tag: "node0/cpu_percent", "node0/rank0/rss_gib", "node0/gpu0/power_w"."""
        sample = self._newest
        groups = {"": sample} | {f"rank{rank}/": values for rank, values in sample.get("ranks", {}).items()}
        groups |= {f"gpu{values['gpu']}/": values for values in sample.get("gpus", [])}
        return {
            f"node{self._node}/{prefix}{name}": float(value)
            for prefix, values in groups.items()
            for name, value in values.items()
            if isinstance(value, int | float) and name not in ("node", "gpu", "monitor_cpu_s")
        }

    def __enter__(self) -> NodeMonitor:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join(JOIN_TIMEOUT_S)

    def _sample_until_stopped(self) -> None:
        """Sample at each interval until the monitor stops, and once more then."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._previous_starts_j = read_last_object(self._path).get("energy_j", 0.0)
            self._file = JsonlWriter(self._path)
            if self._nvml is not None:
                self._gpus = GpuSampler(self._nvml(), count=self._world.local_size, environ=os.environ)
        except (OSError, RunDirError) as exc:
            self._report(f"samples of this node are not saved: {exc}")
        except GpusUnavailableError as exc:
            self._report(f"GPUs and their energy are not monitored: {exc}")
        self._sample()
        while not self._stop.wait(self._interval_s):
            self._sample()
        self._sample()
        if self._gpus is not None:
            self._gpus.close()
        if self._file is not None:
            self._file.close()

    def _sample(self) -> None:
        try:
            self._newest = self._measure()
            if self._file is not None:
                self._file.write(self._newest)
        except (OSError, RunDirError) as exc:  # system files that psutil reads, the disk
            self._report(f"sampling this node failed: {exc}")

    def _measure(self) -> dict[str, Any]:
        sample: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "node": self._node,
            "host": socket.gethostname(),
            **self._host.sample(),
        }
        joules = self._previous_starts_j
        if self._gpus is not None:
            sample["gpus"] = self._gpus.sample(self._clock())
            joules += sum(meter.joules or 0.0 for meter in self._gpus.meters)
            if any(meter.joules is not None for meter in self._gpus.meters):
                watts = sum(gpu.get("power_w", 0.0) for gpu in sample["gpus"])
                self._energy = (self._clock(), joules + self._other_nodes_j(), watts)
            if self._gpus.problem:
                self._report(self._gpus.problem)
        if joules:
            sample["energy_j"] = round(joules, 3)
        return sample | {"monitor_cpu_s": round(time.thread_time(), 4)}

    def _other_nodes_j(self) -> float:
        """Return the reported joules of the run's other nodes; 0 off rank 0."""
        others = [path for path in node_paths(self._run) if path != self._path] if self._world.rank == 0 else []
        return sum(read_last_object(path).get("energy_j", 0.0) for path in others)

    def _report(self, problem: str) -> None:
        if problem not in self._problems:
            self._problems.add(problem)
            with suppress(RunDirError):
                self._log(f"# monitor: {problem}")
