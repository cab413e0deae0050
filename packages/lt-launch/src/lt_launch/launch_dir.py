"""Launch directory `<out>/launch/`: the complete record of a launch, its inputs and its events.

    launch.json         format, name, target, job_ids, pipeline and profile values; when, where and by whom it was made
    rendered/           exactly what was sent
    stages/             what runs on the nodes, and its records (see `policy`)
    policy.py           our module that runs there (Slurm)
    events.jsonl        submissions, starts and ends of attempts, cancellations
    launch.lock         held by the process that runs it, if the target has no queue

These files may be read by their owner alone. The commit, its uncommitted changes and the environment of a training are
in the run directory, which lt-trainer writes.

Launching into the same folder resumes: completed stages are not repeated. Every launch is listed in
`$LT_LAUNCH_HOME/launches` (default ~/.local/state/lt-launch), one line per folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lt_launch.errors import LaunchError
from lt_launch.job import Pipeline
from lt_launch.process_start import process_start
from lt_launch.profile import Profile
from lt_launch.spec import launch_files
from lt_launch.target import Launch, RenderedLaunch
from lt_trainer.config.section import Given

FORMAT, VERSION = "lt-launch", 1


def create(
    pipeline: Pipeline,
    profile: Profile,
    target: str,
    rendered: RenderedLaunch,
    specs: Mapping[str, Mapping[str, Any]],
    *,
    out: Path | None = None,
) -> Launch:
    """Create the launch directory, or resume in an existing one.

    Args:
        pipeline: the pipeline to launch.
        profile: facts about the machines.
        target: name of the target.
        rendered: the files and commands to be sent.
        specs: by stage.
        out: the folder to use in place of `pipeline.out`.

    Raises:
        LaunchError: the folder has other content, a running launch uses it, or the list of
            launches cannot be written.
    """
    root = (out or Path(pipeline.out)).absolute()
    directory = root / "launch"
    file = directory / "launch.json"
    if directory.exists() and not file.exists() and any(directory.iterdir()):
        raise LaunchError(
            f"{directory} is not a launch directory (it has no launch.json); choose another folder with --out"
        )
    if file.exists() and lock_owner(directory):
        raise LaunchError(
            f"{root} is being launched by {lock_owner(directory)}; wait for it, or lt launch cancel {root}"
        )
    launch = Launch(directory=directory, target=target, pipeline=pipeline, profile=profile)
    files = launch_files(pipeline, specs, target) | {f"rendered/{name}": text for name, text in rendered.files.items()}
    files["launch.json"] = _launch_file(launch, rendered)
    _register_launch(directory)
    _create_run_dir(root, pipeline)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            _write(directory / name, text)
    except OSError as exc:
        raise LaunchError(
            f"cannot write {exc.filename or directory}: {exc.strerror}; choose another folder with --out"
        ) from exc
    log_event(launch, "created", target=target)
    return launch


def save_job_ids(launch: Launch, ids: Mapping[str, str]) -> Launch:
    """Save the target's job ids by stage."""
    launch = replace(launch, job_ids={**launch.job_ids, **ids})
    file = launch.directory / "launch.json"
    values = json.loads(file.read_bytes()) | {"job_ids": dict(launch.job_ids)}
    _write(file, json.dumps(values, indent=1, ensure_ascii=False) + "\n")
    log_event(launch, "submitted", job_ids=dict(ids))
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
        if values["format"] != FORMAT or values["version"] != VERSION:
            raise LaunchError(f"{file} has version {values.get('version')!r}; use the lt-launch that made it")
        assignments = {name: Given(value, "launch.json") for name, value in values["profile"].items()}
        return Launch(
            directory=directory,
            target=values["target"],
            pipeline=Pipeline.model_validate(values["pipeline"]),
            profile=Profile(values=assignments),
            job_ids=values["job_ids"],
        )
    except LaunchError:
        raise
    except PermissionError as exc:
        raise LaunchError(f"{file} may be read by its owner alone; ask the user who made the launch") from exc
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise LaunchError(f"{file} is damaged ({exc}); launch again with the same --out") from exc


