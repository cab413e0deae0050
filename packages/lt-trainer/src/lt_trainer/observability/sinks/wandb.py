"""Weights & Biases sink, online or offline by WANDB_MODE; all other WANDB_* variables are honored too.

The id in `<run>/wandb.json` makes every start of a run continue the same W&B run. Files are in `<run>/wandb/`;
`wandb sync` uploads those of offline starts. No key is ever written or requested: an online start without one is
rejected. Output, machine, packages and source are not collected again: the run directory has them.

A W&B history is append-only. `step` is therefore a separate metric, the x axis of all charts, and steps repeated by a
later start or a rollback are not sent again.

Cost: a process of the library uploads; a record takes the main thread well under a millisecond.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb
from wandb.errors import UsageError

from lt_trainer.errors import RunDirError
from lt_trainer.files import read_json, write_atomic
from lt_trainer.observability.sinks.sink import RunInfo, SinkConfigError

FILE = "wandb.json"
FINISH_S = 30.0
"""Maximum wait for pending uploads at the end of a run."""
SETTINGS_OFF = {
    "console": "off",
    "disable_git": True,
    "save_code": False,
    "symlink": False,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


class WandbSink:
    """W&B run writer; use `open`."""

    def __init__(self, run: Any, *, step: int) -> None:
        self._run = run
        self._last_step = self._sent_up_to = step

    @classmethod
    def open(cls, info: RunInfo) -> WandbSink:
        """Create or resume the W&B run of this run directory.

        Raises:
            SinkConfigError: no key, or W&B rejects the settings.
            RunDirError: the run's id cannot be read or written.
        """
        supported = {name: value for name, value in SETTINGS_OFF.items() if name in wandb.Settings.model_fields}
        settings = wandb.Settings(**supported)
        try:
            run = wandb.init(
                id=_run_id(info.run / FILE),
                resume="allow",
                dir=str(info.run),
                name=os.environ.get("WANDB_NAME") or info.run.resolve().name,
                config=dict(info.recipe),
                settings=settings,
            )
        except UsageError as exc:
            raise _config_error(exc) from exc
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        return cls(run, step=info.step)

    @classmethod
    def check(cls, run: Path) -> None:
        """Check what `open` needs, without creating a W&B run; raises the same errors."""
        _saved_id(run / FILE)
        if wandb.Settings().mode != "online":
            return
        try:
            wandb.login()
        except UsageError as exc:
            raise _config_error(exc) from exc

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Log one row of the history, unless the step was sent before."""
        if step <= self._sent_up_to:
            return
        self._last_step = step
        self._run.log({"step": step, **values})

    def resume_at(self, step: int) -> None:
        """Skip steps up to the highest one so far, which were sent before."""
        self._sent_up_to = self._last_step

    def close(self) -> None:
        """Finish within `FINISH_S`; `wandb sync` can upload the rest from the run directory.

        Raises:
            TimeoutError: uploads are still pending.
        """
        thread = threading.Thread(target=self._run.finish, daemon=True, name="wandb-finish")
        thread.start()
        thread.join(FINISH_S)
        if thread.is_alive():
            raise TimeoutError(f"uploads still pending after {FINISH_S:g} s; `wandb sync` uploads the rest")


def _config_error(exc: UsageError) -> SinkConfigError:
    return SinkConfigError(
        f"cannot start W&B: {exc}; set WANDB_API_KEY or WANDB_MODE=offline, or remove wandb from metrics.sinks"
    )


def _run_id(path: Path) -> str:
    """Return the id of the W&B run; create and save it if there is none."""
    run_id = _saved_id(path)
    if not run_id:
        run_id = secrets.token_hex(8)
        try:
            write_atomic(path, json.dumps({"id": run_id}) + "\n")
        except OSError as exc:
            raise _file_error(path, exc) from exc
    return run_id


def _saved_id(path: Path) -> str:
    """Return the saved id of the W&B run; "" if there is none."""
    try:
        values = read_json(path) if path.exists() else {"id": ""}
    except (OSError, ValueError) as exc:
        raise _file_error(path, exc) from exc
    if not isinstance(values, dict) or not isinstance(values.get("id"), str):
        raise _file_error(path, ValueError("not an object with a text 'id'"))
    return values["id"]


def _file_error(path: Path, exc: Exception) -> RunDirError:
    return RunDirError(f"cannot read or write {path}: {exc}; remove it to start a new W&B run")
