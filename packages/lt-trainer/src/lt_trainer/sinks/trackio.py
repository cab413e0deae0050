"""Trackio, by default in `<run>/trackio/`; TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_SERVER_URL say where else.

The run's name stands in `<run>/trackio.json`, so every start of a run goes on in the same Trackio run, and two runs
whose folders have one name stay apart. `TRACKIO_DIR=<run>/trackio trackio show` opens the dashboard. No key is ever
written or asked for. What the run directory has already (the machine's numbers) is not collected again.

Trackio keeps what it was given: steps that a later start or a way back repeats are not sent again. It tells of trouble
by warnings; those of the end are raised, so that a run says what was not stored.

Cost: a thread of the library writes to SQLite; a record costs the main thread well under a millisecond.
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
from lt_trainer.rundir import write_whole
from lt_trainer.sinks.sink import About, SinkRefused

FILE, FOLDER = "trackio.json", "trackio"
PROJECT = "lt"
"""The project, where TRACKIO_PROJECT names no other."""


class Trackio:
    """See the module's text; `open` makes one."""

    def __init__(self, run: Any, *, step: int) -> None:
        self._run = run
        self._highest = self._sent = step

    @classmethod
    def open(cls, about: About) -> Trackio:
        """Begin, or go on in, the Trackio run of this run directory.

        Raises:
            SinkRefused: Trackio refuses its settings, such as a server without its token.
            RunDirError: the run's name cannot be read or written.
        """
        os.environ.setdefault("TRACKIO_DIR", str((about.run / FOLDER).resolve()))  # is read when trackio is imported
        trackio = import_module("trackio")
        name = _run_name(about.run)
        try:
            with redirect_stdout(io.StringIO()):  # standard output is the run's
                run = trackio.init(
                    project=os.environ.get("TRACKIO_PROJECT", PROJECT),
                    name=name,
                    config=dict(about.recipe),
                    resume="allow",
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
        except ValueError as exc:
            raise SinkRefused(
                f"Trackio does not start: {exc}; mend the variables that begin with TRACKIO_, or take trackio out of "
                "metrics.sinks"
            ) from exc
        return cls(run, step=about.step)

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """One row, unless Trackio has that step already."""
        if step <= self._sent:
            return
        self._highest = step
        self._run.log(dict(values), step=step)

    def go_on_at(self, step: int) -> None:
        """What comes up to the highest step so far was sent before."""
        self._sent = self._highest

    def close(self) -> None:
        """Finish; the library waits for half a minute at most.

        Raises:
            RuntimeError: not all was stored.
        """
        with warnings.catch_warnings(record=True) as told, redirect_stdout(io.StringIO()):
            warnings.simplefilter("always")
            import_module("trackio").finish()  # the run's own method would leave a second end to the interpreter
        lost = [str(one.message) for one in told if "trackio" in str(one.filename)]
        if lost:
            raise RuntimeError("; ".join(lost))


def _run_name(run: Path) -> str:
    """The name of the run's Trackio run; made and kept when there is none."""
    path = run / FILE
    try:
        if path.exists():
            return str(json.loads(path.read_text(encoding="utf-8"))["name"])
        made = f"{run.resolve().name}-{secrets.token_hex(3)}"
        write_whole(path, json.dumps({"name": made}) + "\n")
    except (OSError, ValueError, KeyError) as exc:
        raise RunDirError(f"cannot read or write {path}: {exc}; remove it to begin a new Trackio run") from exc
    return made
