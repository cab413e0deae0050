"""A pipeline on targets without a queue: what does not wait for another runs side by side, attempts until done.

It means what the chain of jobs means on Slurm: a stage begins when all that it comes after have succeeded, and as soon
as there is room (`room`). A stage whose stamp is current is skipped. One that fails keeps those behind it from
beginning and disturbs no other; launching again goes on there. The process that does this holds the launch's lock.

Cost: a thread for each stage, and one for each element of an array that runs or waits for room.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TextIO

from lt_launch import record
from lt_launch.agent import main as agent_main
from lt_launch.agent import stamp, verdict
from lt_launch.agent.places import Place
from lt_launch.backend import Launch
from lt_launch.conduct import Attempt, Stop, Transport
from lt_launch.hosts import Host
from lt_launch.job import Pipeline, Stage
from lt_launch.room import Room, need_of
from lt_launch.spec import launch_files

__all__ = ["Stages", "side_by_side", "stop_signals"]

SKIPPED, NOT_BEGUN = "skipped", "not begun"
GOOD = (verdict.DONE, SKIPPED)
LONGEST_WAIT_S, POLL_S = 30.0, 0.2


class Stages:
    """Runs the stages of a launch on some hosts.

    Args:
        launch: what.
        specs: of each stage.
        transport: how hosts are reached.
        hosts: in allocation order; a stage takes the first that have room for it and were not lost.
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
        self.launch, self.specs, self.transport, self.stop = launch, specs, transport, stop
        self.room = Room(hosts, transport.places, transport.memory_gib)
        self._turns = {stage.name: turn for turn, stage in enumerate(launch.pipeline.stages)}
        self._mixed = side_by_side(launch.pipeline)
        self._bad: list[tuple[str, dict[str, Any]]] = []
        """Stages that did not succeed and how, in the order in which they ended."""
        self._lock = threading.Lock()
        self._files = launch_files(launch.pipeline, specs) if transport.carries_files else {}

    def run(self) -> int:
        """All stages; 0, or the exit code of the first that did not succeed."""
        stages = self.launch.pipeline.stages
        for stage in stages:
            self.room.check(stage.name, need_of(stage.job))
        with record.hold(self.launch):
            futures: dict[str, Future[bool]] = {}
            with ThreadPoolExecutor(max_workers=len(stages)) as pool:  # all at once: each waits for those before it
                for stage in stages:
                    before = {name: futures[name] for name in stage.after}
                    futures[stage.name] = pool.submit(self._stage, stage, before)
                while wait(futures.values(), timeout=POLL_S).not_done:
                    pass  # a signal that another thread gets is only seen here when this one runs
            for future in futures.values():
                future.result()  # raises what no stage should have raised
            if self._bad:
                name, result = self._bad[0]
                record.event(self.launch, "ended", stage=name, code=result["code"], kind=result["kind"])
                return int(result["code"])
            record.event(self.launch, "ended", code=0, kind=verdict.DONE)
        return 0

    def _stage(self, stage: Stage, before: Mapping[str, Future[bool]]) -> bool:
        """One stage when those before it have ended; whether it has succeeded."""
        missing = [name for name, future in before.items() if not future.result()]
        if missing:
            if not self.stop.number:
                self._say(f"{stage.name}: {NOT_BEGUN}, for {', '.join(missing)} did not succeed")
            return False
        results = self._elements(stage)
        bad = [result for result in results if result["kind"] not in GOOD]
        if bad:
            with self._lock:
                self._bad.append((stage.name, bad[0]))
        return not bad

    def _elements(self, stage: Stage) -> list[dict[str, Any]]:
        if not stage.array:
            return [self._element(stage, None)]
        room = sum(max(1, self.transport.places(host)) for host in self.room.hosts)
        with ThreadPoolExecutor(max_workers=min(room, stage.array_limit or room, stage.array)) as pool:
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
        waited, launched = 1.0, True
        turn = (self._turns[stage.name], index or 0)
        while True:
            with self.room.take(turn, need_of(stage.job, index), lambda: bool(self.stop.number)) as hosts:
                if not hosts or self.stop.number:
                    return {"kind": verdict.STOPPED, "code": verdict.REQUEUE}
                result = self._attempt(stage, spec, place, name, hosts, launched=launched)
            launched = False
            if self.stop.number or result["kind"] not in verdict.AGAIN:
                return result
            yes, why = verdict.again(spec, place, result)
            self._say(f"{name}: {why}")
            if not yes:
                return result
            self._wait(waited)
            waited = min(2 * waited, LONGEST_WAIT_S)

    def _attempt(
        self, stage: Stage, spec: dict[str, Any], place: Place, name: str, hosts: Sequence[Host], *, launched: bool
    ) -> dict[str, Any]:
        number = place.new_attempt(launched=launched)
        key = stamp.key(spec, place)
        (place.attempt(number) / "key").write_text(key, encoding="ascii")
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
            show=self._shower(name if stage.array or self._mixed else ""),
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

    def _note_lost(self, result: Mapping[str, Any]) -> None:
        first = result.get("first") or {}
        lost = [first["host"]] if result["kind"] == verdict.LOST and first else result.get("hosts", [])
        self.room.lost.update(lost)

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


def side_by_side(pipeline: Pipeline) -> bool:
    """Whether there are stages of which neither waits for the other."""
    before: dict[str, set[str]] = {}
    for stage in pipeline.stages:
        before[stage.name] = set(stage.after).union(*(before[name] for name in stage.after))
    return any(
        len(before[stage.name]) < at  # stages stand in an order that fits; so `at` stages could be before it
        for at, stage in enumerate(pipeline.stages)
    )


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
