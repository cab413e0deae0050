"""Interface of launch targets: a pure `render`, and methods that communicate with the target.

`render` turns a pipeline and a profile into text and command lines without side effects, so that `lt launch render`
prints exactly what `run` sends, and golden files can test it. The other methods (`submit`, `status`, `logs`, `cancel`)
act on a `Launch`: a launch directory with the values saved at its start. Targets are found by name and imported on
first use; a new one is a line in `profile.TARGETS`.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lt_launch.errors import LaunchError
from lt_launch.job import Pipeline
from lt_launch.profile import TARGETS, Profile
from lt_launch.spec import stage_spec

StageState = Literal["pending", "running", "completed", "failed", "requeued", "cancelled", "lost", "unknown"]
"""pending: submitted, not started; requeued: ended early with exit code 75, resumes; lost: no process runs it and there
is no record of its end."""


@dataclass(frozen=True, kw_only=True)
class RenderedLaunch:
    """Files and commands of a launch before submission."""

    files: Mapping[str, str]
    """Text by name; written below `<out>/launch/rendered/`, where the commands run."""
    commands: tuple[tuple[str, ...], ...] = ()
    """The command lines that submit them, in order. A word `{jobid:STAGE}` is replaced by the id printed when STAGE
    was submitted."""
    notes: tuple[str, ...] = ()
    """Sentences for the user: omissions, points to check."""
    comments: tuple[str, ...] = ()
    """Sentences that explain the text itself; `render` shows them, `run` does not."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A submitted pipeline, as saved in its launch directory (see `launch_dir.py`)."""

    directory: Path
    """`<out>/launch`."""
    target: str
    pipeline: Pipeline
    profile: Profile
    job_ids: Mapping[str, str] = field(default_factory=dict)
    """Id of each stage in the target, by stage name (a Slurm job id, a training job's name, a process id)."""


@dataclass(frozen=True, kw_only=True)
class StageStatus:
    """Status of one stage, or of one element of an array stage ("prepare.3")."""

    stage: str
    state: StageState
    job_id: str = ""
    attempt: int = 0
    exit_code: int | None = None
    """Exit code of the last attempt that ended."""
    reason: str = ""
    """Reason of the state: from the queue, the first failure, or the target's message."""
    nodes: tuple[str, ...] = ()
    since: float = 0.0
    """Time of the last state change, in seconds since 1970; 0 if unknown."""
    log_tail: tuple[str, ...] = ()
    """Last lines of rank 0, from targets whose run directory is not accessible."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check of `doctor`."""

    level: Literal["ok", "warning", "error"]
    check: str
    detail: str
    remedy: str = ""
    host: str = ""
    """The machine; empty = here."""


class LaunchTarget(ABC):
    """Launch target; construction is cheap and needs no network. What a target cannot do is refused here."""

    name: str

    @abstractmethod
    def render(self, pipeline: Pipeline, profile: Profile) -> RenderedLaunch:
        """Render the launch without side effects; reject what the target does not support."""

    def stage_specs(self, pipeline: Pipeline, profile: Profile) -> Mapping[str, Mapping[str, Any]]:
        """Return the specs by stage (`spec.stage_spec`)."""
        return {stage.name: stage_spec(stage, pipeline, profile) for stage in pipeline.stages}

    def capacity(self, profile: Profile) -> tuple[int, int]:
        """Return nodes and processes per node for a training that states neither; 0 where unknown."""
        return 0, 0

    def running_jobs(self, launch: Launch) -> str:
        """Return the unfinished jobs of an earlier launch, or ""; targets without a queue hold a lock instead."""
        return ""

    def submit(self, launch: Launch, rendered: RenderedLaunch) -> tuple[Mapping[str, str], int]:
        """Submit the launch; a target without a queue runs it to its end.

        Returns:
            The ids by stage, and the exit code of `lt launch run` (0 if the target runs it independently).
        """
        raise self._only_renders()

    def status(self, launch: Launch) -> tuple[StageStatus, ...]:
        """Return the status of each stage in pipeline order; the launch directory has precedence."""
        raise self._only_renders()

    def logs(self, launch: Launch, *, stage: str, rank: int, follow: bool) -> Iterator[str]:
        """Yield lines of one rank's output; with `follow` until the stage has ended."""
        raise self._only_renders()

    def cancel(self, launch: Launch) -> Iterable[str]:
        """Stop every stage, training within its grace period; return sentences on the actions."""
        raise self._only_renders()

    def doctor(self, profile: Profile, pipeline: Pipeline) -> Iterator[Finding]:
        """Check the target, and the requirements of the pipeline, which it has rendered."""
        yield from ()

    def _only_renders(self) -> LaunchError:
        return LaunchError(f"lt launch only renders for {self.name}; use the commands of {self.name} itself")


def get_target(name: str) -> LaunchTarget:
    """Import and return the target with that name.

    Raises:
        LaunchError: there is no such target.
    """
    if name not in TARGETS:
        raise LaunchError(f"--on {name}: no such target; the targets are {', '.join(TARGETS)}")
    return pkgutil.resolve_name(TARGETS[name])()
