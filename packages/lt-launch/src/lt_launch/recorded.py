"""How the stages of a launch stand and what they wrote, from the launch directory alone.

This is all that local and ssh have, and what Slurm falls back on when the controller has forgotten a job. A stage with
a stamp is done; otherwise its newest attempt decides: by its exit.json, else by whether somebody still runs the launch.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lt_launch import record
from lt_launch.agent.places import Place, Table, log_file, read_table
from lt_launch.backend import Launch, StageStatus, State
from lt_launch.errors import LaunchError

__all__ = ["element_status", "logs", "place_of", "status"]

POLL_S = 0.2
Fetch = Callable[[str, str, bool], list[str]]


def status(launch: Launch) -> tuple[StageStatus, ...]:
    """Every stage, and every element of an array, in the order of the pipeline."""
    alive = bool(record.holder(launch.directory))
    happened = record.events(launch)
    cancelled = _cancelled(happened)
    found = []
    for stage in launch.pipeline.stages:
        for index in stage.indexes:
            place = Place(launch.directory / "stages" / stage.name / "spec.json", index)
            found.append(element_status(launch, place, alive=alive, cancelled=cancelled, events=happened))
    return tuple(found)


def _cancelled(events: list[Table]) -> bool:
    """Whether a person's cancel is the last thing that was asked for."""
    asked = [event["event"] for event in events if event["event"] in ("made", "cancel")]
    return bool(asked) and asked[-1] == "cancel"


def element_status(
    launch: Launch, place: Place, *, alive: bool, cancelled: bool = False, events: list[Table] | None = None
) -> StageStatus:
    """One stage or element, from its folder."""
    name, attempts = place.folder.name, place.attempts()
    number = attempts[-1] if attempts else 0
    ended = read_table(place.attempt(number) / "exit.json") if attempts else None
    rows = [row for row in events or [] if row["event"] == "attempt" and row.get("stage") == name]
    hosts = tuple(rows[-1]["hosts"]) if rows else ()
    identity = launch.ids.get(name, launch.ids.get(name.rpartition(".")[0], ""))
    state, reason, since = _state(place, attempts, ended, alive=alive, cancelled=cancelled)
    return StageStatus(
        stage=name,
        state=state,
        id=identity,
        attempt=number,
        code=int(ended["code"]) if ended else None,
        reason=reason,
        nodes=hosts,
        since=since,
    )


def _state(
    place: Place, attempts: list[int], ended: Table | None, *, alive: bool, cancelled: bool
) -> tuple[State, str, float]:
    stamp = place.stamp
    if stamp.exists() and ((ended is None and not attempts) or (ended or {}).get("kind") == "done"):
        return "done", "", stamp.stat().st_mtime
    if not attempts:
        if cancelled and not alive:
            return "cancelled", "", 0.0
        return "waiting", "" if alive else "not begun", 0.0
    folder = place.attempt(attempts[-1])
    if ended is None:
        begun = folder.stat().st_mtime if not (folder / "key").exists() else (folder / "key").stat().st_mtime
        if alive:
            return "running", "", begun
        return "lost", "whoever ran it is gone", begun
    when, kind = (folder / "exit.json").stat().st_mtime, ended["kind"]
    reason = str(ended["reason"])
    if kind == "failed":
        return "failed", reason, when
    if kind == "done":  # its stamp is gone: what it made was removed
        return "done", "", when
    if cancelled and kind == "stopped":
        return "cancelled", reason, when
    if kind in ("stopped", "requeue"):
        return "requeued", reason, when
    if alive:
        return "requeued", reason, when
    return ("lost" if kind == "lost" else "failed"), reason, when


def place_of(launch: Launch, name: str) -> Place:
    """The place of a stage or element by name; of the one that began last when the name is empty.

    Raises:
        LaunchError: there is no such stage, or nothing has begun yet.
    """
    places = [
        Place(launch.directory / "stages" / stage.name / "spec.json", index)
        for stage in launch.pipeline.stages
        for index in stage.indexes
    ]
    if name:
        found = [place for place in places if place.folder.name == name]
        if not found:
            known = ", ".join(place.folder.name for place in places[:20])
            raise LaunchError(f"--stage {name}: there is no such stage; the stages are {known}")
        return found[0]
    begun = [(place.attempt(place.attempts()[-1]).stat().st_mtime, place) for place in places if place.attempts()]
    if not begun:
        raise LaunchError(f"{launch.directory.parent}: nothing has begun yet")
    return max(begun, key=lambda one: one[0])[1]


def logs(launch: Launch, *, stage: str, rank: int, follow: bool, fetch: Fetch | None = None) -> Iterator[str]:
    """Lines that a process wrote, those of all its attempts in order.

    Args:
        launch: whose.
        stage: a stage or an element; "" for the newest.
        rank: the process.
        follow: go on until the stage has ended.
        fetch: makes the command that reads a file on another host, where the host does not share the folder.

    Raises:
        LaunchError: no such stage, or no such process.
    """
    place = place_of(launch, stage)
    if fetch is not None and place.attempts():
        remote = _remote(launch, place, rank, follow, fetch)
        if remote is not None:
            yield from remote
            return
    spec = read_table(place.stage / "spec.json") or {}
    world = int(spec.get("nodes", 1)) * int(spec.get("procs_per_node", 1))
    if rank >= world:
        raise LaunchError(f"--rank {rank}: stage {place.folder.name} has ranks 0 to {world - 1}")
    yield from _local(launch, place, rank, follow)


def _remote(launch: Launch, place: Place, rank: int, follow: bool, fetch: Fetch) -> Iterator[str] | None:
    number = place.attempts()[-1]
    path = log_file(place.attempt(number), rank)
    if path.exists():
        return None
    spec = read_table(place.stage / "spec.json") or {}
    rows = [row for row in record.events(launch) if row["event"] == "attempt" and row["stage"] == place.folder.name]
    node = rank // int(spec.get("procs_per_node", 1))
    if not rows or node >= len(rows[-1]["hosts"]):
        return None
    return _output(fetch(rows[-1]["hosts"][node], str(path), follow))


def _output(command: list[str]) -> Iterator[str]:
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, errors="replace"
    ) as done:
        assert done.stdout is not None
        try:
            for line in done.stdout:
                yield line.rstrip("\n")
        finally:
            done.terminate()


def _local(launch: Launch, place: Place, rank: int, follow: bool) -> Iterator[str]:
    offsets: dict[Path, int] = {}
    partial: dict[Path, bytes] = {}
    while True:
        over = not follow or not record.holder(launch.directory)  # asked before the last look at the files
        for number in place.attempts():
            path = log_file(place.attempt(number), rank)
            data = _read_from(path, offsets.get(path, 0))
            offsets[path] = offsets.get(path, 0) + len(data)
            *rows, partial[path] = (partial.get(path, b"") + data).split(b"\n")
            if over and partial[path]:
                rows.append(partial[path])
            for row in rows:
                yield row.decode("utf-8", "replace")
        if over:
            return
        time.sleep(POLL_S)


def _read_from(path: Path, offset: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(offset, os.SEEK_SET)
            return file.read()
    except FileNotFoundError:
        return b""
