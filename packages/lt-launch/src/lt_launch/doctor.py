"""Implementation of `lt launch doctor`: findings of a target with remedies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lt_launch.markup import escape
from lt_launch.profile import Profile, load_profile
from lt_launch.target import Finding, get_target

if TYPE_CHECKING:
    from lt_launch.run_file import RunFile

LEVEL_MARKUP = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "error": "[red]error[/]"}


def run_doctor(on: str, run_file: RunFile | None, profile: Path | None, hostfile: Path | None) -> int:
    """Print the findings; return 64 if one is a problem, else 0."""
    from rich.console import Console

    full_profile: Profile = (run_file.profile if run_file else load_profile(profile)).with_hostfile(hostfile)
    console, worst = Console(highlight=False, soft_wrap=True), "ok"
    for finding in _findings(on, full_profile, run_file):
        prefix = f"{finding.host}: " if finding.host else ""
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        console.print(f"{LEVEL_MARKUP[finding.level]} {escape(f'{prefix}{finding.check}: {finding.detail}{remedy}')}")
        worst = max(worst, finding.level, key=list(LEVEL_MARKUP).index)
    return 64 if worst == "error" else 0


def _findings(on: str, profile: Profile, run_file: RunFile | None):
    target = get_target(on)
    if run_file is not None:
        rendered = target.render(run_file.pipeline, profile)
        yield Finding(
            level="ok", check="render", detail=f"{len(rendered.files)} files, {len(rendered.commands)} commands"
        )
    yield from target.doctor(profile, run_file.pipeline if run_file else None)
