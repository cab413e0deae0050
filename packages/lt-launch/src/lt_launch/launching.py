"""From a pipeline to a launch: plan what need not run, keep what is sent, send it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lt_launch.backend import Rendered, backend
from lt_launch.errors import LaunchError
from lt_launch.job import Pipeline
from lt_launch.profile import Profile
from lt_trainer.errors import RecipeError

__all__ = ["as_text", "launch", "specs_of", "write_rendered"]


def launch(pipeline: Pipeline, profile: Profile, on: str, *, detach: bool = False) -> int:
    """Send a pipeline to a target.

    Returns:
        The exit code of `lt launch run`.

    Raises:
        LaunchError: and RecipeError, before anything is written or sent.
    """
    from lt_launch import record

    target = backend(on)
    rendered = target.render(pipeline, profile)
    _refuse_unset(pipeline)  # after what refuses every variable by name
    specs = specs_of(target, pipeline, profile, cwd=os.getcwd())
    _refuse_running(target, Path(pipeline.out), on)
    made = record.create(pipeline, profile, on, rendered, specs)
    for note in rendered.notes:
        sys.stderr.write(f"# {note}\n")
    ids, code = target.submit(made, rendered, detach=detach)
    if ids:
        record.remember(made, ids)
    return code


def _refuse_unset(pipeline: Pipeline) -> None:
    """A variable that is not there would be missed by the job alone, hours later and on another machine."""
    for stage in pipeline.stages:
        for name in stage.job.pass_env:
            if name not in os.environ:
                raise RecipeError(
                    "is handed on by name, and there is no such variable here",
                    values={"job.pass_env": name},
                    remedy=f"export {name}, or leave it out",
                )


def _refuse_running(target: Any, out: Path, on: str) -> None:
    """Two launches into one folder at a time would take each other's attempts for lost ones.

    Targets without a queue hold a lock; those with one say what of an earlier launch is still there (`running`).
    """
    from lt_launch import record

    if not hasattr(target, "running") or not (out / "launch" / "launch.json").exists():
        return
    before = record.open_launch(out)
    alive = target.running(before) if before.backend == on else ""
    if alive:
        raise LaunchError(f"{out}: {alive} of an earlier launch still goes on; wait for it, or lt launch cancel {out}")


def specs_of(target: Any, pipeline: Pipeline, profile: Profile, *, cwd: str) -> Mapping[str, Mapping[str, Any]]:
    """What the agents of a target get, by stage: the target's own `specs` where it has such, else the plain ones."""
    from lt_launch.spec import spec

    if hasattr(target, "specs"):
        return target.specs(pipeline, profile, cwd=cwd)
    return {stage.name: spec(stage, pipeline, profile, cwd=cwd) for stage in pipeline.stages}


def as_text(rendered: Rendered) -> str:
    """Files and command lines for people; a file's text is not changed."""
    blocks = []
    for name, text in rendered.files.items():
        blocks.append(f"==> {name} <==\n{text}" + ("" if text.endswith("\n") else "\n"))
    if rendered.commands:
        blocks.append("==> commands <==\n" + "".join(f"{shlex.join(command)}\n" for command in rendered.commands))
    if rendered.notes or rendered.remarks:
        blocks.append("".join(f"# {text}\n" for text in (*rendered.notes, *rendered.remarks)))
    return "\n".join(blocks)


def write_rendered(rendered: Rendered, folder: Path) -> None:
    """Write the files into a new folder, and the command lines into `commands.sh` there.

    Raises:
        LaunchError: something is there already, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True)
        for name, text in rendered.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        if rendered.commands:
            lines = "".join(f"{shlex.join(command)}\n" for command in rendered.commands)
            (folder / "commands.sh").write_text(lines, encoding="utf-8")
    except FileExistsError as exc:
        raise LaunchError(f"--to {folder}: there is something already; give a new folder") from exc
    except OSError as exc:
        raise LaunchError(f"--to {folder}: {exc.strerror}; give a folder that can be made") from exc
