"""Status and logs of stages, from the launch directory alone.

Local and ssh have no other source; Slurm falls back on it after the controller has purged a job. A stage's newest
attempt decides: by its exit.json, else by whether a process still runs the launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from lt_launch import launch_dir, policy
from lt_launch.errors import LaunchError
from lt_launch.job_output import LogTail
from lt_launch.policy import Place, read_table
from lt_launch.target import Launch, StageState, StageStatus

POLL_S = 0.2
STATES: dict[object, StageState] = {
    policy.DONE: "completed",
    policy.STOPPED: "requeued",
    policy.REQUEUED: "requeued",
    policy.LOST: "lost",
    policy.KILLED: "failed",
    policy.FAILED: "failed",
}
"""State by kind of ending, when no other attempt follows."""


def places_of(launch: Launch) -> list[Place]:
    """Return the folders of all stages and elements in pipeline order."""
    stages = launch.directory / "stages"
    return [
        Place(stages / stage.name / "spec.json", index)
        for stage in launch.pipeline.stages
        for index in stage.array_indices
    ]


def read_stage_statuses(launch: Launch) -> tuple[StageStatus, ...]:
    """Return the status of every stage and array element in pipeline order."""
    is_running = bool(launch_dir.lock_owner(launch.directory))
    return tuple(element_status(launch, place, is_running=is_running) for place in places_of(launch))


def element_status(launch: Launch, place: Place, *, is_running: bool) -> StageStatus:
    """Return the status of one stage or element from its folder."""
    attempts, cancelled = place.attempts(), (place.stage / policy.CANCELLED).exists()
    job_id = launch.job_ids.get(place.stage.name, "")
    if not attempts:
        state = "completed" if place.stamp.exists() else "cancelled" if cancelled and not is_running else "pending"
        reason = "" if is_running or state != "pending" else "not started"
        return StageStatus(stage=place.folder.name, state=state, job_id=job_id, reason=reason)
    folder = place.attempt(attempts[-1])
    file, hosts = folder / "exit.json", folder / "hosts"
    result = read_table(file) if file.exists() else None
    if not file.exists():
        state, reason = ("running", "") if is_running else ("lost", "the process that ran it is gone")
    elif result is None or result.get("kind") not in STATES:
        state, reason = "unknown", f"{file} is damaged"
    else:
        state, reason = STATES[result["kind"]], str(result.get("reason", ""))
        if cancelled and result["kind"] == policy.STOPPED:
            state = "cancelled"
        elif is_running and result["kind"] in policy.AGAIN:
            state = "requeued"
    return StageStatus(
        stage=place.folder.name,
        state=state,
        job_id=job_id,
        attempt=attempts[-1],
        exit_code=result.get("code") if result else None,
        reason=reason,
        nodes=tuple(hosts.read_text(encoding="utf-8").split()) if hosts.exists() else (),
        since=(file if file.exists() else folder).stat().st_mtime,
    )


def find_stage_dir(launch: Launch, name: str) -> Place:
    """Return the folder of a stage or element by name; for "" that of the most recently started one.

    Raises:
        LaunchError: there is no such stage, or no stage has started yet.
    """
    places = places_of(launch)
    if name:
        for place in places:
            if place.folder.name == name:
                return place
        known = ", ".join(place.folder.name for place in places[:20])
        raise LaunchError(f"--stage {name}: no such stage; the stages are {known}")
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
    tails: dict[int, LogTail] = {}
    while True:
        running = not has_ended(place) if has_ended else launch_dir.lock_owner(launch.directory)
        is_last = not follow or not running  # before the final read
        for number in place.attempts():
            tail = tails.setdefault(number, LogTail(policy.log_file(place.attempt(number), rank)))
            while lines := tail.read(is_last=is_last):
                yield from lines
        if is_last:
            return
        time.sleep(poll_s)
