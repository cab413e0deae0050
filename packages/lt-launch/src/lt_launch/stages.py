"""A pipeline on targets without a queue: stages in order, arrays side by side, attempts until done or given up.

A stage whose stamp is current is skipped. One that fails ends the pipeline (elements of its array that run are not
disturbed); launching again goes on there. The process that does this holds the launch's lock.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TextIO

from lt_launch import record
from lt_launch.agent import main as agent_main
from lt_launch.agent import stamp, verdict
from lt_launch.agent.places import Place
from lt_launch.backend import Launch
from lt_launch.conduct import Attempt, Stop, Transport
from lt_launch.errors import LaunchError
from lt_launch.hosts import Host
from lt_launch.job import Stage
from lt_launch.spec import launch_files

__all__ = ["Stages", "stop_signals"]

SKIPPED = "skipped"
LONGEST_WAIT_S = 30.0


class Stages:
    """Runs the stages of a launch on some hosts.

    Args:
        launch: what.
        specs: of each stage.
        transport: how hosts are reached.
        hosts: in allocation order; a stage takes the first that it needs and that were not lost.
        stop: what the person wants.
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
        self._lock = threading.Lock()
        self._files = launch_files(launch.pipeline, specs) if transport.carries_files else {}

    def run(self) -> int:
        """All stages; 0, or the exit code of the first that did not succeed."""
        with record.hold(self.launch):
            for stage in self.launch.pipeline.stages:
                results = self._elements(stage)
                bad = [result for result in results if result["kind"] not in (verdict.DONE, SKIPPED)]
                if bad:
                    record.event(self.launch, "ended", stage=stage.name, code=bad[0]["code"], kind=bad[0]["kind"])
                    return int(bad[0]["code"])
            record.event(self.launch, "ended", code=0, kind=verdict.DONE)
        return 0

    def _elements(self, stage: Stage) -> list[dict[str, Any]]:
        if not stage.array:
            return [self._element(stage, None)]
        room = stage.array_limit or max(1, len(self.hosts) if len(self.hosts) > 1 else os.cpu_count() or 1)
        with ThreadPoolExecutor(max_workers=min(room, stage.array)) as pool:
            return list(pool.map(lambda index: self._element(stage, index), range(stage.array)))

    def _element(self, stage: Stage, index: int | None) -> dict[str, Any]:
        """One stage, or one element: skip it, or try until done or given up."""
        spec = dict(self.specs[stage.name])
        place = Place(self.launch.directory / "stages" / stage.name / "spec.json", index)
        name = stage.name if index is None else f"{stage.name}.{index}"
        if stamp.done(spec, place):
            self._say(f"{name}: done already, skipped")
            record.event(self.launch, "skipped", stage=name)
            return {"kind": SKIPPED, "code": 0}
        waited = 1.0
        while True:
            if self.stop.number:
                return {"kind": verdict.STOPPED, "code": verdict.REQUEUE}
            result = self._attempt(stage, spec, place, name)
            if self.stop.number or result["kind"] not in verdict.AGAIN:
                return result
            yes, why = verdict.again(spec, place, result)
            self._say(f"{name}: {why}")
            if not yes:
                return result
            self._wait(waited)
            waited = min(2 * waited, LONGEST_WAIT_S)

    def _attempt(self, stage: Stage, spec: dict[str, Any], place: Place, name: str) -> dict[str, Any]:
        number = place.new_attempt()
        key = stamp.key(spec, place)
        (place.attempt(number) / "key").write_text(key, encoding="ascii")
        hosts = self._hosts(stage, place.index)
        record.event(self.launch, "attempt", stage=name, attempt=number, hosts=[host.name for host in hosts])
        attempt = Attempt(
            spec=spec,
            place=place,
            number=number,
            hosts=hosts,
            transport=self.transport,
            files={k: v for k, v in self._files.items() if k.startswith(("agent/", f"stages/{stage.name}/"))},
            env={variable: os.environ[variable] for variable in stage.job.pass_env if variable in os.environ},
            stop=self.stop,
            show=self._shower(name if stage.array else ""),
        )
        result = attempt.run()
        verdict.keep(place, number, result)
        result = agent_main.finish(spec, place, number, result)
        if stage.job.restart.exclude_bad_nodes:
            self._note_lost(result)
        record.event(self.launch, "attempt_ended", stage=name, attempt=number, **_short(result))
        if result["kind"] != verdict.DONE:
            self._say(f"{name}: {verdict.report(result)}")
        return result

    def _hosts(self, stage: Stage, index: int | None) -> list[Host]:
        """The hosts of an attempt, in allocation order; lost ones only where too few others are left."""
        good = [host for host in self.hosts if host.name not in self._lost]
        pool = good if len(good) >= stage.job.nodes else list(self.hosts)
        if len(pool) < stage.job.nodes:
            raise LaunchError(
                f"stage {stage.name} needs {stage.job.nodes} hosts and there are {len(pool)}; lower nodes or add hosts"
            )
        if index is not None:
            return [pool[index % len(pool)]]
        return pool[: stage.job.nodes]

    def _note_lost(self, result: Mapping[str, Any]) -> None:
        first = result.get("first") or {}
        lost = [first["host"]] if result["kind"] == verdict.LOST and first else result.get("hosts", [])
        self._lost.update(lost)

    def _shower(self, prefix: str) -> Any:
        def show(rank: int, text: str) -> None:
            head = f"[{prefix}] " if prefix else f"[{rank}] " if rank else ""
            self._write(sys.stdout, "".join(f"{head}{line}\n" for line in text.splitlines()))

        return show

    def _say(self, text: str) -> None:
        self._write(sys.stderr, "".join(f"# {line}\n" for line in text.splitlines()))

    def _write(self, stream: TextIO, text: str) -> None:
        """Show text as long as somebody reads: a closed terminal must not end a run of weeks."""
        with self._lock:
            try:
                stream.write(text)
                stream.flush()
            except OSError:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())  # else flushing what is left fails once more at the exit
                os.close(nowhere)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.stop.number:
            time.sleep(0.05)


def _short(result: Mapping[str, Any]) -> dict[str, Any]:
    first = result.get("first") or {}
    return {
        "kind": result["kind"],
        "code": result["code"],
        "reason": result["reason"],
        "step": result["step"],
        "first": {name: first[name] for name in ("rank", "host", "code") if name in first},
    }


@contextmanager
def stop_signals(stop: Stop) -> Any:
    """Stop signals go to `stop` while this lasts."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    before = {n: signal.signal(n, stop.note) for n in numbers if not (ignored and n == signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
