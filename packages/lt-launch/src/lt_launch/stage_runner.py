"""Stages of a launch on hosts, one after the other, with restarts.

Semantics equal those of the job chain on Slurm: a stage starts when all its predecessors have succeeded. A stage with a
current stamp is skipped. A failed stage prevents only its dependents; the next launch resumes there. Elements of an
array go round the hosts, as many at a time as their slots hold; those that use devices have a host for themselves. Each
attempt holds a slot of the host that it runs on, so one that follows the loss of a host waits for a slot of another.
The process that runs this holds the launch's lock.

Cost: one thread per element of an array that runs.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TextIO

from lt_launch import launch_dir, policy
from lt_launch.attempt import Attempt, Stop
from lt_launch.job import Stage
from lt_launch.job_output import format_lines
from lt_launch.node import Host
from lt_launch.policy import Place
from lt_launch.target import Launch

STOPPED = {"kind": policy.STOPPED, "code": policy.REQUEUE}
MAX_BACKOFF_S = 30.0
POLL_S = 0.1


class StageRunner:
    """Runner of the stages of a launch.

    Args:
        launch: the launch.
        hosts: in rank order; a stage takes the first that were not lost.
        stop: stop request of the user.
        default_slots: processes side by side on a host whose slots are unknown.
    """

    def __init__(self, launch: Launch, hosts: Sequence[Host], stop: Stop, default_slots: int) -> None:
        self.launch, self.hosts, self.stop, self._default_slots = launch, hosts, stop, default_slots
        self._lost: set[str] = set()
        """Names of hosts that are used only if too few others remain."""
        self._lock = threading.Lock()

    def run(self) -> int:
        """Run all stages; return 0, or the exit code of the first failure."""
        failures: dict[str, Mapping[str, Any]] = {}
        not_done: set[str] = set()
        with launch_dir.acquire_lock(self.launch):
            for stage in self.launch.pipeline.stages:  # in an order in which each follows its predecessors
                if self.stop.number:
                    failures.setdefault(stage.name, STOPPED)
                    break
                if missing := [name for name in stage.after if name in not_done]:
                    self._log(f"{stage.name}: not started, because {', '.join(missing)} did not succeed")
                    not_done.add(stage.name)
                elif failed := [one for one in self._run_elements(stage) if one["kind"] != policy.DONE]:
                    failures[stage.name] = failed[0]
                    not_done.add(stage.name)
        return int(next(iter(failures.values()))["code"]) if failures else 0

    def _run_elements(self, stage: Stage) -> list[dict[str, Any]]:
        width = max(1, stage.job.resources.cpus_per_proc)
        free = {host.name: max(1, (host.slots or self._default_slots) // width) for host in self.hosts}
        if stage.job.uses_devices:
            free = dict.fromkeys(free, 1)
        if not stage.array:
            return [self._run_element(stage, None, free)]
        with ThreadPoolExecutor(max_workers=min(sum(free.values()), stage.array_limit or stage.array)) as pool:
            futures = [pool.submit(self._run_element, stage, index, free) for index in range(stage.array)]
            while not all(future.done() for future in futures):
                time.sleep(POLL_S)  # wake up regularly: signal handlers run in the main thread only
            return [future.result() for future in futures]

    @contextmanager
    def _claim_hosts(self, stage: Stage, index: int | None, free: dict[str, int]) -> Iterator[list[Host]]:
        """Yield the hosts of one attempt; an array's element waits for a slot of its host and holds it meanwhile.

        Args:
            stage: the stage.
            index: index of the element; None = the stage is no array and has all slots.
            free: free slots by host, shared by the elements.

        Yields:
            The hosts in rank order, lost ones last; none if the user asked to stop while it waited.
        """
        if index is None:
            yield sorted(self.hosts, key=lambda host: host.name in self._lost)[: stage.job.nodes]
            return
        host = self._wait_for_slot(index, free)
        try:
            yield [host] if host else []
        finally:
            if host:
                with self._lock:
                    free[host.name] += 1

    def _wait_for_slot(self, index: int, free: dict[str, int]) -> Host | None:
        while not self.stop.number:
            hosts = [host for host in self.hosts if host.name not in self._lost] or self.hosts
            host = hosts[index % len(hosts)]  # again each time: it may have been lost meanwhile
            with self._lock:
                if free[host.name]:
                    free[host.name] -= 1
                    return host
            time.sleep(POLL_S)
        return None

    def _run_element(self, stage: Stage, index: int | None, free: dict[str, int]) -> dict[str, Any]:
        """Run one stage or element: skip it, or run attempts until success or the last failure."""
        place = Place(self.launch.directory / "stages" / stage.name / "spec.json", index)
        name, backoff_s, launched = place.folder.name, 1.0, True
        spec = policy.read_table(place.stage / "spec.json")
        assert spec is not None
        if policy.done(spec, place):
            self._log(f"{name}: completed already, skipped")
            return {"kind": policy.DONE, "code": 0}
        while True:
            with self._claim_hosts(stage, index, free) as hosts:
                if not hosts:
                    return dict(STOPPED)
                result = self._run_attempt(stage, spec, place, hosts, launched=launched)
            if result["kind"] != policy.DONE:
                self._log(f"{name}: " + "\n".join(policy.report(result)))
            if self.stop.number or result["kind"] not in policy.AGAIN:
                return result
            should_restart, reason = policy.should_requeue(spec, place)
            self._log(f"{name}: {reason}")
            if not should_restart:
                return result
            deadline, launched = time.monotonic() + backoff_s, False
            while time.monotonic() < deadline and not self.stop.number:
                time.sleep(0.05)
            if self.stop.number:
                return dict(STOPPED)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _run_attempt(
        self, stage: Stage, spec: policy.Table, place: Place, hosts: Sequence[Host], *, launched: bool
    ) -> policy.Table:
        number = policy.open_attempt(spec, place, launched=launched)
        policy.write_text(place.attempt(number) / "hosts", "".join(f"{host.name}\n" for host in hosts))
        env = {variable: os.environ[variable] for variable in stage.job.pass_env if variable in os.environ}
        show = self._printer(f"[{place.folder.name}] " if stage.array else "")
        attempt = Attempt(spec=spec, place=place, number=number, hosts=hosts, env=env, stop=self.stop, show=show)
        result = attempt.run()
        if result["kind"] == policy.LOST and result["first"]:
            self._lost.add(result["first"]["host"])  # while its slot is held: no other element takes it
        return result

    def _printer(self, prefix: str) -> Callable[[str], None]:
        return lambda text: self._write(sys.stdout, text, prefix)

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
