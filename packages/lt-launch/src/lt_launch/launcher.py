"""Submission of a pipeline to a target: render, check, create the launch directory, submit."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from lt_launch.errors import LaunchError
from lt_launch.job import Pipeline
from lt_launch.profile import Profile
from lt_launch.target import LaunchTarget, RenderedLaunch, get_target
from lt_trainer.errors import RecipeError


def launch(pipeline: Pipeline, profile: Profile, on: str, *, detach: bool = False) -> int:
    """Submit a pipeline to a target.

    Returns:
        The exit code of `lt launch run`.

    Raises:
        LaunchError: and RecipeError, before anything is written or sent.
    """
    from lt_ckpt.terminal_text import echo_error
    from lt_launch import launch_dir

    target = get_target(on)
    rendered = target.render(pipeline, profile)
    _check_pass_env(pipeline)  # after render, since some targets reject pass_env altogether
    specs = target.stage_specs(pipeline, profile, cwd=os.getcwd())
    _check_not_running(target, Path(pipeline.out), on)
    new_launch = launch_dir.create(pipeline, profile, on, rendered, specs)
    for note in rendered.notes:
        echo_error(f"# {note}")
    ids, code = target.submit(new_launch, rendered, detach=detach)
    if ids:
        launch_dir.save_job_ids(new_launch, ids)
        from lt_ckpt.terminal_text import escape_controls

        sys.stdout.write(escape_controls(format_submitted(new_launch.directory.parent, ids)))
    return code


def format_submitted(folder: Path, ids: Mapping[str, str]) -> str:
    """Format the jobs that a target took, the folder of the launch, and the commands to type next.

    Example:
        >>> print(format_submitted(Path("/runs/llama"), {"train": "17"}), end="")
        job 17: train
        folder: /runs/llama
        next: lt launch status llama
              lt launch logs llama --follow
              lt launch cancel llama
    """
    name = shlex.quote(folder.name)
    rows = [f"job {id_}: {stage}" for stage, id_ in ids.items()]
    rows += [f"folder: {folder}", f"next: lt launch status {name}"]
    rows += [f"      lt launch {command}" for command in (f"logs {name} --follow", f"cancel {name}")]
    return "".join(f"{row}\n" for row in rows)


def _check_pass_env(pipeline: Pipeline) -> None:
    """Reject a missing `pass_env` variable now instead of in the job, hours later on another machine."""
    for stage in pipeline.stages:
        for name in stage.job.pass_env:
            if name not in os.environ:
                raise RecipeError(
                    "is passed by name, but it is not set here",
                    values={"job.pass_env": name},
                    remedy=f"export {name}, or leave it out",
                )


def _check_not_running(target: LaunchTarget, out: Path, on: str) -> None:
    """Reject a launch into a folder with a running launch: each would treat the other's attempts as lost.

    Targets without a queue hold a lock; those with one report the jobs of an earlier launch (`running_jobs`).
    """
    from lt_launch import launch_dir

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
    blocks = []
    for name, text in rendered.files.items():
        blocks.append(f"==> {name} <==\n{text}" + ("" if text.endswith("\n") else "\n"))
    if rendered.commands:
        blocks.append("==> commands <==\n" + "".join(f"{shlex.join(command)}\n" for command in rendered.commands))
    if rendered.notes or rendered.comments:
        blocks.append("".join(f"# {text}\n" for text in (*rendered.notes, *rendered.comments)))
    return "\n".join(blocks)


def write_rendered(rendered: RenderedLaunch, folder: Path) -> None:
    """Write the files into a new folder, and the command lines into its `commands.sh`.

    Raises:
        LaunchError: the folder is not empty, or a file cannot be written.
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
        raise LaunchError(f"--output-dir {folder}: exists already; give a new folder") from exc
    except OSError as exc:
        raise LaunchError(f"--output-dir {folder}: {exc.strerror}; give a folder that can be created") from exc
