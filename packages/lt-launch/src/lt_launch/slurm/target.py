"""The target `slurm`: a thin rest around the scripts. Own records decide first, then the controller, then accounts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lt_launch.agent.places import Place, log_file
from lt_launch.backend import Finding, Launch, Node, Rendered, StageStatus
from lt_launch.job import Pipeline
from lt_launch.profile import Profile
from lt_launch.recorded import element_status, place_of
from lt_launch.slurm.queue import STATES, QueueJob, ask, jobs_of, nodes_of, sacct_states, submit

__all__ = ["SlurmBackend"]

FORGOTTEN = ("Invalid job id",)
NO_ACCOUNTS = ("accounting storage is disabled", "Slurm accounting", "Connection refused", "not running")
POLL_S = 1.0
DEAF = [
    "trap '' TERM USR1 USR2 HUP",
    "export PET_SIGNALS_TO_HANDLE=SIGINT TORCHELASTIC_SIGNALS_TO_HANDLE=SIGINT",
]
"""Slurm signals every process of a step, some signals twice, and torchrun ends its wait for the ranks at the second.
So torchrun hears none of them; its ranks hear them from Slurm, save, and leave with 75, which torchrun waits for."""
ALIVE = ("running", "waiting", "requeued")
ENDED = ("done", "failed", "cancelled", "lost", "skipped")


class SlurmBackend:
    """Jobs on a Slurm cluster."""

    name = "slurm"

    def render(self, pipeline: Pipeline, profile: Profile) -> Rendered:
        """One sbatch script for each stage, and the commands that chain them."""
        from lt_launch.slurm.render import render

        return render(pipeline, profile)

    def submit(self, launch: Launch, rendered: Rendered, *, detach: bool) -> tuple[Mapping[str, str], int]:
        """Hand the scripts to sbatch; the cluster goes on by itself."""
        folder = launch.directory / "rendered"
        for stage in launch.pipeline.stages:
            (launch.directory / "stages" / stage.name / "cancelled").unlink(missing_ok=True)
        names = [stage.name for stage in launch.pipeline.stages]
        return submit(rendered.commands, names, folder), 0

    def status(self, launch: Launch) -> tuple[StageStatus, ...]:
        """Each stage and each element of an array."""
        queue = {(job.id, job.index): job for job in self._queue(launch.ids.values())}
        found: list[StageStatus] = []
        for stage in launch.pipeline.stages:
            for index in stage.indexes:
                id_ = launch.ids.get(stage.name, "")
                job = queue.get((id_, index)) or queue.get((id_, None))
                place = Place(launch.directory / "stages" / stage.name / "spec.json", index)
                found.append(self._one(launch, place, id_, job))
        return tuple(found)

    def _one(self, launch: Launch, place: Place, id_: str, job: QueueJob | None) -> StageStatus:
        """What the controller says about a job that has not ended, and own records about all that have."""
        state = STATES.get(job.state, "unknown") if job else None
        alive = state in ALIVE
        cancelled = (place.stage / "cancelled").exists()
        own = element_status(launch, place, alive=alive, cancelled=cancelled)
        own = replace(own, id=id_ if place.index is None else f"{id_}_{place.index}", nodes=_nodes(place, own.nodes))
        if job is None:
            return own if own.state != "lost" and own.state != "waiting" else self._accounted(own)
        if state == "waiting":
            again = bool(place.attempts())
            return replace(own, state="requeued" if again else "waiting", reason=job.reason or own.reason)
        if state == "running":
            return replace(own, state="running", reason="")
        if own.state in ("running", "waiting", "lost", "requeued"):  # it ended before it could say how
            reason = job.reason or f"Slurm says {job.state}" + (f" ({job.exit_code})" if job.exit_code else "")
            final = "failed" if state == "unknown" or state is None else state
            return replace(own, state=final, reason=reason)
        return own

    def _accounted(self, own: StageStatus) -> StageStatus:
        """What the accounts say of a job that the controller has forgotten and that left no word."""
        if not own.id:
            return own
        text = ask("sacct", "-X", "-n", "-P", "-o", "JobID,State,ExitCode", "-j", own.id, allow=NO_ACCOUNTS)
        state, code = sacct_states(text).get(own.id, ("", ""))
        if not state:
            return replace(own, state="lost", reason="Slurm has forgotten the job, and it left no record of its end")
        return replace(own, state=STATES.get(state, "unknown"), reason=f"accounts say {state} ({code})")

    def _queue(self, ids: Iterable[str]) -> list[QueueJob]:
        found: list[QueueJob] = []
        for one in dict.fromkeys(ids):
            found += jobs_of(ask("scontrol", "-o", "show", "job", one, allow=FORGOTTEN))
        return found

    def running(self, launch: Launch) -> str:
        """Jobs of an earlier launch that are still in the queue; "" where there are none."""
        alive = [job for job in self._queue(launch.ids.values()) if STATES.get(job.state) in ALIVE]
        return ", ".join(dict.fromkeys(f"job {job.id}" for job in alive))

    def logs(self, launch: Launch, *, stage: str, rank: int, follow: bool) -> Iterator[str]:
        """From the attempts' folder; before there is one, what Slurm wrote for the script."""
        place = place_of(launch, stage)
        offsets: dict[Path, int] = {}
        while True:
            over = not follow or self._ended(launch, place)
            for number in place.attempts():
                path = log_file(place.attempt(number), rank)
                yield from _new_lines(path, offsets, last=over)
            if over:
                return
            time.sleep(POLL_S)

    def _ended(self, launch: Launch, place: Place) -> bool:
        return next(one.state for one in self.status(launch) if one.stage == place.folder.name) in ENDED

    def cancel(self, launch: Launch) -> Iterable[str]:
        """Waiting jobs are removed; running ones get the warning that lets training save, and do not come back."""
        done: list[str] = []
        for stage in reversed(launch.pipeline.stages):  # what waits for another goes first
            id_ = launch.ids.get(stage.name, "")
            if not id_:
                continue
            (launch.directory / "stages" / stage.name / "cancelled").touch()
            for job in self._queue([id_]):
                state = STATES.get(job.state, "unknown")
                name = job.id if job.index is None else f"{job.id}_{job.index}"
                if state == "waiting":
                    ask("scancel", name, allow=("already",))
                    done.append(f"{stage.name}: job {name} was waiting and is removed")
                elif state == "running":
                    ask("scancel", "--signal=USR1", "--batch", name, allow=("already",))
                    done.append(f"{stage.name}: job {name} was told to save and stop")
        return done or ["nothing of it is in the queue"]

    def list(self, profile: Profile) -> Iterable[StageStatus]:
        """This person's jobs in the queue."""
        import getpass

        text = ask("scontrol", "-o", "show", "job", allow=FORGOTTEN)
        me = getpass.getuser()
        for job in jobs_of(text):
            if job.fields.get("UserId", "").partition("(")[0] == me:
                yield StageStatus(
                    stage=job.fields.get("JobName", ""),
                    state=STATES.get(job.state, "unknown"),
                    id=job.id if job.index is None else f"{job.id}_{job.index}",
                    attempt=job.restarts,
                    code=job.exit_code,
                    reason=job.reason,
                    nodes=(job.nodes,) if job.nodes else (),
                )

    def nodes(self, profile: Profile) -> Iterable[Node]:
        """Nodes by partition with their states."""
        return nodes_of(ask("sinfo", "-h", "-N", "-o", "%N|%P|%T|%G|%E"))

    def doctor(self, profile: Profile, pipeline: Pipeline | None) -> Iterator[Finding]:
        """Controller, partition, limits, shared folder, and whether Slurm could ever run it."""
        from lt_launch.slurm.doctor import findings

        return findings(self, profile, pipeline)

    def specs(self, pipeline: Pipeline, profile: Profile, *, cwd: str) -> dict[str, dict[str, Any]]:
        """What the agents get, by stage."""
        from lt_launch.spec import spec

        made = {stage.name: spec(stage, pipeline, profile, cwd=cwd) for stage in pipeline.stages}
        for stage in pipeline.stages:
            if stage.job.spawner == "torchrun":
                made[stage.name]["setup"] += DEAF
        return made


def _nodes(place: Place, otherwise: tuple[str, ...]) -> tuple[str, ...]:
    """Where the newest attempt ran, as the script noted it."""
    attempts = place.attempts()
    if not attempts:
        return otherwise
    file = place.attempt(attempts[-1]) / "slurm"
    words = file.read_text(encoding="utf-8").split() if file.exists() else []
    return (words[2],) if len(words) == 3 else otherwise


def _new_lines(path: Path, offsets: dict[Path, int], *, last: bool) -> Iterator[str]:
    """Whole lines that were appended since the last look; with the last look also one without an end."""
    try:
        with open(path, "rb") as file:
            file.seek(offsets.get(path, 0))
            data = file.read()
    except FileNotFoundError:
        return
    whole = data if last else data[: data.rfind(b"\n") + 1]
    offsets[path] = offsets.get(path, 0) + len(whole)
    yield from (line.decode("utf-8", "replace") for line in whole.removesuffix(b"\n").split(b"\n") if whole)
