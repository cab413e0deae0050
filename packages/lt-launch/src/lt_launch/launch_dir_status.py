"""Status and logs of stages, from the launch directory alone.

Local and ssh have no other source; Slurm falls back on it after the controller has purged a job. A stage with a stamp
is complete; otherwise its newest attempt decides: by its exit.json, else by whether a process still runs the launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lt_launch import launch_dir, policy
from lt_launch.errors import LaunchError
from lt_launch.policy import Place, Table, log_file, read_table
from lt_launch.target import Launch, StageState, StageStatus

POLL_S = 0.2
KINDS = (policy.DONE, policy.STOPPED, policy.REQUEUED, policy.LOST, policy.KILLED, policy.FAILED)


def read_stage_statuses(launch: Launch) -> tuple[StageStatus, ...]:
    """Return the status of every stage and array element in pipeline order."""
    is_running = bool(launch_dir.lock_owner(launch.directory))
    events = launch_dir.read_events(launch)
    cancelled = _is_cancelled(events)
    statuses = []
    for stage in launch.pipeline.stages:
        for index in stage.array_indices:
            place = Place(launch.directory / "stages" / stage.name / "spec.json", index)
            statuses.append(element_status(launch, place, is_running=is_running, cancelled=cancelled, events=events))
    return tuple(statuses)


def _is_cancelled(events: list[Table]) -> bool:
    """Return True if the user's newest request is a cancellation."""
    requests = [event.get("event") for event in events if event.get("event") in ("created", "cancel_requested")]
    return bool(requests) and requests[-1] == "cancel_requested"


def element_status(
    launch: Launch, place: Place, *, is_running: bool, cancelled: bool = False, events: list[Table] | None = None
) -> StageStatus:
    """Return the status of one stage or element from its folder."""
    name, attempts = place.folder.name, place.attempts()
    number = attempts[-1] if attempts else 0
    result = read_table(place.attempt(number) / "exit.json") if attempts else None
    job_id = launch.job_ids.get(name, launch.job_ids.get(name.rpartition(".")[0], ""))
    state, reason, since = _element_state(place, attempts, result, alive=is_running, cancelled=cancelled)
    return StageStatus(
        stage=name,
        state=state,
        job_id=job_id,
        attempt=number,
        exit_code=result["code"] if result else None,
        reason=reason,
        nodes=_newest_hosts(events or [], name),
        since=since,
    )


def _newest_hosts(events: list[Table], name: str) -> tuple[str, ...]:
    """Return the hosts of the newest attempt of a stage or element; empty if none has started."""
    rows = [row for row in events if row.get("event") == "attempt_started" and row.get("stage") == name]
    return tuple(rows[-1].get("hosts", ())) if rows else ()


def _element_state(
    place: Place, attempts: list[int], result: Table | None, *, alive: bool, cancelled: bool
) -> tuple[StageState, str, float]:
    stamp = place.stamp
    if stamp.exists() and ((result is None and not attempts) or (result or {}).get("kind") == "done"):
        return "completed", "", stamp.stat().st_mtime
    if not attempts:
        if cancelled and not alive:
            return "cancelled", "", 0.0
        return "pending", "" if alive else "not started", 0.0
    folder = place.attempt(attempts[-1])
    if result is None:
        started_at = folder.stat().st_mtime if not (folder / "key").exists() else (folder / "key").stat().st_mtime
        if alive:
            return "running", "", started_at
        return "lost", "the process that ran it is gone", started_at
    ended_at, kind = (folder / "exit.json").stat().st_mtime, result.get("kind")
    reason = str(result.get("reason", ""))
    if kind not in KINDS:
        return "unknown", f"{folder / 'exit.json'} is damaged: kind = {repr(kind)[:80]}", ended_at
    if kind == "failed":
        return "failed", reason, ended_at
    if kind == "done":  # its stamp is missing: the outputs were removed
        return "completed", "", ended_at
    if cancelled and kind == "stopped":
        return "cancelled", reason, ended_at
    if kind in ("stopped", "requeued"):
        return "requeued", reason, ended_at
    if alive:
        return "requeued", reason, ended_at
    return ("lost" if kind == "lost" else "failed"), reason, ended_at


def find_stage_dir(launch: Launch, name: str) -> Place:
    """Return the folder of a stage or element by name; for "" that of the most recently started one.

    Raises:
        LaunchError: there is no such stage, or no stage has started yet.
    """
    places = [
        Place(launch.directory / "stages" / stage.name / "spec.json", index)
        for stage in launch.pipeline.stages
        for index in stage.array_indices
    ]
    if name:
        matches = [place for place in places if place.folder.name == name]
        if not matches:
            known = ", ".join(place.folder.name for place in places[:20])
            raise LaunchError(f"--stage {name}: no such stage; the stages are {known}")
        return matches[0]
    started = [(place.attempt(place.attempts()[-1]).stat().st_mtime, place) for place in places if place.attempts()]
    if not started:
        raise LaunchError(f"{launch.directory.parent}: no stage has started yet")
    return max(started, key=lambda item: item[0])[1]


def read_logs(
    launch: Launch,
    *,
    stage: str,
    rank: int,
    follow: bool,
    has_ended: Callable[[Place], bool] | None = None,
    poll_s: float = POLL_S,
) -> Iterator[str]:
    """Yield the output lines of one process, over all its attempts in order.

    Args:
        launch: the launch.
        stage: a stage or an element; "" for the newest.
        rank: rank of the process.
        follow: continue until the stage has ended.
        has_ended: tells so of a stage; default: when no process runs the launch.
        poll_s: seconds between two looks.

    Raises:
        LaunchError: no such stage, or no such process.
    """
    place = find_stage_dir(launch, stage)
    spec = read_table(place.stage / "spec.json") or {}
    world = spec.get("nodes", 1) * spec.get("procs_per_node", 1)
    if rank >= world:
        raise LaunchError(f"--rank {rank}: stage {place.folder.name} has ranks 0 to {world - 1}")
    offsets: dict[Path, int] = {}
    partial: dict[Path, bytes] = {}
    while True:
        running = not has_ended(place) if has_ended else launch_dir.lock_owner(launch.directory)
        is_last = not follow or not running  # before the final read
        for number in place.attempts():
            path = log_file(place.attempt(number), rank)
            data = launch_dir.read_log(path, offsets.get(path, 0))
            offsets[path] = offsets.get(path, 0) + len(data)
            *rows, partial[path] = (partial.get(path, b"") + data).split(b"\n")
            if is_last and partial[path]:
                rows.append(partial[path])
            for row in rows:
                yield row.decode("utf-8", "replace")
        if is_last:
            return
        time.sleep(poll_s)
