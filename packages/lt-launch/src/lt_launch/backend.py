"""What a target is: a pure `render`, and a thin rest that talks to the target.

`render` turns a pipeline and a profile into text and command lines and touches nothing, so that `lt launch render`
prints exactly what `run` sends, and golden files can hold it. The rest (`submit`, `status`, `logs`, `cancel`, `list`)
acts on a `Launch`: a launch directory with what was kept at the start. Backends are found by name and imported when
they are asked for; a new one is a line in `targets.BACKENDS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from lt_launch.errors import LaunchError
from lt_launch.targets import BACKENDS

if TYPE_CHECKING:
    from lt_launch.job import Pipeline
    from lt_launch.profile import Profile

__all__ = [
    "Backend",
    "Finding",
    "Launch",
    "Node",
    "Rendered",
    "StageStatus",
    "State",
    "backend",
]

State = Literal["waiting", "running", "done", "failed", "requeued", "cancelled", "skipped", "lost", "unknown"]
"""waiting: submitted, not begun; requeued: ended early with exit code 75 and will go on; lost: nobody runs it any more
and nobody said how it ended."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """What would be sent."""

    files: Mapping[str, str]
    """Text by name; they are written below `<out>/launch/rendered/` and the commands are run there."""
    commands: tuple[tuple[str, ...], ...] = ()
    """The command lines that submit them, in order. A word `{jobid:STAGE}` stands for the id that submitting STAGE
    printed; it is known only then."""
    notes: tuple[str, ...] = ()
    """Sentences for the person: what was left out, what to check."""
    remarks: tuple[str, ...] = ()
    """Sentences that explain the text itself; `render` shows them, `run` does not."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A pipeline that was sent to a target, as its launch directory remembers it (see `record.py`)."""

    directory: Path
    """`<out>/launch`."""
    backend: str
    pipeline: Pipeline
    profile: Profile
    ids: Mapping[str, str] = field(default_factory=dict)
    """What the target calls each stage, by stage name (a Slurm job id, a training job's name, a process id)."""


@dataclass(frozen=True, kw_only=True)
class StageStatus:
    """How one stage, or one element of an array stage ("prepare.3"), stands."""

    stage: str
    state: State
    id: str = ""
    attempt: int = 0
    code: int | None = None
    """Exit code of the last attempt that ended."""
    reason: str = ""
    """Why it stands so: a queue's reason, the first failure, a target's message."""
    nodes: tuple[str, ...] = ()
    since: float = 0.0
    """When it got there, in seconds since 1970; 0 where it is not known."""
    said: tuple[str, ...] = ()
    """The last lines of rank 0, of targets that keep the run directory out of reach."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine of a target."""

    name: str
    state: str
    """idle, allocated, mixed, down, drained, unreachable, ..."""
    partition: str = ""
    devices: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that `doctor` looked at."""

    level: Literal["ok", "warning", "wrong"]
    what: str
    found: str
    remedy: str = ""
    where: str = ""
    """The machine; empty = here."""


class Backend(Protocol):
    """A target. Making one costs nothing and needs no network."""

    name: str

    def render(self, pipeline: Pipeline, profile: Profile) -> Rendered:
        """What would be sent; pure. Refuses what the target cannot do."""
        ...

    def submit(self, launch: Launch, rendered: Rendered, *, detach: bool) -> tuple[Mapping[str, str], int]:
        """Send it. Targets that have no queue of their own run it to its end here, unless `detach`.

        Returns:
            The ids by stage, and the exit code of `lt launch run` (0 where the target goes on by itself).
        """
        ...

    def status(self, launch: Launch) -> tuple[StageStatus, ...]:
        """How each stage stands, in the order of the pipeline: own records first, then the target."""
        ...

    def logs(self, launch: Launch, *, stage: str, rank: int, follow: bool) -> Iterator[str]:
        """Lines of one rank's output; with `follow` until the stage has ended."""
        ...

    def cancel(self, launch: Launch) -> Iterable[str]:
        """Stop every stage, training with its grace time; sentences on what was done."""
        ...

    def list(self, profile: Profile) -> Iterable[StageStatus]:
        """What the target itself knows of this person's jobs, also those without a launch directory here."""
        ...

    def nodes(self, profile: Profile) -> Iterable[Node]:
        """The machines and their states."""
        ...

    def doctor(self, profile: Profile, pipeline: Pipeline | None) -> Iterator[Finding]:
        """What is missing or wrong before anything is spent; with a pipeline also what that one needs."""
        ...


def backend(name: str) -> Backend:
    """The backend of that name, imported now.

    Raises:
        LaunchError: there is none.
    """
    if name not in BACKENDS:
        raise LaunchError(f"--on {name}: there is no such target; the targets are {', '.join(BACKENDS)}")
    module, _, function = BACKENDS[name].factory.partition(":")
    return getattr(importlib.import_module(module), function)()
