"""Pipeline runner of targets without a queue: independent stages in parallel, with restarts.

Semantics equal those of the job chain on Slurm: a stage starts when all its predecessors have succeeded and hosts are
free (`scheduler`). A stage with a current stamp is skipped. A failed stage prevents only its dependents; the next
launch resumes there. The process that runs this holds the launch's lock.

Cost: one thread per stage, and one per array element that runs or waits for hosts.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TextIO

from lt_launch import launch_dir, policy
from lt_launch.attempt import Attempt, Stop, Transport
from lt_launch.hosts import Host
from lt_launch.job import Pipeline, Stage
from lt_launch.job_output import format_lines
from lt_launch.policy import Place
from lt_launch.scheduler import HostScheduler, resource_request
from lt_launch.target import Launch

__all__ = ["StageRunner", "has_parallel_stages"]

SKIPPED, NOT_STARTED = "skipped", "not started"
SUCCESS_KINDS = (policy.DONE, SKIPPED)
MAX_BACKOFF_S, POLL_S = 30.0, 0.2


class StageRunner:
    """Runner of the stages of a launch on some hosts.

    Args:
        launch: the launch.
        specs: specs by stage.
        transport: transport that reaches the hosts.
        hosts: in allocation order; a stage takes the first with free slots that were not lost.
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
        self.launch, self.specs, self.transport, self.stop = launch, specs, transport, stop
        self.scheduler = HostScheduler(hosts, transport.slots, transport.memory_gib)
        self._priorities = {stage.name: priority for priority, stage in enumerate(launch.pipeline.stages)}
        self._has_parallel_stages = has_parallel_stages(launch.pipeline)
        self._failures: list[tuple[str, dict[str, Any]]] = []
        """Failed stages with their results, in the order of their ends."""
        self._lock = threading.Lock()

    def run(self) -> int:
        """Run all stages; return 0, or the exit code of the first failure."""
        stages = self.launch.pipeline.stages
        for stage in stages:
            self.scheduler.check_feasible(stage.name, resource_request(stage.job))
        with launch_dir.acquire_lock(self.launch):
            futures: dict[str, Future[bool]] = {}
            with ThreadPoolExecutor(max_workers=len(stages)) as pool:  # each waits for its predecessors
                for stage in stages:
                    before = {name: futures[name] for name in stage.after}
                    futures[stage.name] = pool.submit(self._run_stage, stage, before)
                while wait(futures.values(), timeout=POLL_S).not_done:
                    pass  # wake up regularly: signal handlers run in the main thread only
            for future in futures.values():
                future.result()  # re-raise unexpected exceptions
            if self._failures:
                name, result = self._failures[0]
                launch_dir.log_event(self.launch, "launch_ended", stage=name, code=result["code"], kind=result["kind"])
                return int(result["code"])
            launch_dir.log_event(self.launch, "launch_ended", code=0, kind=policy.DONE)
        return 0

    def _run_stage(self, stage: Stage, before: Mapping[str, Future[bool]]) -> bool:
        """Run one stage after its predecessors have ended; return True if it succeeded."""
        missing = [name for name, future in before.items() if not future.result()]
        if missing:
            if not self.stop.number:
                self._log(f"{stage.name}: {NOT_STARTED}, because {', '.join(missing)} did not succeed")
            return False
        results = self._run_elements(stage)
        failed = [result for result in results if result["kind"] not in SUCCESS_KINDS]
        if failed:
            with self._lock:
                self._failures.append((stage.name, failed[0]))
        return not failed

    def _run_elements(self, stage: Stage) -> list[dict[str, Any]]:
        if not stage.array:
            return [self._run_element(stage, None)]
        slots = sum(max(1, self.transport.slots(host)) for host in self.scheduler.hosts)
        with ThreadPoolExecutor(max_workers=min(slots, stage.array_limit or slots, stage.array)) as pool:
            return list(pool.map(lambda index: self._run_element(stage, index), range(stage.array)))

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
        priority = (self._priorities[stage.name], index or 0)
        while True:
            with self.scheduler.acquire(
                priority, resource_request(stage.job, index), lambda: bool(self.stop.number)
            ) as hosts:
                if not hosts or self.stop.number:
                    return {"kind": policy.STOPPED, "code": policy.REQUEUE}
                result = self._run_attempt(stage, spec, place, name, hosts, launched=launched)
            launched = False
            if self.stop.number or result["kind"] not in policy.AGAIN:
                return result
            should_restart, reason = policy.should_requeue(spec, place)
            self._log(f"{name}: {reason}")
            if not should_restart:
                return result
            self._sleep(backoff_s)
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
            show=self._output_printer(name if stage.array or self._has_parallel_stages else ""),
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
        self.scheduler.lost_hosts.update(lost)

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


def has_parallel_stages(pipeline: Pipeline) -> bool:
    """Return True if the pipeline has two stages that do not depend on each other."""
    before: dict[str, set[str]] = {}
    for stage in pipeline.stages:
        before[stage.name] = set(stage.after).union(*(before[name] for name in stage.after))
    return any(
        len(before[stage.name]) < position  # topological order: at most `position` stages can precede it
        for position, stage in enumerate(pipeline.stages)
    )


def _event_fields(result: Mapping[str, Any]) -> dict[str, Any]:
    first = result.get("first") or {}
    return {
        "kind": result["kind"],
        "code": result["code"],
        "reason": result["reason"],
        "step": result["step"],
        "first": {name: first[name] for name in ("rank", "host", "code") if name in first},
    }
