"""Target `slurm`: submission to a Slurm cluster and status of its jobs.

Sources of the status in order of precedence: launch directory, controller, accounting.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from lt_launch.errors import LaunchError
from lt_launch.job import Pipeline
from lt_launch.launch_dir_status import element_status, read_logs
from lt_launch.policy import Place
from lt_launch.profile import Profile
from lt_launch.slurm.commands import (
    STATES,
    QueueJob,
    parse_jobs,
    parse_nodes,
    parse_sacct,
    run_slurm_command,
    submit_chain,
)
from lt_launch.slurm.options import SlurmOptions
from lt_launch.target import Finding, Launch, LaunchTarget, RenderedLaunch, StageStatus, TargetNode

UNKNOWN_JOB_ERRORS = ("Invalid job id",)
NO_ACCOUNTING_ERRORS = ("accounting storage is disabled", "Slurm accounting", "Connection refused", "not running")
JOB_ID = re.compile("[0-9]+")
POLL_S = 1.0
ACTIVE_STATES = ("running", "pending", "requeued")
TERMINAL_STATES = ("completed", "failed", "cancelled", "lost", "skipped")


class SlurmTarget(LaunchTarget):
    """Launch target for a Slurm cluster."""

    name = "slurm"

    def render(self, pipeline: Pipeline, profile: Profile) -> RenderedLaunch:
        """Render one sbatch script per stage, and the commands that chain them."""
        from lt_launch.slurm.render import render

        return render(pipeline, profile)

    def submit(self, launch: Launch, rendered: RenderedLaunch, *, detach: bool) -> tuple[Mapping[str, str], int]:
        """Submit the scripts with sbatch."""
        folder = launch.directory / "rendered"
        for stage in launch.pipeline.stages:
            (launch.directory / "stages" / stage.name / "cancelled").unlink(missing_ok=True)
        names = [stage.name for stage in launch.pipeline.stages]
        return submit_chain(rendered.commands, names, folder), 0

    def status(self, launch: Launch) -> tuple[StageStatus, ...]:
        """Return the status of each stage and array element."""
        queue = {(job.id, job.index): job for job in self._query_jobs(launch.job_ids.values())}
        found: list[StageStatus] = []
        for stage in launch.pipeline.stages:
            for index in stage.array_indices:
                id_ = launch.job_ids.get(stage.name, "")
                job = queue.get((id_, index)) or queue.get((id_, None))
                place = Place(launch.directory / "stages" / stage.name / "spec.json", index)
                found.append(self._element_status(launch, place, id_, job))
        return tuple(found)

    def _element_status(self, launch: Launch, place: Place, id_: str, job: QueueJob | None) -> StageStatus:
        """Return the status from the controller for a queued job, from the launch directory for others."""
        state = STATES.get(job.state, "unknown") if job else None
        is_active = state in ACTIVE_STATES
        cancelled = (place.stage / "cancelled").exists()
        own = element_status(launch, place, is_running=is_active, cancelled=cancelled)
        own = replace(
            own, job_id=id_ if place.index is None else f"{id_}_{place.index}", nodes=_attempt_nodes(place, own.nodes)
        )
        if job is None:
            return own if own.state != "lost" and own.state != "pending" else self._sacct_status(own)
        if state == "pending":
            was_started = bool(place.attempts())
            return replace(own, state="requeued" if was_started else "pending", reason=job.reason or own.reason)
        if state == "running":
            return replace(own, state="running", reason="")
        if own.state in ("running", "pending", "lost", "requeued"):  # it ended without a record
            reason = job.reason or f"Slurm says {job.state}" + (f" ({job.exit_code})" if job.exit_code else "")
            final_state = "failed" if state == "unknown" or state is None else state
            return replace(own, state=final_state, reason=reason)
        return own

    def _sacct_status(self, own: StageStatus) -> StageStatus:
        """Return the accounting status of a job that the controller has purged and that left no record."""
        if not own.job_id:
            return own
        words = ("sacct", "-X", "-n", "-P", "-o", "JobID,State,ExitCode", "-j", own.job_id)
        text = run_slurm_command(*words, allowed_errors=NO_ACCOUNTING_ERRORS)
        state, code = parse_sacct(text).get(own.job_id, ("", ""))
        if not state:
            return replace(own, state="lost", reason="Slurm no longer knows the job, and it left no exit record")
        return replace(own, state=STATES.get(state, "unknown"), reason=f"sacct says {state} ({code})")

    def _query_jobs(self, ids: Iterable[str]) -> list[QueueJob]:
        jobs: list[QueueJob] = []
        for job_id in dict.fromkeys(ids):
            if not JOB_ID.fullmatch(job_id):
                raise LaunchError(
                    f"{job_id!r} in launch.json is no id of a Slurm job; launch again with the same --out"
                )
            jobs += parse_jobs(
                run_slurm_command("scontrol", "-o", "show", "job", job_id, allowed_errors=UNKNOWN_JOB_ERRORS)
            )
        return jobs

    def running_jobs(self, launch: Launch) -> str:
        """Return the jobs of an earlier launch that are still queued, or ""."""
        active = [job for job in self._query_jobs(launch.job_ids.values()) if STATES.get(job.state) in ACTIVE_STATES]
        return ", ".join(dict.fromkeys(f"job {job.id}" for job in active))

    def logs(self, launch: Launch, *, stage: str, rank: int, follow: bool) -> Iterator[str]:
        """Yield log lines from the attempts' folders."""

        def has_ended(place: Place) -> bool:
            return self._has_ended(launch, place)

        return read_logs(launch, stage=stage, rank=rank, follow=follow, has_ended=has_ended, poll_s=POLL_S)

    def _has_ended(self, launch: Launch, place: Place) -> bool:
        return (
            next(status.state for status in self.status(launch) if status.stage == place.folder.name) in TERMINAL_STATES
        )

    def cancel(self, launch: Launch) -> Iterable[str]:
        """Cancel pending jobs; signal running ones to save, without requeueing."""
        messages: list[str] = []
        for stage in reversed(launch.pipeline.stages):  # dependents first
            id_ = launch.job_ids.get(stage.name, "")
            if not id_:
                continue
            (launch.directory / "stages" / stage.name / "cancelled").touch()
            for job in self._query_jobs([id_]):
                state = STATES.get(job.state, "unknown")
                name = job.id if job.index is None else f"{job.id}_{job.index}"
                if state == "pending":
                    run_slurm_command("scancel", name, allowed_errors=("already",))
                    messages.append(f"{stage.name}: job {name} was pending and is removed")
                elif state == "running":
                    run_slurm_command("scancel", "--signal=USR1", "--batch", name, allowed_errors=("already",))
                    messages.append(f"{stage.name}: job {name} was signaled to save and stop")
        return messages or ["no job of it is in the queue"]

    def list(self, profile: Profile) -> Iterable[StageStatus]:
        """Return this user's jobs in the queue."""
        import getpass

        text = run_slurm_command("scontrol", "-o", "show", "job", allowed_errors=UNKNOWN_JOB_ERRORS)
        user = getpass.getuser()
        for job in parse_jobs(text):
            if job.fields.get("UserId", "").partition("(")[0] == user:
                yield StageStatus(
                    stage=job.fields.get("JobName", ""),
                    state=STATES.get(job.state, "unknown"),
                    job_id=job.id if job.index is None else f"{job.id}_{job.index}",
                    attempt=job.restarts,
                    exit_code=job.exit_code,
                    reason=job.reason,
                    nodes=(job.nodes,) if job.nodes else (),
                )

    def nodes(self, profile: Profile) -> Iterable[TargetNode]:
        """Return the nodes by partition with their states."""
        return parse_nodes(run_slurm_command("sinfo", "-h", "-N", "-o", "%N|%P|%T|%G|%E"))

    def doctor(self, profile: Profile, pipeline: Pipeline | None) -> Iterator[Finding]:
        """Check controller, partition, limits, shared folder, and that Slurm can schedule the run."""
        from lt_launch.slurm.doctor import findings

        return findings(self, profile, pipeline)

    def stage_specs(self, pipeline: Pipeline, profile: Profile, *, cwd: str) -> dict[str, dict[str, Any]]:
        """Return what the policy reads, by stage."""
        from lt_launch.spec import stage_spec

        excluded = ",".join(profile.options("slurm", SlurmOptions).exclude)
        return {stage.name: stage_spec(stage, pipeline, profile, cwd=cwd, never=excluded) for stage in pipeline.stages}


def _attempt_nodes(place: Place, default: tuple[str, ...]) -> tuple[str, ...]:
    """Return the nodes of the newest attempt, as recorded by the script."""
    attempts = place.attempts()
    if not attempts:
        return default
    file = place.attempt(attempts[-1]) / "slurm"
    try:
        words = file.read_text(encoding="utf-8").split()
    except OSError:
        return default
    return (words[2],) if len(words) == 3 else default
