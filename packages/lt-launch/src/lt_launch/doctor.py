"""`lt launch doctor`: what a target found, as a list with remedies, and what the run would cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lt_launch.backend import Finding, backend
from lt_launch.profile import Profile, load_profile

if TYPE_CHECKING:
    from lt_launch.runfile import RunFile

__all__ = ["examine"]

SIGNS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "wrong": "[red]wrong[/]"}


def examine(on: str, wanted: RunFile | None, profile: Path | None, hostfile: Path | None) -> int:
    """Print what was found; 64 when something is wrong, else 0."""
    from rich.console import Console
    from rich.markup import escape

    mine: Profile = (wanted.profile if wanted else load_profile(profile)).with_hostfile(hostfile)
    console, worst = Console(highlight=False, soft_wrap=True), "ok"
    for finding in _findings(on, mine, wanted):
        where = f"{finding.where}: " if finding.where else ""
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        console.print(f"{SIGNS[finding.level]} {escape(f'{where}{finding.what}: {finding.found}{remedy}')}")
        worst = max(worst, finding.level, key=list(SIGNS).index)
    return 64 if worst == "wrong" else 0


def _findings(on: str, profile: Profile, wanted: RunFile | None):
    from lt_launch.costs import estimate

    target = backend(on)
    if wanted is not None:
        rendered = target.render(wanted.pipeline, profile)
        yield Finding(
            level="ok", what="render", found=f"{len(rendered.files)} files, {len(rendered.commands)} commands"
        )
    yield from target.doctor(profile, wanted.pipeline if wanted else None)
    if wanted is not None:
        yield from estimate(wanted.pipeline, profile)
