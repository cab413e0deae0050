"""What is kept of a launch, in `<out>/launch/`, so that a person can tell later what ran and with what.

    launch.json         format, name, backend, ids, pipeline and profile values; when, where and by whom it was made
    rendered/           exactly what was sent
    agent/  stages/     what runs on the nodes, and what it notes (see `agent`)
    git.json diff.patch the commit of the working folder and all that is not committed in it
    environment.json    versions of packages, the machine, variables by allow-list; never others: they hold secrets
    events.jsonl        submitted, attempts begun and ended, cancelled
    launch.lock         held by the process that runs it, where the target has no queue of its own

Launching again into the same folder goes on in it: stages that are done stay done. Every launch is listed in
`$LT_LAUNCH_HOME/launches` (default ~/.local/state/lt-launch), one line for each folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lt_launch.backend import Launch, Rendered
from lt_launch.errors import LaunchError
from lt_launch.job import Container, Job, Pipeline, Resources, Restart, Stage, as_table
from lt_launch.profile import Profile
from lt_launch.spec import launch_files
from lt_trainer.resolve import Given

__all__ = ["create", "event", "events", "find", "hold", "holder", "known", "open_launch", "remember"]

FORMAT, VERSION = "lt-launch", 1
PRIVATE = re.compile(
    r"(^|/)(\.env(rc|\..*)?|\.(pg|ht)pass(wd)?|.*\.(pem|key|p12|pfx|kdbx)|id_(rsa|dsa|ecdsa|ed25519)|.*credential.*|.*secret.*|\.netrc"
    r"|\.npmrc|\.pypirc|.*token(\.txt)?)$",
    re.IGNORECASE,
)
"""Files that are listed by name alone, whether git knows them or not."""
PATCH = ["--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/"]
"""So that a patch applies anywhere, whatever the person has set for looking at differences."""
UNTRACKED_LIMIT = 1 << 20
"""Bytes of an untracked file that are kept at most; larger ones are listed by name."""


def create(
    pipeline: Pipeline,
    profile: Profile,
    backend: str,
    rendered: Rendered,
    specs: Mapping[str, Mapping[str, Any]],
    *,
    out: Path | None = None,
) -> Launch:
    """Make the launch directory, or go on in the one that is there.

    Args:
        pipeline: what is launched.
        profile: with which facts.
        backend: where.
        rendered: what will be sent.
        specs: what the agents get, by stage.
        out: the folder to use in place of `pipeline.out`.

    Raises:
        LaunchError: the folder holds something else, or is in use by a running launch.
    """
    root = (out or Path(pipeline.out)).absolute()
    directory = root / "launch"
    file = directory / "launch.json"
    if directory.exists() and not file.exists() and any(directory.iterdir()):
        raise LaunchError(
            f"{directory} is not a launch directory (it has no launch.json); choose another folder with --out"
        )
    if file.exists() and holder(directory):
        raise LaunchError(f"{root} is being launched by {holder(directory)}; wait for it, or lt launch cancel {root}")
    _claim_run(root, pipeline)
    launch = Launch(directory=directory, backend=backend, pipeline=pipeline, profile=profile)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in launch_files(pipeline, specs).items():
            _write(directory / name, text)
        for name, text in rendered.files.items():
            _write(directory / "rendered" / name, text)
        _describe(directory)
        _save(launch, rendered)
    except OSError as exc:
        raise LaunchError(
            f"cannot write {exc.filename or directory}: {exc.strerror}; choose another folder with --out"
        ) from exc
    _list(directory)
    event(launch, "made", backend=backend)
    return launch


def remember(launch: Launch, ids: Mapping[str, str]) -> Launch:
    """Keep what the target calls the stages."""
    launch = replace(launch, ids={**launch.ids, **ids})
    file = launch.directory / "launch.json"
    values = json.loads(file.read_bytes()) | {"ids": dict(launch.ids)}
    _write(file, json.dumps(values, indent=1, ensure_ascii=False) + "\n")
    event(launch, "submitted", ids=dict(ids))
    return launch


def open_launch(path: str | Path) -> Launch:
    """The launch of a folder: its `out`, its `launch/`, or a name that `known` lists.

    Raises:
        LaunchError: there is none, or it is damaged.
    """
    directory = find(path)
    file = directory / "launch.json"
    try:
        values = json.loads(file.read_bytes())
        if values["format"] != FORMAT or values["version"] != VERSION:
            raise LaunchError(f"{file} has version {values.get('version')!r}; use the lt-launch that made it")
        given = {name: Given(value, "launch.json") for name, value in values["profile"].items()}
        return Launch(
            directory=directory,
            backend=values["backend"],
            pipeline=pipeline_from(values["pipeline"]),
            profile=Profile(given=given),
            ids=values["ids"],
        )
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as exc:
        raise LaunchError(f"{file} is damaged ({exc}); launch again with the same --out") from exc


def find(path: str | Path) -> Path:
    """The launch directory that a person means by a path or by a launch's name.

    Raises:
        LaunchError: there is none.
    """
    given = Path(path)
    for candidate in (given, given / "launch"):
        if (candidate / "launch.json").is_file():
            return candidate.absolute()
    named = [directory for directory in known() if directory.parent.name == str(path)]
    if len(named) == 1:
        return named[0]
    if named:
        raise LaunchError(f"{path}: {len(named)} launches have this name; give the path: {', '.join(map(str, named))}")
    raise LaunchError(f"{path}: no launch here; lt launch list shows those that were made on this machine")


def known() -> list[Path]:
    """The launch directories that were made by this person and are still there, oldest first."""
    try:
        lines = (home() / "launches").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    paths = [Path(line) for line in dict.fromkeys(lines)]
    return [path for path in paths if (path / "launch.json").is_file()]


def home() -> Path:
    """Where the list of launches is kept."""
    return Path(os.environ.get("LT_LAUNCH_HOME") or Path.home() / ".local" / "state" / "lt-launch")


def event(launch: Launch, what: str, /, **values: Any) -> None:
    """Append an event, with the time in UTC; what cannot be written is left out."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    row = json.dumps({"time": now, "event": what, **values}, ensure_ascii=False)
    with suppress(OSError), open(launch.directory / "events.jsonl", "a", encoding="utf-8") as file:
        file.write(row + "\n")


