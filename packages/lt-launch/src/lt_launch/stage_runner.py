"""Pipeline runner of targets without a queue: stages one after the other, with restarts.

Semantics equal those of the job chain on Slurm: a stage starts when all its predecessors have succeeded. A stage with a
current stamp is skipped. A failed stage prevents only its dependents; the next launch resumes there. Elements of an
array go round the hosts, as many at a time as their slots hold; those that use devices have a host for themselves. The
process that runs this holds the launch's lock.

Cost: one thread per element of an array that runs.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TextIO

from lt_launch import launch_dir, policy
from lt_launch.attempt import Attempt, Stop, Transport
from lt_launch.errors import LaunchError
from lt_launch.hosts import Host
from lt_launch.job import Stage
from lt_launch.job_output import format_lines
from lt_launch.policy import Place
from lt_launch.target import Launch

SKIPPED = "skipped"
SUCCESS_KINDS = (policy.DONE, SKIPPED)
STOPPED = {"kind": policy.STOPPED, "code": policy.REQUEUE}
MAX_BACKOFF_S = 30.0


class StageRunner:
    """Runner of the stages of a launch on some hosts.

    Args:
        launch: the launch.
        specs: specs by stage.
        transport: transport that reaches the hosts.
        hosts: in allocation order; a stage takes the first that were not lost.
        stop: stop request of the user.
    """

    def __init__(
        self,
        launch: Launch,
        specs: Mapping[str, Mapping[str, Any]],
        transport: Transport,
        hosts: Sequence[Host],
        stop: Stop,
    ) -> None:
        self.launch, self.specs, self.transport, self.hosts, self.stop = launch, specs, transport, hosts, stop
        self._lost: set[str] = set()
        """Names of hosts that are used only if too few others remain."""
        self._lock = threading.Lock()

    def run(self) -> int:
        """Run all stages; return 0, or the exit code of the first failure."""
        stages = self.launch.pipeline.stages
        for stage in stages:
            if (found := len(self._usable_hosts(stage))) < stage.job.nodes:
                with_slots = "" if found == len(self.hosts) else f" with {stage.job.procs_per_node} slots"
                needs = f"stage {stage.name} needs {stage.job.nodes} hosts{with_slots} and there are {found}"
                raise LaunchError(f"{needs}; lower nodes or add hosts")
        failures: dict[str, Mapping[str, Any]] = {}
        not_done: set[str] = set()
        with launch_dir.acquire_lock(self.launch):
            for stage in stages:  # in an order in which each follows its predecessors
                if missing := [name for name in stage.after if name in not_done]:
                    self._log(f"{stage.name}: not started, because {', '.join(missing)} did not succeed")
                    not_done.add(stage.name)
                    continue
                failed = [result for result in self._run_elements(stage) if result["kind"] not in SUCCESS_KINDS]
                if failed:
                    failures[stage.name] = failed[0]
                    not_done.add(stage.name)
                if self.stop.number and stage is not stages[-1]:
                    failures.setdefault(stage.name, STOPPED)
                    break
            name, result = next(iter(failures.items()), ("", {"code": 0, "kind": policy.DONE}))
            values = {"code": result["code"], "kind": result["kind"]} | ({"stage": name} if name else {})
            launch_dir.log_event(self.launch, "launch_ended", **values)
        return int(result["code"])

    def _usable_hosts(self, stage: Stage) -> list[Host]:
        """Return the hosts with slots enough, those that were lost last."""
        procs = stage.job.procs_per_node
        hosts = [host for host in self.hosts if host.slots == 0 or host.slots >= procs]
        return sorted(hosts, key=lambda host: host.name in self._lost)

    def _run_elements(self, stage: Stage) -> list[dict[str, Any]]:
        if not stage.array:
            return [self._run_element(stage, None)]
        job, hosts = stage.job, self._usable_hosts(stage)
        slots = max(1, job.resources.cpus_per_proc)
        places = {host.name: 1 if job.uses_devices else max(1, self.transport.slots(host) // slots) for host in hosts}
        free = {name: threading.Semaphore(count) for name, count in places.items()}
        at_once = min(sum(places.values()), stage.array_limit or stage.array)

        def run(index: int) -> dict[str, Any]:
            with free[hosts[index % len(hosts)].name]:
                return dict(STOPPED) if self.stop.number else self._run_element(stage, index)

        with ThreadPoolExecutor(max_workers=at_once) as pool:
            futures = [pool.submit(run, index) for index in range(stage.array)]
            while not all(future.done() for future in futures):
                time.sleep(0.1)  # wake up regularly: signal handlers run in the main thread only
            return [future.result() for future in futures]

    def _run_element(self, stage: Stage, index: int | None) -> dict[str, Any]:
        """Run one stage or element: skip it, or run attempts until success or the last failure."""
        spec = dict(self.specs[stage.name])
        place = Place(self.launch.directory / "stages" / stage.name / "spec.json", index)
        name = stage.name if index is None else f"{stage.name}.{index}"
        if policy.done(spec, place):
            self._log(f"{name}: completed already, skipped")
            launch_dir.log_event(self.launch, "skipped", stage=name)
            return {"kind": SKIPPED, "code": 0}
        backoff_s, launched = 1.0, True
        while True:
            hosts = self._usable_hosts(stage)
            if index is not None:
                hosts = hosts[index % len(hosts) :]
            result = self._run_attempt(stage, spec, place, name, hosts[: stage.job.nodes], launched=launched)
            launched = False
            if self.stop.number or result["kind"] not in policy.AGAIN:
                return result
            should_restart, reason = policy.should_requeue(spec, place)
            self._log(f"{name}: {reason}")
            if not should_restart:
                return result
            self._sleep(backoff_s)
            if self.stop.number:
                return dict(STOPPED)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _run_attempt(
        self, stage: Stage, spec: dict[str, Any], place: Place, name: str, hosts: Sequence[Host], *, launched: bool
    ) -> dict[str, Any]:
        number = policy.open_attempt(spec, place, launched=launched)
        launch_dir.log_event(
            self.launch, "attempt_started", stage=name, attempt=number, hosts=[host.name for host in hosts]
        )
        attempt = Attempt(
            spec=spec,
            place=place,
            number=number,
            hosts=hosts,
            nodes=[self.transport.open_node(host, spec, place.attempt(number)) for host in hosts],
            address=self.transport.address(hosts[0]),
            connect_timeout_s=self.transport.connect_timeout_s,
            env={variable: os.environ[variable] for variable in stage.job.pass_env if variable in os.environ},
            stop=self.stop,
            show=self._output_printer(name if stage.array else ""),
        )
        result = attempt.run()
        if stage.job.restart.exclude_bad_nodes:
            self._mark_lost_hosts(result)
        launch_dir.log_event(self.launch, "attempt_ended", stage=name, attempt=number, **_event_fields(result))
        if result["kind"] != policy.DONE:
            self._log(f"{name}: " + "\n".join(policy.report(result)))
        return result

    def _mark_lost_hosts(self, result: Mapping[str, Any]) -> None:
        first = result.get("first") or {}
        lost = [first["host"]] if result["kind"] == policy.LOST and first else result.get("hosts", [])
        self._lost.update(lost)

    def _output_printer(self, prefix: str) -> Any:
        def show(rank: int, text: str) -> None:
            head = f"[{prefix}] " if prefix else f"[{rank}] " if rank else ""
            self._write(sys.stdout, text, head)

        return show

    def _log(self, text: str) -> None:
        self._write(sys.stderr, text, "# ")

    def _write(self, stream: TextIO, text: str, prefix: str) -> None:
        """Write lines; a closed terminal must not end a long run."""
        with self._lock:
            try:
                stream.write(format_lines(text, stream, prefix))
                stream.flush()
            except OSError:
                devnull = os.open(os.devnull, os.O_WRONLY)
                os.dup2(devnull, stream.fileno())  # otherwise the final flush at exit fails again
                os.close(devnull)

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.stop.number:
            time.sleep(0.05)


def _event_fields(result: Mapping[str, Any]) -> dict[str, Any]:
    first = result.get("first") or {}
    return {
        "kind": result["kind"],
        "code": result["code"],
        "reason": result["reason"],
        "step": result["step"],
        "first": {name: first[name] for name in ("rank", "host", "code") if name in first},
    }