def find_launch_dir(path: str | Path) -> Path:
    """Return the launch directory of a path, a launch name, or the id or name of one of its jobs.

    Raises:
        LaunchError: there is no such launch.
    """
    given = Path(path)
    for candidate in (given, given / "launch"):
        if (candidate / "launch.json").is_file():
            return candidate.absolute()
    listed = list_launch_dirs()
    matches = [directory for directory in listed if directory.parent.name == str(path)]
    names = {str(path), str(path).partition("_")[0]}  # an element of a Slurm array: ID_INDEX
    matches = matches or [directory for directory in listed if names & _job_names(directory)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise LaunchError(
            f"{path}: {len(matches)} launches have this name; give the path: {', '.join(map(str, matches))}"
        )
    raise LaunchError(f"{path}: no launch here; see lt launch list")


def _job_names(directory: Path) -> set[str]:
    """Return the ids and names that a target knows the jobs of a launch by."""
    try:
        values = json.loads((directory / "launch.json").read_bytes())
        name, ids = values["pipeline"]["name"], dict(values["job_ids"])
        return {name, *ids.values(), *(f"{name}-{stage}" for stage in ids)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()


def list_launch_dirs() -> list[Path]:
    """Return the existing launch directories of this user, oldest first."""
    try:
        lines = (state_dir() / "launches").read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return []
    paths = [Path(line) for line in dict.fromkeys(lines)]
    return [path for path in paths if (path / "launch.json").is_file()]


def state_dir() -> Path:
    """Return the folder that holds the list of launches."""
    return Path(os.environ.get("LT_LAUNCH_HOME") or Path.home() / ".local" / "state" / "lt-launch")


def log_event(launch: Launch, event: str, /, **values: Any) -> None:
    """Append an event with the UTC time; write errors are ignored."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    row = json.dumps({"time": now, "event": event, **values}, ensure_ascii=False)
    with (
        suppress(OSError),
        open(launch.directory / "events.jsonl", "a", encoding="utf-8", opener=_open_private) as file,
    ):
        file.write(row + "\n")


def read_log(path: Path, offset: int) -> bytes:
    """Return what a log has behind an offset; nothing where there is none yet.

    Raises:
        LaunchError: it cannot be read.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:  # a link leads out of the launch
            file.seek(offset)
            return file.read()
    except FileNotFoundError:
        return b""
    except OSError as exc:
        raise LaunchError(f"{path} cannot be read: {exc.strerror}") from exc


def read_events(launch: Launch) -> list[dict[str, Any]]:
    """Return all events of the launch."""
    from lt_launch.policy import read_lines

    return read_lines(launch.directory / "events.jsonl")


@contextmanager
def acquire_lock(launch: Launch) -> Iterator[None]:
    """Hold the lock of the process that runs this launch.

    Raises:
        LaunchError: another process holds it.
    """
    try:
        descriptor = os.open(launch.directory / "launch.lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as exc:
        raise LaunchError(f"cannot use {exc.filename}: {exc.strerror}; choose another folder with --out") from exc
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = lock_owner(launch.directory) or "another process"
            raise LaunchError(
                f"{launch.directory.parent} is being launched by {owner}; wait for it, or cancel it"
            ) from None
        os.ftruncate(descriptor, 0)
        pid = os.getpid()
        os.write(descriptor, f"process {pid} on {socket.gethostname()} since {process_start(pid)}\n".encode())
        yield
    finally:
        os.close(descriptor)


def lock_owner(directory: Path) -> str:
    """Return the process that runs a launch ("process 12 on host since START"), or "" if none does."""
    try:
        with open(directory / "launch.lock", "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read(4096).decode("utf-8", "replace").strip() or "another process"
    except OSError:
        pass
    return ""


def _launch_file(launch: Launch, rendered: RenderedLaunch) -> str:
    values = {
        "format": FORMAT,
        "version": VERSION,
        "name": launch.pipeline.name,
        "target": launch.target,
        "created_at": time.time(),
        "host": socket.gethostname(),
        "cwd": os.getcwd(),
        "job_ids": {},
        "commands": [list(command) for command in rendered.commands],
        "profile": launch.profile.to_dict(),
        "pipeline": launch.pipeline.model_dump(mode="json"),
    }
    return json.dumps(values, indent=1, ensure_ascii=False) + "\n"


def _create_run_dir(root: Path, pipeline: Pipeline) -> None:
    """Initialize the folder of a training launch as a run directory, as lt-trainer requires."""
    if any(stage.job.is_training and Path(stage.job.run_dir).absolute() == root for stage in pipeline.stages):
        from lt_trainer.run_directory.run_dir import RunDir

        if not (root / "launch").exists():
            RunDir.open(root).close()


def _register_launch(directory: Path) -> None:
    file = state_dir() / "launches"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "a", encoding="utf-8", errors="surrogateescape") as listed:
            listed.write(f"{directory}\n")
    except OSError as exc:
        raise LaunchError(
            f"cannot write {file}: {exc.strerror}; it lists your launches: set LT_LAUNCH_HOME to a folder you can write"
        ) from exc


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with open(temporary, "x", encoding="utf-8", errors="surrogateescape", opener=_open_private) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
