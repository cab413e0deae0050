"""The run directory: everything one run leaves behind, in a folder that says that it is ours.

    .lt-run             marker: format and version; a folder with other files in it and no marker is refused
    .lt-run.lock        held by rank 0 while it trains, so that two processes never write the same run
    recipe.toml         the resolved recipe, each value with its origin as a comment
    recipe.json         the same for programs: {"recipe": ..., "origins": ..., "unchecked": ...}
    environment.json    interpreter, machine, package versions (see `environment.py`)
    metrics.jsonl       one record per logging step
    events.jsonl        starts, stops, checkpoints, warnings
    monitor/            samples of each node (see `monitor/node.py`)
    profile/  memory/   traces and memory histories that were asked for
    tensorboard/  wandb/  wandb.json  trackio/  trackio.json   what sinks keep, where the recipe has them
    mirror.json         the run's name in its mirror, where it has one: {"run": ...} (see `mirroring.py`)
    alive/              each rank's heartbeat (see `watchdog.py`)
    flight/             the last collectives of ranks that hung, by start of the run
    checkpoints/  logs/

Opening an existing run directory goes on in it: metrics and events are appended to, the three description files are
written anew (to a temporary file, synced, renamed), and what changed in the recipe is in `changes`. Nothing is ever
deleted here. The lock is `flock`, which the system releases when its holder dies.
"""

import errno
import fcntl
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lt_trainer.environment import environment
from lt_trainer.errors import RunDirError
from lt_trainer.fields import flatten
from lt_trainer.metrics import JsonlSink
from lt_trainer.recipe import Resolved, to_dict, to_toml

__all__ = ["FORMAT", "VERSION", "RunDir", "read_mirror_name", "write_whole"]

FORMAT, VERSION = "lt-run", 1
MARKER, LOCK = ".lt-run", ".lt-run.lock"
MIRROR = "mirror.json"
OURS = (MARKER, f".{MARKER}")
"""How the names of our own files begin that may be there before the marker is (its temporary file, the lock)."""


