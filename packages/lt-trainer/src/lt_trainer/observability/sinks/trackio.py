"""Trackio sink, in `<run>/trackio/` unless TRACKIO_DIR, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set.

The name in `<run>/trackio.json` makes every start of a run continue the same Trackio run, and keeps runs with equal
folder names apart. `TRACKIO_DIR=<run>/trackio trackio show` opens the dashboard. No key is ever written or requested.
System metrics are not collected again: the run directory has them.

Trackio is append-only: steps repeated by a later start or a rollback are not sent again. It reports errors as warnings;
those at the end are raised, so that the run reports what was not stored.

Cost: a thread of the library writes to SQLite; a record takes the main thread well under a millisecond.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

from lt_trainer.errors import RunDirError
from lt_trainer.files import read_json, write_atomic
from lt_trainer.observability.sinks.sink import RunInfo, SinkConfigError

FILE, FOLDER = "trackio.json", "trackio"
PROJECT = "lt"
"""Default project, if TRACKIO_PROJECT is not set."""


class TrackioSink:
    """Trackio run writer; use `open`."""

    def __init__(self, run: Any, *, step: int) -> None:
        self._run = run
        self._last_step = self._sent_up_to = step

    @classmethod
    def open(cls, info: RunInfo) -> TrackioSink:
        """Create or resume the Trackio run of this run directory.

        Raises:
            SinkConfigError: Trackio rejects its settings, such as a server without a token.
            RunDirError: the run's name cannot be read or written.
        """
        os.environ.setdefault("TRACKIO_DIR", str((info.run / FOLDER).resolve()))  # read when trackio is imported
        trackio = import_module("trackio")
        name = _run_name(info.run)
        try:
            with redirect_stdout(io.StringIO()):  # keep the library's messages out of the run's output
                run = trackio.init(
                    project=os.environ.get("TRACKIO_PROJECT", PROJECT),
                    name=name,
                    config=dict(info.recipe),
                    resume="allow",
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
        except ValueError as exc:
            raise SinkConfigError(
                f"cannot start Trackio: {exc}; fix the TRACKIO_* variables, or remove trackio from metrics.sinks"
            ) from exc
        return cls(run, step=info.step)

    @classmethod
    def check(cls, run: Path) -> None:
        """Check the saved name; whether Trackio accepts its settings is known only to `open`.

        Raises:
            RunDirError: the run's name cannot be read.
        """
        _saved_name(run / FILE)

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Log one row, unless the step was sent before."""
        if step <= self._sent_up_to:
            return
        self._last_step = step
        self._run.log(dict(values), step=step)

    def resume_at(self, step: int) -> None:
        """Skip steps up to the highest one so far, which were sent before."""
        self._sent_up_to = self._last_step

    def close(self) -> None:
        """Finish the Trackio run; the library waits for up to half a minute.

        Raises:
            RuntimeError: not everything was stored.
        """
        with warnings.catch_warnings(record=True) as caught, redirect_stdout(io.StringIO()):
            warnings.simplefilter("always")
            import_module("trackio").finish()  # run.finish() would make the library's atexit hook finish it again
        messages = [str(warning.message) for warning in caught if "trackio" in str(warning.filename)]
        if messages:
            raise RuntimeError("; ".join(messages))


def _run_name(run: Path) -> str:
    """Return the name of the Trackio run; create and save it if there is none."""
    path = run / FILE
    name = _saved_name(path)
    if not name:
        name = f"{run.resolve().name}-{secrets.token_hex(3)}"
        try:
            write_atomic(path, json.dumps({"name": name}) + "\n")
        except OSError as exc:
            raise _file_error(path, exc) from exc
    return name


def _saved_name(path: Path) -> str:
    """Return the saved name of the Trackio run; "" if there is none."""
    try:
        values = read_json(path) if path.exists() else {"name": ""}
    except (OSError, ValueError) as exc:
        raise _file_error(path, exc) from exc
    if not isinstance(values, dict) or not isinstance(values.get("name"), str):
        raise _file_error(path, ValueError("not an object with a text 'name'"))
    return values["name"]


def _file_error(path: Path, exc: Exception) -> RunDirError:
    return RunDirError(f"cannot read or write {path}: {exc}; remove it to start a new Trackio run")
