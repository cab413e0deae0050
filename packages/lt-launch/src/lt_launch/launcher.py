"""Submission of a pipeline to a target: render, check, create the launch directory, submit."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from lt_ckpt.terminal_text import echo, echo_error
from lt_launch import launch_dir
from lt_launch.errors import LaunchError
from lt_launch.job import Pipeline
from lt_launch.profile import Profile
from lt_launch.target import LaunchTarget, RenderedLaunch, get_target
from lt_trainer.errors import RecipeError


def launch(pipeline: Pipeline, profile: Profile, on: str) -> int:
    """Submit a pipeline to a target; say what to type next.

    Returns:
        The exit code of `lt launch run`.

    Raises:
        LaunchError: and RecipeError, before anything is written or sent.
    """
    target = get_target(on)
    rendered = target.render(pipeline, profile)
    missing = [name for stage in pipeline.stages for name in stage.job.pass_env if name not in os.environ]
    if missing:  # now instead of in the job, hours later on another machine
        remedy = f"export {missing[0]}, or leave it out"
        raise RecipeError(
            "is passed by name, but it is not set here", values={"job.pass_env": missing[0]}, remedy=remedy
        )
    specs = target.stage_specs(pipeline, profile)
    _check_not_running(target, Path(pipeline.out), on)
    made = launch_dir.create(pipeline, profile, on, rendered, specs)
    for note in rendered.notes:
        echo_error(f"# {note}")
    ids, code = target.submit(made, rendered)
    if ids:
        folder = made.directory.parent
        name = shlex.quote(folder.name)
        launch_dir.save_job_ids(made, ids)
        echo("".join(f"job {id_}: {stage}\n" for stage, id_ in ids.items()) + f"folder: {folder}")
        echo(f"next: lt launch status {name}, lt launch logs {name} --follow, lt launch cancel {name}")
    return code


def _check_not_running(target: LaunchTarget, out: Path, on: str) -> None:
    """Reject a launch into a folder with a running launch: each would treat the other's attempts as lost.

    Targets without a queue hold a lock; those with one report the jobs of an earlier launch (`running_jobs`).
    """
    if not (out / "launch" / "launch.json").exists():
        return
    earlier = launch_dir.load_launch(out)
    running = target.running_jobs(earlier) if earlier.target == on else ""
    if running:
        raise LaunchError(
            f"{out}: {running} of an earlier launch is still running; wait for it, or lt launch cancel {out}"
        )


def format_rendered(rendered: RenderedLaunch) -> str:
    """Format files and command lines for display; the text of files is unchanged."""
    blocks = ["==> {} <==\n{}\n".format(name, text.removesuffix("\n")) for name, text in rendered.files.items()]
    if rendered.commands:
        blocks.append(f"==> commands <==\n{_commands_text(rendered)}")
    if rendered.notes or rendered.comments:
        blocks.append("".join(f"# {text}\n" for text in (*rendered.notes, *rendered.comments)))
    return "\n".join(blocks)


def write_rendered(rendered: RenderedLaunch, folder: Path) -> None:
    """Write the files into a new folder, and the command lines into its `commands.sh`.

    Raises:
        LaunchError: the folder is there already, or a file cannot be written.
    """
    files = {**rendered.files, **({"commands.sh": _commands_text(rendered)} if rendered.commands else {})}
    try:
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise LaunchError(f"--output-dir {folder}: {exc.strerror}; give a new folder that can be created") from exc


def _commands_text(rendered: RenderedLaunch) -> str:
    return "".join(f"{shlex.join(command)}\n" for command in rendered.commands)