def events(launch: Launch) -> list[dict[str, Any]]:
    """The events so far."""
    from lt_launch.agent.places import read_lines

    return read_lines(launch.directory / "events.jsonl")


@contextmanager
def hold(launch: Launch) -> Iterator[None]:
    """Be the process that runs this launch.

    Raises:
        LaunchError: another one is.
    """
    descriptor = os.open(launch.directory / "launch.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = holder(launch.directory) or "another process"
            raise LaunchError(
                f"{launch.directory.parent} is being launched by {who}; wait for it, or cancel it"
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        os.close(descriptor)


def holder(directory: Path) -> str:
    """Who runs a launch now ("process 12 on host"), or "" when nobody does."""
    try:
        descriptor = os.open(directory / "launch.lock", os.O_RDONLY)
    except OSError:
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.read(descriptor, 4096).decode("utf-8", "replace").strip() or "another process"
    finally:
        os.close(descriptor)
    return ""


def pipeline_from(table: Mapping[str, Any]) -> Pipeline:
    """A pipeline from what `as_table` made of it."""
    stages = []
    for stage in table["stages"]:
        job = dict(stage["job"])
        parts = {
            "resources": Resources(**job.pop("resources")),
            "container": Container(**job.pop("container")),
            "restart": Restart(**job.pop("restart")),
        }
        stages.append(Stage(job=Job(**job, **parts), **{name: value for name, value in stage.items() if name != "job"}))
    return Pipeline(name=table["name"], stages=tuple(stages), out=table["out"])


def _save(launch: Launch, rendered: Rendered) -> None:
    values = {
        "format": FORMAT,
        "version": VERSION,
        "name": launch.pipeline.name,
        "backend": launch.backend,
        "made": time.time(),
        "host": socket.gethostname(),
        "cwd": os.getcwd(),
        "ids": {},
        "commands": [list(command) for command in rendered.commands],
        "profile": launch.profile.as_table(),
        "pipeline": as_table(launch.pipeline),
    }
    _write(launch.directory / "launch.json", json.dumps(values, indent=1, ensure_ascii=False) + "\n")


def _claim_run(root: Path, pipeline: Pipeline) -> None:
    """Where the launch's folder is the run directory of a job that trains, make it one: lt-trainer takes no other."""
    if any(stage.job.trains and Path(stage.job.run_dir).absolute() == root for stage in pipeline.stages):
        from lt_trainer.rundir import RunDir

        if not (root / "launch").exists():
            RunDir.open(root).close()


def _describe(directory: Path) -> None:
    from lt_trainer.environment import environment

    _write(directory / "environment.json", json.dumps(environment(), indent=1, ensure_ascii=False) + "\n")
    state, patch = git_state(Path.cwd())
    _write(directory / "git.json", json.dumps(state, indent=1) + "\n")
    _write(directory / "diff.patch", patch)


def git_state(folder: Path) -> tuple[dict[str, Any], str]:
    """The commit of a working folder, and a patch of all that is not committed in it, small new files included.

    Returns:
        commit, branch, changed and untracked files, from the top of the repository; and the patch. Empty where there is
        no git or no repository.
    """
    root = ""

    def git(*arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            ["git", "-c", "core.quotepath=off", *arguments],
            cwd=root or folder,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=False,
        )
        return done.stdout if done.returncode == code else ""

    try:
        root = git("rev-parse", "--show-toplevel").strip()
        if not root:
            return {}, ""
        untracked = [name for name in git("ls-files", "--others", "--exclude-standard", "-z").split("\0") if name]
        changed = [name for name in git("diff", "--no-renames", "--name-only", "-z", "HEAD").split("\0") if name]
        private = [name for name in changed if PRIVATE.search(name)]
        hidden = [f":(top,exclude,literal){name}" for name in private]
        patch = git("diff", "--no-renames", *PATCH, "HEAD", "--", ":(top)", *hidden)
        kept = [name for name in untracked if not PRIVATE.search(name) and _small(Path(root) / name)]
        for name in kept[:200]:
            patch += git("diff", *PATCH, "--no-index", "--", "/dev/null", name, code=1)
        state = {
            "root": root,
            "commit": git("rev-parse", "HEAD").strip(),
            "branch": git("rev-parse", "--abbrev-ref", "HEAD").strip(),
            "changed": changed,
            "changed_not_kept": private,
            "untracked": untracked,
            "untracked_not_kept": [name for name in untracked if name not in kept[:200]],
        }
    except OSError:
        return {}, ""
    return state, patch


def _small(path: Path) -> bool:
    return path.is_file() and path.stat().st_size <= UNTRACKED_LIMIT


def _list(directory: Path) -> None:
    with suppress(OSError):  # the list is for convenience; the launch itself is complete
        home().mkdir(parents=True, exist_ok=True)
        with open(home() / "launches", "a", encoding="utf-8") as file:
            file.write(f"{directory}\n")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
