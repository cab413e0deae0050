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

Opening an existing run directory continues the run: metrics and events are appended, environment.json is rewritten
atomically, and `changes` has the changes of the recipe. The recipe is replaced when the run has resumed with it
(`record_recipe`), so that a start that was refused leaves that of the steps before. Nothing is ever deleted here. The
lock is `flock`, which the system releases when its holder exits.
"""

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lt_trainer.config.recipe import ResolvedRecipe, to_dict, to_toml
from lt_trainer.config.section import flatten
from lt_trainer.errors import RunDirError
from lt_trainer.files import write_atomic
from lt_trainer.run_directory.environment import describe_environment
from lt_trainer.run_directory.jsonl import JsonlWriter
from lt_trainer.toml import format_value

MARKER = {"format": "lt-run", "version": 1}
MARKER_FILE, LOCK_FILE = ".lt-run", ".lt-run.lock"
MIRROR_FILE = "mirror.json"
OWN_PREFIXES = (MARKER_FILE, f".{MARKER_FILE}")
"""Name prefixes of our files that may exist before the marker: its temporary file, the lock."""


class RunDir:
    """Open run directory, locked by this process; a context."""

    def __init__(self, path: Path) -> None:
        self.path, self.checkpoints, self.metrics = path, path / "checkpoints", path / "metrics.jsonl"
        self.changes: dict[str, tuple[Any, Any]] = {}
        """Recipe fields that changed since the last start: (before, now) by dotted name."""
        self._resolved: ResolvedRecipe | None = None
        self._resources = ExitStack()

    @staticmethod
    def open(out: str | Path, *, resolved: ResolvedRecipe | None = None) -> "RunDir":
        """Create or open the run directory `out`, lock it, and write the descriptions of the run.

        Args:
            out: Folder; created with its parents if missing.
            resolved: Recipe to write: at once if the run has none yet, otherwise by `record_recipe`; None for none.

        Raises:
            RunDirError: not a run directory, in use by another process, of a later version, or not writable.
        """
        run_dir = RunDir(Path(out))
        with run_dir._resources as resources, _translate_os_errors(run_dir.path):
            run_dir._open(resolved)
            run_dir._resources = resources.pop_all()
        return run_dir

    def _open(self, resolved: ResolvedRecipe | None) -> None:
        path = self.path
        path.mkdir(parents=True, exist_ok=True)
        if not _is_run_dir(path):
            write_atomic(path / MARKER_FILE, _json(MARKER))
        lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
        self._resources.callback(os.close, lock)
        _lock(path, lock)
        os.ftruncate(lock, 0)
        os.write(lock, f"process {os.getpid()} on {os.uname().nodename}\n".encode())
        self._events = self._resources.enter_context(JsonlWriter(path / "events.jsonl"))
        self.checkpoints.mkdir(exist_ok=True)
        (path / "logs").mkdir(exist_ok=True)
        write_atomic(path / "environment.json", _json(describe_environment()))
        self._resolved = resolved
        if resolved is not None and (path / "recipe.json").exists():
            self.changes = _recipe_changes(path / "recipe.json", to_dict(resolved.recipe))
        else:
            self.record_recipe()

    @staticmethod
    def check(out: Path) -> None:
        """Check that a run directory could be opened, if it exists; write nothing.

        Raises:
            RunDirError: as `open` would.
        """
        with _translate_os_errors(out):
            if out.exists() and _is_run_dir(out) and (out / LOCK_FILE).exists():
                with open(out / LOCK_FILE, "rb") as file:
                    _lock(out, file.fileno(), fcntl.LOCK_SH)  # several may look at once, on NFS without writing
                _recipe_changes(out / "recipe.json", {})

    def record_recipe(self) -> None:
        """Write the recipe with which the directory was opened, in place of that of the last start."""
        resolved = self._resolved
        if resolved is None:
            return
        values = to_dict(resolved.recipe)
        record = {"recipe": values, "origins": dict(resolved.origins), "unchecked": list(resolved.unchecked)}
        with _translate_os_errors(self.path):
            write_atomic(self.path / "recipe.json", _json(record))
            write_atomic(self.path / "recipe.toml", to_toml(resolved.recipe, resolved.origins))

    def write_mirror_name(self, name: str) -> None:
        """Write the run's name in its mirror."""
        with _translate_os_errors(self.path):
            write_atomic(self.path / MIRROR_FILE, _json({"run": name}))

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
    """Read the run's name in its mirror; "" if it never had one."""
    file = Path(path) / MIRROR_FILE
    return json.loads(file.read_bytes())["run"] if file.exists() else ""


def _is_run_dir(path: Path) -> bool:
    """Return True if an existing folder has a run, False if it is empty; raise RunDirError otherwise."""
    marker, name = path / MARKER_FILE, f"run.dir = {format_value(path)}"
    if not marker.exists():
        if all(item.name.startswith(OWN_PREFIXES) for item in path.iterdir()):
            return False
        raise RunDirError(
            f"{name}: the folder is not empty and not a run directory (no {MARKER_FILE}); set run.dir to a new or "
            "empty folder"
        )
    try:
        values = json.loads(marker.read_bytes())
    except ValueError:
        values = None
    if values != MARKER:
        raise RunDirError(
            f"{name}: {marker} is damaged or of another version of lt-trainer (this one writes {MARKER}); use the "
            "lt-trainer that wrote it, or set run.dir to a new folder"
        )
    return True


def _lock(path: Path, descriptor: int, kind: int = fcntl.LOCK_EX) -> None:
    """Lock the open lock file; otherwise raise an error that names the holder."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 4096).decode(errors="replace").strip() or "another process"
        raise RunDirError(
            f"run.dir = {format_value(path)}: in use by {holder}; wait for it or stop it, or set "
            "run.dir to another folder"
        ) from None


@contextmanager
def _translate_os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        is_full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free space on its disk" if is_full else "set run.dir to a writable folder"
        raise RunDirError(
            f"run.dir = {format_value(path)}: cannot use {exc.filename or path}: {exc.strerror}; {remedy}"
        ) from exc


def _recipe_changes(path: Path, values: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the changes from the recipe of the last start, if there is one."""
    if not path.exists():
        return {}
    try:
        before, now = flatten(json.loads(path.read_bytes())["recipe"]), flatten(values)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise RunDirError(f"{path} is damaged ({exc}); set run.dir to a new folder, or remove the file") from exc
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return {name: (before.get(name), now.get(name)) for name in names}


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
