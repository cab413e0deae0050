"""Run directory: all files of one run, in a folder with a marker.

    .lt-run             marker: format and version; a non-empty folder without it is rejected
    .lt-run.lock        locked by rank 0 while it trains, so that two processes never write the same run
    recipe.toml         resolved recipe, with the origin of each value as a comment
    recipe.json         the same for programs: {"recipe": ..., "origins": ..., "unchecked": ...}
    environment.json    interpreter, machine, package versions (`environment`)
    metrics.jsonl       one record per logging step
    events.jsonl        starts, stops, checkpoints, warnings
    monitor/            samples of each node (`observability.monitor`)
    evaluation/         items of each evaluated task by step: step-N/TASK.jsonl
    profile/  memory/   requested profiler traces and CUDA memory snapshots
    tensorboard/  wandb/  trackio/  sinks.json   files of the recipe's sinks
    mirror.json         the run's name in its mirror, if any: {"run": ...} (`checkpointing.mirror`)
    alive/              heartbeat of each rank (`resilience.watchdog`)
    flight/             last collectives of ranks that hung, by start of the run
    checkpoints/  logs/

Opening an existing run directory continues the run: metrics and events are appended, the three description files are
rewritten atomically, and `changes` has the changes of the recipe. Nothing is ever deleted here. The lock is `flock`,
which the system releases when its holder exits.
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

from lt_trainer.config.recipe import ResolvedRecipe, to_dict, to_toml
from lt_trainer.config.section import flatten
from lt_trainer.errors import RunDirError
from lt_trainer.files import open_lock_file, open_regular, read_json, write_atomic
from lt_trainer.run_directory.environment import describe_environment
from lt_trainer.run_directory.jsonl import JsonlWriter

FORMAT, VERSION = "lt-run", 1
MARKER_FILE, LOCK_FILE = ".lt-run", ".lt-run.lock"
MIRROR_FILE = "mirror.json"
OWN_PREFIXES = (MARKER_FILE, f".{MARKER_FILE}")
"""Name prefixes of our files that may exist before the marker: its temporary file, the lock."""


class RunDir:
    """Open run directory, locked by this process; a context."""

    def __init__(self, path: Path, events: JsonlWriter) -> None:
        self.path = path
        self._events = events
        self._resources = ExitStack()
        self.changes: dict[str, tuple[Any, Any]] = {}
        """Recipe fields that changed since the last start: (before, now) by dotted name."""

    @classmethod
    def open(
        cls, out: str | Path, *, resolved: ResolvedRecipe | None = None, extra: Mapping[str, Any] | None = None
    ) -> "RunDir":
        """Create or open the run directory `out`, lock it, and write the descriptions of the run.

        Args:
            out: Folder; created with its parents if missing.
            resolved: Recipe to write; None for none.
            extra: Additional entries of environment.json, such as the devices.

        Raises:
            RunDirError: not a run directory, in use by another process, of a later version, or not writable.
        """
        path = Path(out)
        with ExitStack() as stack:  # release everything if a later step fails
            try:
                _ensure_run_dir(path)
                stack.callback(os.close, _acquire_lock(path))
                run_dir = cls(path, stack.enter_context(JsonlWriter(path / "events.jsonl")))
                run_dir._write_descriptions(resolved, extra or {})
            except OSError as exc:
                raise _io_error(path, exc) from exc
            run_dir._resources = stack.pop_all()
        return run_dir

    @staticmethod
    def describe(out: str | Path) -> str:
        """Describe what `open` would find; write nothing.

        Raises:
            RunDirError: as `open` would, for existing files.
        """
        path = Path(out)
        try:
            if not path.exists():
                _check_parents(path)
                return f"{path} will be created"
            if not _is_run_dir(path):
                return f"{path} is empty"
            _check_entries(path)
            if (path / LOCK_FILE).exists():
                with open_regular(path / LOCK_FILE) as file:
                    _lock(path, file.fileno(), fcntl.LOCK_SH)  # shared: every rank of a preflight describes the run
        except OSError as exc:
            raise _io_error(path, exc) from exc
        _recipe_changes(path / "recipe.json", {})
        return f"{path} has a run"

    def _write_descriptions(self, resolved: ResolvedRecipe | None, extra: Mapping[str, Any]) -> None:
        self.checkpoints.mkdir(exist_ok=True)
        self.logs.mkdir(exist_ok=True)
        write_atomic(self.path / "environment.json", _json(describe_environment() | dict(extra)))
        if resolved is not None:
            values = to_dict(resolved.recipe)
            self.changes = _recipe_changes(self.path / "recipe.json", values)
            unchecked = list(resolved.unchecked)
            record = {"recipe": values, "origins": dict(resolved.origins), "unchecked": unchecked}
            write_atomic(self.path / "recipe.json", _json(record))
            write_atomic(self.path / "recipe.toml", to_toml(resolved.recipe, resolved.origins))

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Folder of the ranks' logs."""
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        """JSON-lines file of metrics records."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """JSON-lines file of events."""
        return self.path / "events.jsonl"

    def write_mirror_name(self, name: str) -> None:
        """Write the run's name in its mirror."""
        try:
            write_atomic(self.path / MIRROR_FILE, _json({"run": name}))
        except OSError as exc:
            raise _io_error(self.path, exc) from exc

    def append_event(self, kind: str, **values: Any) -> None:
        """Append an event with a UTC timestamp."""
        self._events.write({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": kind, **values})

    def close(self) -> None:
        """Close the files and release the lock; may be called twice."""
        self._resources.close()

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_mirror_name(path: str | Path) -> str:
    """Read the run's name in its mirror; "" if it never had one.

    Raises:
        RunDirError: the file is damaged.
    """
    file = Path(path) / MIRROR_FILE
    if not file.exists():
        return ""
    remedy = "remove it to compare the run with its mirror again"
    try:
        values = read_json(file)
    except (OSError, ValueError) as exc:
        raise RunDirError(f"{file} is damaged ({exc}); {remedy}") from exc
    if not isinstance(values, dict) or not isinstance(values.get("run"), str):
        raise RunDirError(f"{file} is damaged (no name of a run); {remedy}")
    return values["run"]


def _ensure_run_dir(path: Path) -> None:
    """Create the folder and its marker, or check them."""
    path.mkdir(parents=True, exist_ok=True)
    if not _is_run_dir(path):
        write_atomic(path / MARKER_FILE, _json({"format": FORMAT, "version": VERSION}))


def _is_run_dir(path: Path) -> bool:
    """Return True if an existing folder has a run, False if it is empty; raise RunDirError otherwise."""
    marker = path / MARKER_FILE
    if marker.exists():
        try:
            values = read_json(marker)
        except ValueError:
            values = {}
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise RunDirError(f"run.dir = {str(path)!r}: {marker} is damaged; set run.dir to a new folder")
        if values.get("version") != VERSION:
            raise RunDirError(
                f"run.dir = {str(path)!r}: the run directory has version {values.get('version')!r}, this lt-trainer "
                f"supports version {VERSION}; use the lt-trainer that wrote it, or set run.dir to a new folder"
            )
        return True
    if any(not item.name.startswith(OWN_PREFIXES) for item in path.iterdir()):
        raise RunDirError(
            f"run.dir = {str(path)!r}: the folder is not empty and not a run directory (no {MARKER_FILE}); "
            "set run.dir to a new or empty folder"
        )
    return False


def _check_parents(path: Path) -> None:
    """Raise OSError if a folder that does not exist cannot be created."""
    existing = next(folder for folder in path.absolute().parents if folder.exists())
    if not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(existing))


def _check_entries(path: Path) -> None:
    """Raise OSError if a run could not go on writing into what is there."""
    folders = [path, path / "checkpoints", path / "logs"]
    files = [path / LOCK_FILE, path / "events.jsonl", path / "metrics.jsonl", *path.glob("logs/rank*.log")]
    for entry in (*folders, *files):
        if not entry.exists():
            continue
        if entry.is_dir() != (entry in folders):
            number = errno.ENOTDIR if entry in folders else errno.EISDIR
        elif not os.access(entry, os.W_OK):
            number = errno.EACCES
        else:
            continue
        raise OSError(number, os.strerror(number), str(entry))


def _acquire_lock(path: Path) -> int:
    """Lock the run directory for this process, and write the holder into the file."""
    descriptor = open_lock_file(path / LOCK_FILE)
    try:
        _lock(path, descriptor)
    except (OSError, RunDirError):
        os.close(descriptor)
        raise
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {os.uname().nodename}\n".encode())
    return descriptor


def _lock(path: Path, descriptor: int, kind: int = fcntl.LOCK_EX) -> None:
    """Lock the open lock file; otherwise raise an error that names the holder."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 4096).decode(errors="replace").strip() or "another process"
        raise RunDirError(
            f"run.dir = {str(path)!r}: in use by {holder}; wait for it or stop it, or set run.dir to another folder"
        ) from None


def _io_error(path: Path, exc: OSError) -> RunDirError:
    is_full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "free space on its disk" if is_full else "set run.dir to a writable folder"
    return RunDirError(f"run.dir = {str(path)!r}: cannot use {exc.filename or path}: {exc.strerror}; {remedy}")


def _recipe_changes(path: Path, values: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the changes from the recipe of the last start, if there is one."""
    if not path.exists():
        return {}
    remedy = "set run.dir to a new folder, or remove the file"
    try:
        recorded = read_json(path)
    except (OSError, ValueError) as exc:
        raise RunDirError(f"{path} is damaged ({exc}); {remedy}") from exc
    if not isinstance(recorded, dict) or not isinstance(recorded.get("recipe"), dict):
        raise RunDirError(f"{path} is damaged (no recipe); {remedy}")
    before, now = flatten(recorded["recipe"]), flatten(values)
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return {name: (before.get(name), now.get(name)) for name in names}


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
