"""Launch directory `<out>/launch/`: the complete record of a launch, its inputs and what became of them.

    launch.json         name, target, job_ids, pipeline and profile values; when, where and by whom it was made
    rendered/           exactly what was sent
    stages/             what runs on the nodes, and its records (see `policy`)
    policy.py           our module that runs there (Slurm)
    launch.lock         held by the process that runs it, if the target has no queue

The folder is its owner's alone. The commit, its uncommitted changes and the environment of a training are in the run
directory, which lt-trainer writes.

Launching into the same folder resumes: completed stages are not repeated. Every launch is listed in
`$LT_LAUNCH_HOME/launches` (default ~/.local/state/lt-launch), one line per folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lt_launch.errors import LaunchError
from lt_launch.job import Pipeline
from lt_launch.policy import CANCELLED, write_table, write_text
from lt_launch.profile import Profile
from lt_launch.spec import launch_files
from lt_launch.target import Launch, RenderedLaunch
from lt_model.home_folder import expand_home
from lt_trainer.config.section import Given


def create(
    pipeline: Pipeline,
    profile: Profile,
    target: str,
    rendered: RenderedLaunch,
    specs: Mapping[str, Mapping[str, Any]],
) -> Launch:
    """Create the launch directory, or resume in an existing one.

    Args:
        pipeline: the pipeline to launch.
        profile: facts about the machines.
        target: name of the target.
        rendered: the files and commands to be sent.
        specs: by stage.

    Raises:
        LaunchError: the folder has other content, a running launch uses it, or it cannot be written.
    """
    root = Path(pipeline.out).absolute()
    directory = root / "launch"
    is_new = not (directory / "launch.json").exists()
    if is_new and directory.exists() and any(directory.iterdir()):
        raise LaunchError(
            f"{directory} is not a launch directory (it has no launch.json); choose another folder with --out"
        )
    if owner := lock_owner(directory):
        raise LaunchError(f"{root} is being launched by {owner}; wait for it, or lt launch cancel {root}")
    values = {
        "name": pipeline.name,
        "target": target,
        "created_at": time.time(),
        "host": socket.gethostname(),
        "cwd": os.getcwd(),
        "job_ids": {},
        "commands": rendered.commands,
        "profile": {name: given.value for name, given in profile.values.items()},
        "pipeline": pipeline.model_dump(mode="json"),
    }
    files = launch_files(pipeline, specs, target) | {f"rendered/{name}": text for name, text in rendered.files.items()}
    try:
        _register_launch(directory)
        if is_new:
            _create_run_dir(root, pipeline)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            write_text(directory / name, text)
        for stage in pipeline.stages:
            (directory / "stages" / stage.name / CANCELLED).unlink(missing_ok=True)
        write_table(directory / "launch.json", values)
    except OSError as exc:
        raise LaunchError(
            f"cannot write {exc.filename or directory}: {exc.strerror}; choose another folder with --out"
        ) from exc
    return Launch(directory=directory, target=target, pipeline=pipeline, profile=profile)


def save_job_ids(launch: Launch, ids: Mapping[str, str]) -> Launch:
    """Save the target's job ids by stage."""
    launch = replace(launch, job_ids={**launch.job_ids, **ids})
    file = launch.directory / "launch.json"
    write_table(file, json.loads(file.read_bytes()) | {"job_ids": dict(launch.job_ids)})
    return launch


def load_launch(path: str | Path) -> Launch:
    """Load the launch of a folder: its `out`, its `launch/`, or a name from `list_launch_dirs`.

    Raises:
        LaunchError: there is no such launch, or it is damaged.
    """
    directory = find_launch_dir(path)
    file = directory / "launch.json"
    try:
        values = json.loads(file.read_bytes())
        return Launch(
            directory=directory,
            target=values["target"],
            pipeline=Pipeline.model_validate(values["pipeline"]),
            profile=Profile(values={name: Given(value, str(file)) for name, value in values["profile"].items()}),
            job_ids=values["job_ids"],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise LaunchError(f"{file} is damaged ({exc}); launch again with the same --out") from exc


def find_launch_dir(path: str | Path) -> Path:
    """Return the launch directory of a path or a launch's name.

    Raises:
        LaunchError: there is no such launch, or several have the name.
    """
    for candidate in (Path(path), Path(path) / "launch"):
        if (candidate / "launch.json").is_file():
            return candidate.absolute()
    matches = [directory for directory in list_launch_dirs() if directory.parent.name == str(path)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise LaunchError(
            f"{path}: {len(matches)} launches have this name; give the path: {', '.join(map(str, matches))}"
        )
    raise LaunchError(f"{path}: no launch here; lt launch status lists yours")


def list_launch_dirs() -> list[Path]:
    """Return the existing launch directories of this user, oldest first."""
    try:
        lines = _launches_file().read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return []
    return [Path(line) for line in dict.fromkeys(lines) if Path(line, "launch.json").is_file()]


def _launches_file() -> Path:
    folder = os.environ.get("LT_LAUNCH_HOME") or "~/.local/state/lt-launch"
    return Path(expand_home(folder)) / "launches"


def _register_launch(directory: Path) -> None:
    file = _launches_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "a", encoding="utf-8", errors="surrogateescape") as listed:
            listed.write(f"{directory}\n")
    except OSError as exc:
        raise LaunchError(
            f"cannot write {file}: {exc.strerror}; it lists your launches: set LT_LAUNCH_HOME to a folder you can write"
        ) from exc


def _create_run_dir(root: Path, pipeline: Pipeline) -> None:
    """Initialize the folder of a training launch as a run directory, as lt-trainer requires."""
    if any(stage.job.is_training and Path(stage.job.run_dir).absolute() == root for stage in pipeline.stages):
        from lt_trainer.run_directory.run_dir import RunDir

        RunDir.open(root).close()


@contextmanager
def acquire_lock(launch: Launch) -> Iterator[None]:
    """Hold the lock of the process that runs this launch; the kernel ends it with the process.

    Raises:
        LaunchError: another process holds it.
    """
    with open(launch.directory / "launch.lock", "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = lock_owner(launch.directory)
            raise LaunchError(f"{launch.directory.parent} is being launched by {owner}; wait for it") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        file.flush()
        yield


def lock_owner(directory: Path) -> str:
    """Return the process that runs a launch ("process 12 on host"), or "" if none does."""
    try:
        with open(directory / "launch.lock", "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read(4096).decode("utf-8", "replace").strip() or "another process"
    except FileNotFoundError:
        pass
    return ""
