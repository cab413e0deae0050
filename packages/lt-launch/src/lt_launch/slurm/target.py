"""Target `slurm`: submission to a Slurm cluster and status of its jobs.

Sources of the status in order of precedence: launch directory, controller, accounting.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from lt_launch.errors import LaunchError
from lt_launch.job import Pipeline
from lt_launch.launch_dir_status import element_status, read_logs
from lt_launch.policy import CANCELLED, Place
from lt_launch.profile import Profile
from lt_launch.slurm.commands import QUEUE, STATES, QueueJob, parse_queue, run_slurm_command
from lt_launch.slurm.options import SlurmOptions
from lt_launch.target import Finding, Launch, LaunchTarget, RenderedLaunch, StageStatus

UNKNOWN_JOB_ERRORS = ("Invalid job id",)
NO_ACCOUNTING_ERRORS = ("accounting storage is disabled", "Slurm accounting", "Connection refused", "not running")
POLL_S = 1.0
ACTIVE_STATES = ("running", "pending", "requeued")
TERMINAL_STATES = ("completed", "failed", "cancelled", "lost")


class SlurmTarget(LaunchTarget):
    """Launch target for a Slurm cluster."""

    name = "slurm"

    def render(self, pipeline: Pipeline, profile: Profile) -> RenderedLaunch:
        """Render one sbatch script per stage, and the commands that chain them.

        Raises:
            RecipeError: a time limit leaves no time to train.
        """
        from lt_launch.slurm.script import render_script

        options = profile.options("slurm", SlurmOptions)
        files, commands = {}, []
        for stage in pipeline.stages:
            files[f"{stage.name}.sbatch"] = render_script(stage, pipeline, profile, options)
            after = ",".join(f"afterok:{{jobid:{name}}}" for name in stage.after)
            dependency = [f"--dependency={after}"] if after else []
            commands.append(("sbatch", "--parsable", *dependency, f"{stage.name}.sbatch"))
        return RenderedLaunch(files=files, commands=tuple(commands))

    def submit(self, launch: Launch, rendered: RenderedLaunch) -> tuple[Mapping[str, str], int]:
        """Submit the scripts in order, each with the ids of its predecessors; a failure cancels those before it.

        Raises:
            LaunchError: Slurm rejects one; with Slurm's message.
        """
        ids: dict[str, str] = {}
        for stage, command in zip(launch.pipeline.stages, rendered.commands, strict=True):
            words = [re.sub(r"\{jobid:([^}]*)\}", lambda match: ids[match[1]], word) for word in command]
            try:
                answer = run_slurm_command(*words, cwd=launch.directory / "rendered")
            except LaunchError as exc:
                if ids:
                    run_slurm_command("scancel", *ids.values())
                cancelled = f"; the {len(ids)} stage(s) before it were cancelled" if ids else ""
                raise LaunchError(f"Slurm rejected stage {stage.name}: {exc}{cancelled}") from exc
            ids[stage.name] = answer.strip().rpartition("\n")[2].partition(";")[0]
        return ids, 0

    def status(self, launch: Launch) -> tuple[StageStatus, ...]:
        """Return the status of each stage and array element."""
        queue = {(job.id, job.element): job for job in _query_jobs(launch.job_ids.values())}
        found: list[StageStatus] = []
        for stage in launch.pipeline.stages:
            id_ = launch.job_ids.get(stage.name, "")
            for index in stage.array_indices:
                place = Place(launch.directory / "stages" / stage.name / "spec.json", index)
                found.append(_element_status(launch, place, id_, queue.get((id_, index))))
        return tuple(found)

    def running_jobs(self, launch: Launch) -> str:
        """Return the jobs of an earlier launch that are still queued, or ""."""
        active = [job.id for job in _query_jobs(launch.job_ids.values()) if job.state in ACTIVE_STATES]
        return ", ".join(f"job {id_}" for id_ in dict.fromkeys(active))

    def logs(self, launch: Launch, *, stage: str, rank: int, follow: bool) -> Iterator[str]:
        """Yield log lines from the attempts' folders."""

        def has_ended(place: Place) -> bool:
            states = {status.stage: status.state for status in self.status(launch)}
            return states[place.folder.name] in TERMINAL_STATES

        return read_logs(launch, stage=stage, rank=rank, follow=follow, has_ended=has_ended, poll_s=POLL_S)

    def cancel(self, launch: Launch) -> Iterable[str]:
        """Cancel pending jobs; signal running ones to save, without requeueing."""
        messages: list[str] = []
        for stage in reversed(launch.pipeline.stages):  # dependents first
            if not (id_ := launch.job_ids.get(stage.name, "")):
                continue
            (launch.directory / "stages" / stage.name / CANCELLED).touch()
            for job in _query_jobs([id_]):
                if job.state == "pending":
                    run_slurm_command("scancel", job.label, allowed_errors=("already",))
                    messages.append(f"{stage.name}: job {job.label} was pending and is removed")
                elif job.state == "running":
                    run_slurm_command("scancel", "--signal=USR1", "--batch", job.label, allowed_errors=("already",))
                    messages.append(f"{stage.name}: job {job.label} was signaled to save and stop")
        return messages or ["no job of it is in the queue"]

    def doctor(self, profile: Profile, pipeline: Pipeline) -> Iterator[Finding]:
        """Check controller, partition, limits, shared folder, and that Slurm can schedule the run."""
        from lt_launch.slurm.doctor import findings

        return findings(profile, pipeline, self.render(pipeline, profile).files)


def _query_jobs(ids: Iterable[str]) -> list[QueueJob]:
    """Return what the controller still knows of some jobs, also of those that have ended."""
    found = list(dict.fromkeys(ids))
    for id_ in found:
        if not re.fullmatch("[0-9]+", id_):
            raise LaunchError(f"{id_!r} in launch.json is no id of a Slurm job; launch again with the same --out")
    words = (*QUEUE, "-t", "all", "-j", ",".join(found))
    return parse_queue(run_slurm_command(*words, allowed_errors=UNKNOWN_JOB_ERRORS)) if found else []


def _element_status(launch: Launch, place: Place, id_: str, job: QueueJob | None) -> StageStatus:
    """Return the status from the controller for a queued job, from the launch directory for others."""
    is_active, attempts = job is not None and job.state in ACTIVE_STATES, place.attempts()
    own = element_status(launch, place, is_running=is_active)
    own = replace(own, job_id=id_ if place.index is None else f"{id_}_{place.index}")
    if attempts and (file := place.attempt(attempts[-1]) / "slurm").exists():
        own = replace(own, nodes=(file.read_text(encoding="utf-8").split()[-1],))
    if job is None:
        return _sacct_status(own) if own.state in ("lost", "pending") and id_ else own
    if job.state == "pending":
        return replace(own, state="requeued" if attempts else "pending", reason=job.reason)
    if job.state == "running":
        return replace(own, state="running", reason="")
    if own.state in ("running", "pending", "lost", "requeued"):  # it ended without a record
        return replace(own, state=job.state, reason=f"Slurm says {job.reason}")
    return own


def _sacct_status(own: StageStatus) -> StageStatus:
    """Return the accounting status of a job that the controller has purged and that left no record."""
    words = ("sacct", "-X", "-n", "-P", "-o", "State,ExitCode", "-j", own.job_id)
    said = run_slurm_command(*words, allowed_errors=NO_ACCOUNTING_ERRORS).partition("\n")[0]
    if not said:
        return replace(own, state="lost", reason="Slurm no longer knows the job, and it left no exit record")
    state = re.split("[ |]", said)[0]
    return replace(own, state=STATES.get(state, "unknown"), reason=f"sacct says {said}")
