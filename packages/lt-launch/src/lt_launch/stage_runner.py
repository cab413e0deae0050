"""Stages of a launch on hosts, one after the other, with restarts.

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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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

    def _hosts(self, index: int | None = None) -> list[Host]:
        """Return the hosts for a stage or an element, those that were lost last."""
        hosts = sorted(self.hosts, key=lambda host: host.name in self._lost)
        first = (index or 0) % len(hosts)
        return hosts[first:] + hosts[:first]

    def _run_elements(self, stage: Stage) -> list[dict[str, Any]]:
        if not stage.array:
            return [self._run_element(stage, None)]
        width = max(1, stage.job.resources.cpus_per_proc)
        slots = {host.name: max(1, (host.slots or self._default_slots) // width) for host in self.hosts}
        if stage.job.uses_devices:
            slots = dict.fromkeys(slots, 1)
        free = {name: threading.Semaphore(count) for name, count in slots.items()}

        def run(index: int) -> dict[str, Any]:
            with free[self._hosts(index)[0].name]:
                return dict(STOPPED) if self.stop.number else self._run_element(stage, index)

        with ThreadPoolExecutor(max_workers=min(sum(slots.values()), stage.array_limit or stage.array)) as pool:
            futures = [pool.submit(run, index) for index in range(stage.array)]
            while not all(future.done() for future in futures):
                time.sleep(0.1)  # wake up regularly: signal handlers run in the main thread only
            return [future.result() for future in futures]

    def _run_element(self, stage: Stage, index: int | None) -> dict[str, Any]:
        """Run one stage or element: skip it, or run attempts until success or the last failure."""
        place = Place(self.launch.directory / "stages" / stage.name / "spec.json", index)
        name, backoff_s, launched = place.folder.name, 1.0, True
        spec = policy.read_table(place.stage / "spec.json")
        assert spec is not None
        if policy.done(spec, place):
            self._log(f"{name}: completed already, skipped")
            return {"kind": policy.DONE, "code": 0}
        while True:
            hosts = self._hosts(index)[: stage.job.nodes]
            number = policy.open_attempt(spec, place, launched=launched)
            policy.write_text(place.attempt(number) / "hosts", "".join(f"{host.name}\n" for host in hosts))
            env = {variable: os.environ[variable] for variable in stage.job.pass_env if variable in os.environ}
            show = self._printer(f"[{name}] " if stage.array else "")
            result = Attempt(
                spec=spec, place=place, number=number, hosts=hosts, env=env, stop=self.stop, show=show
            ).run()
            if result["kind"] != policy.DONE:
                self._log(f"{name}: " + "\n".join(policy.report(result)))
            if result["kind"] == policy.LOST and result["first"]:
                self._lost.add(result["first"]["host"])
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