class RunDir:
    """An open run directory, locked by this process; close it, or use it as a context."""

    def __init__(self, path: Path, events: JsonlSink) -> None:
        self.path = path
        self._events = events
        self._held = ExitStack()
        self.changes: dict[str, tuple[Any, Any]] = {}
        """Recipe fields whose value differs from the run's last start: (then, now) by dotted name."""

    @classmethod
    def open(
        cls, out: str | Path, *, resolved: Resolved | None = None, extra: Mapping[str, Any] | None = None
    ) -> "RunDir":
        """Make or reopen the run directory `out`, lock it, and describe the run in it.

        Args:
            out: The folder; made with its parents when it is not there.
            resolved: The recipe to write; None writes none.
            extra: More for environment.json, such as the devices.

        Raises:
            RunDirError: not our folder, in use by another process, of a later version, or not writable.
        """
        path = Path(out)
        with ExitStack() as held:  # let go of what was taken when the rest fails
            try:
                _claim(path)
                held.callback(os.close, _take_lock(path))
                run_dir = cls(path, held.enter_context(JsonlSink(path / "events.jsonl")))
                run_dir._describe(resolved, extra or {})
            except OSError as exc:
                raise _unusable(path, exc) from exc
            run_dir._held = held.pop_all()
        return run_dir

    @staticmethod
    def look(out: str | Path) -> str:
        """What `open` would find, in words; nothing is written.

        Raises:
            RunDirError: what `open` would raise for what is there.
        """
        path = Path(out)
        try:
            if not path.exists():
                return f"{path} will be made"
            if not _is_run(path):
                return f"{path} is empty"
            if (path / LOCK).exists():
                descriptor = os.open(path / LOCK, os.O_RDONLY)
                _lock(path, descriptor)
                os.close(descriptor)
        except OSError as exc:
            raise _unusable(path, exc) from exc
        return f"{path} holds a run"

    def _describe(self, resolved: Resolved | None, extra: Mapping[str, Any]) -> None:
        self.checkpoints.mkdir(exist_ok=True)
        self.logs.mkdir(exist_ok=True)
        write_whole(self.path / "environment.json", _json(environment() | dict(extra)))
        if resolved is not None:
            values = to_dict(resolved.recipe)
            self.changes = _changes(self.path / "recipe.json", values)
            unchecked = list(resolved.unchecked)
            record = {"recipe": values, "origins": dict(resolved.origins), "unchecked": unchecked}
            write_whole(self.path / "recipe.json", _json(record))
            write_whole(self.path / "recipe.toml", to_toml(resolved.recipe, resolved.origins))

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Where the output of ranks goes."""
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        """The JSON-lines file of metrics records."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """The JSON-lines file of events."""
        return self.path / "events.jsonl"

    def name_mirror(self, name: str) -> None:
        """Keep the run's name in its mirror."""
        try:
            write_whole(self.path / MIRROR, _json({"run": name}))
        except OSError as exc:
            raise _unusable(self.path, exc) from exc

    def event(self, kind: str, **values: Any) -> None:
        """Append an event, with the time in UTC."""
        self._events.write({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": kind, **values})

    def close(self) -> None:
        """Close the files and let other processes in; closing twice is fine."""
        self._held.close()

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_mirror_name(path: str | Path) -> str:
    """The name that the run in a run directory has in its mirror; empty when it never had one.

    Raises:
        RunDirError: the file is damaged.
    """
    file = Path(path) / MIRROR
    if not file.exists():
        return ""
    try:
        name = json.loads(file.read_bytes())["run"]
    except (ValueError, KeyError, TypeError) as exc:
        raise RunDirError(f"{file} is damaged ({exc}); remove it to compare the run with its mirror anew") from exc
    return str(name)


def _claim(path: Path) -> None:
    """Make the folder ours, or check that it is."""
    path.mkdir(parents=True, exist_ok=True)
    if not _is_run(path):
        write_whole(path / MARKER, _json({"format": FORMAT, "version": VERSION}))


def _is_run(path: Path) -> bool:
    """Whether an existing folder holds a run; a RunDirError when it holds anything else."""
    marker = path / MARKER
    if marker.exists():
        try:
            found = json.loads(marker.read_bytes())
        except ValueError:
            found = {}
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise RunDirError(f"run.out = {str(path)!r}: {marker} is damaged; set run.out to a new folder")
        if found.get("version") != VERSION:
            raise RunDirError(
                f"run.out = {str(path)!r}: the run directory has version {found.get('version')!r}, this lt-trainer "
                f"knows version {VERSION}; use the lt-trainer that made it, or set run.out to a new folder"
            )
        return True
    if any(not item.name.startswith(OURS) for item in path.iterdir()):
        raise RunDirError(
            f"run.out = {str(path)!r}: the folder is not empty and is not a run directory (it has no {MARKER}); "
            "set run.out to a new or an empty folder"
        )
    return False


def _take_lock(path: Path) -> int:
    """Lock the run directory for this process; the file tells others who holds it."""
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    _lock(path, descriptor)
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {os.uname().nodename}\n".encode())
    return descriptor


def _lock(path: Path, descriptor: int) -> None:
    """Lock the open lock file, or close it and say who holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 4096).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        raise RunDirError(
            f"run.out = {str(path)!r}: in use by {holder}; wait for it or stop it, or set run.out to another folder"
        ) from None
    except OSError:
        os.close(descriptor)
        raise


def _unusable(path: Path, exc: OSError) -> RunDirError:
    full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "free space on its disk" if full else "set run.out to a folder that you can write"
    where = exc.filename or path
    return RunDirError(f"run.out = {str(path)!r}: cannot use {where}: {exc.strerror}; {remedy}")


def _changes(path: Path, values: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs from the recipe that was written at the last start, if there is one that can be read."""
    if not path.exists():
        return {}
    try:
        before = flatten(json.loads(path.read_bytes())["recipe"])
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise RunDirError(f"{path} is damaged ({exc}); set run.out to a new folder, or remove that file") from exc
    now = flatten(values)
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return {name: (before.get(name), now.get(name)) for name in names}


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that it is there in full or not at all, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
