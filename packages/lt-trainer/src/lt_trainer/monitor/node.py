"""The thread that samples a node, one per node, in its local rank 0; it ends with the run and never ends it.

Each sample is a line of `<run>/monitor/node00000.jsonl`:

    time, node, host, cpu_percent, memory_used_gib, memory_available_gib,
    disk_free_gib, disk, disk_read_mib_s, disk_write_mib_s,
    ranks: {"0": {rss_gib, cpu_percent, read_mib_s, write_mib_s}, ...}
    gpus: [{gpu, utilization_percent, memory_used_gib, memory_total_gib, power_w, temperature_c}, ...]
    energy_j: joules of this node's GPUs since the run's first start
    monitor_cpu_s: what this thread has cost since it began

Rank 0's thread also reads the last lines of the other nodes, for the energy of the whole run. What goes wrong is told
once per kind and kept in the rank's log; the samples go on without it.

The main thread only ever reads what the thread has left in its fields: it waits for no driver and no disk.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt_trainer.engine import World
from lt_trainer.errors import RunDirError
from lt_trainer.heartbeat import decode
from lt_trainer.jsonl import JsonlSink, last_object
from lt_trainer.monitor.energy import EnergyMeter
from lt_trainer.monitor.host import Host
from lt_trainer.monitor.nvml import Gpus, NoGpus, load_nvml
from lt_trainer.watchdog import heartbeat_path

if TYPE_CHECKING:
    from lt_trainer.journal import RankLog

FOLDER = "monitor"
LEAVE_S = 5.0
"""How long the end of a run waits for the thread: a driver that hangs must not keep it."""


def node_file(run: Path, node: int) -> Path:
    """Where the samples of a node lie."""
    return run / FOLDER / f"node{node:05}.jsonl"


def files(run: Path) -> list[Path]:
    """The files of all nodes that have ever had a part in a run."""
    return sorted((run / FOLDER).glob("node*.jsonl"))


class NodeMonitor:
    """Samples this node as long as the context lasts.

    Args:
        run: the run directory.
        world: this rank's place; it is local rank 0 of its node.
        attempt: the name of this start of the run, which heartbeats carry.
        interval_s: time between samples.
        log: where problems are kept.
        gpus: whether the run computes on GPUs, all those of its local ranks.
        nvml: gives the GPU library; raises NoGpus.
        environ: where CUDA_VISIBLE_DEVICES stands.
        clock: seconds, only differences count.
    """

    def __init__(
        self,
        run: Path,
        *,
        world: World,
        attempt: str,
        interval_s: float,
        log: RankLog,
        gpus: bool,
        nvml: Callable[[], Any] = load_nvml,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._world, self._attempt, self._interval_s = run, world, attempt, interval_s
        self._log, self._clock = log, clock
        self._node = world.rank // world.local_size
        self._path = node_file(run, self._node)
        self._nvml = nvml if gpus else None
        self._environ = environ
        self._gpus: Gpus | None = None
        self._meters: list[EnergyMeter] = []
        self._host = Host(run, clock=clock)
        self._sink: JsonlSink | None = None
        self._before_j = self._node_j = 0.0
        """Joules of this node in earlier starts of the run, and in all of them."""
        self._energy: tuple[float, float, float] | None = None
        """When, joules of the whole run up to then, and watts of this node's GPUs."""
        self._newest: dict[str, Any] = {}
        self._told: set[str] = set()
        self._untold: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="monitor", daemon=True)

    def joules(self) -> float | None:
        """Joules of all GPUs of the run since its first start, up to now; None where nobody counts them.

        Since the newest sample the power of that sample is taken, for the thread alone talks to the driver.
        """
        if self._energy is None:
            return None
        then_s, joules, watts = self._energy
        return joules + watts * max(self._clock() - then_s, 0.0)

    def scalars(self) -> dict[str, float]:
        """The newest sample as numbers by tag: "node/cpu_percent", "node/rank0/rss_gib", "node/gpu0/power_w"."""
        sample, found = self._newest, {}
        parts = {"": sample} | {f"rank{rank}/": values for rank, values in sample.get("ranks", {}).items()}
        parts |= {f"gpu{values['gpu']}/": values for values in sample.get("gpus", [])}
        for prefix, values in parts.items():
            for name, value in values.items():
                if isinstance(value, int | float) and name not in ("node", "gpu", "monitor_cpu_s"):
                    found[f"node{self._node}/{prefix}{name}"] = float(value)
        return found

    def problems(self) -> list[str]:
        """What went wrong since this was last asked, each kind once in a run; for the main thread."""
        found, self._untold = self._untold, []
        return found

    def __enter__(self) -> NodeMonitor:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join(LEAVE_S)

    def _watch(self) -> None:
        """The thread: open what is there, sample until the end, and once more at the end."""
        self._open()
        self._sample()
        while not self._stop.wait(self._interval_s):
            self._sample()
        self._sample()
        if self._gpus is not None:
            self._gpus.close()
        if self._sink is not None:
            with suppress(RunDirError):
                self._sink.close()

    def _open(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._before_j = self._node_j = float(last_object(self._path).get("energy_j", 0.0))
            self._sink = JsonlSink(self._path)
        except (OSError, RunDirError) as exc:
            self._problem("file", f"samples of this node are not kept: {exc}")
        if self._nvml is None:
            return
        try:
            self._gpus = Gpus(self._nvml(), count=self._world.local_size, environ=self._environ)
        except NoGpus as exc:
            self._problem("gpus", f"GPUs are not monitored, and their energy is not counted: {exc}")
            return
        self._meters = [EnergyMeter() for _ in range(len(self._gpus))]

    def _sample(self) -> None:
        found: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "node": self._node,
            "host": socket.gethostname(),
        }
        try:
            found |= self._host.sample(self._pids())
        except OSError as exc:  # psutil reads files of the system; a network file system may be away for a while
            self._problem("host", f"a sample of this node failed: {exc}")
        if self._gpus is not None:
            found |= self._gpu_sample(self._gpus)
        if self._node_j:
            found["energy_j"] = round(self._node_j, 3)
        found["monitor_cpu_s"] = round(time.thread_time(), 4)
        self._newest = found
        if self._sink is not None:
            try:
                self._sink.write(found)
            except RunDirError as exc:
                self._problem("file", f"samples of this node are not kept: {exc}")

    def _gpu_sample(self, gpus: Gpus) -> dict[str, Any]:
        shown, watts = [], 0.0
        for index, meter in enumerate(self._meters):
            now = gpus.sample(index)
            meter.read(self._clock(), now.counter_j, now.power_w)
            watts += now.power_w or 0.0
            values = {name: value for name, value in asdict(now).items() if value is not None and name != "counter_j"}
            shown.append({"gpu": index, **values})
        if gpus.problem:
            self._problem("gpu", f"{gpus.problem}")
        joules = [meter.joules for meter in self._meters if meter.joules is not None]
        if joules:
            self._node_j = self._before_j + sum(joules)
            self._energy = (self._clock(), self._node_j + self._elsewhere_j(), watts)
        return {"gpus": shown}

    def _elsewhere_j(self) -> float:
        """Joules of the run's other nodes, as far as they have told."""
        if self._world.rank != 0:
            return 0.0
        others = [path for path in files(self._run) if path != self._path]
        return sum(float(last_object(path).get("energy_j", 0.0)) for path in others)

    def _pids(self) -> dict[int, int]:
        """The processes of this node's ranks, from their heartbeats, without those that this process cannot see."""
        first = self._world.rank
        records = {}
        for rank in range(first, first + self._world.local_size):
            with suppress(OSError):
                record = decode(heartbeat_path(self._run, rank).read_bytes())
                if record is not None and record.attempt == self._attempt:
                    records[rank] = record
        here = records[first].machine if first in records else ""
        return {rank: record.pid for rank, record in records.items() if record.machine == here}

    def _problem(self, kind: str, text: str) -> None:
        if kind in self._told:
            return
        self._told.add(kind)
        self._untold.append(text)
        with suppress(RunDirError):
            self._log.write(f"# monitor: {text}")
