"""Weights & Biases, online or offline as WANDB_MODE says; all else that the library reads from WANDB_* is honoured too.

The run's id stands in `<run>/wandb.json`, so every start of a run goes on in the same W&B run. Files lie in
`<run>/wandb/`; `wandb sync` sends those of offline starts. No key is ever written or asked for: without one an online
start is refused. What the run directory has already (output, machine, packages, source) is not collected again.

A W&B history only grows. `step` is therefore a number of its own, the axis of all charts, and steps that a later
start or a way back repeats are not sent again.

Cost: the library's own process does the sending; a record costs the main thread well under a millisecond.
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
from lt_trainer.rundir import write_whole
from lt_trainer.sinks.sink import About, SinkRefused

FILE = "wandb.json"
FINISH_S = 30.0
"""How long the end of a run waits for what is still to be sent."""
QUIET = {
    "console": "off",
    "disable_git": True,
    "save_code": False,
    "symlink": False,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


class Wandb:
    """See the module's text; `open` makes one."""

    def __init__(self, run: Any, *, step: int) -> None:
        self._run = run
        self._highest = self._sent = step

    @classmethod
    def open(cls, about: About) -> Wandb:
        """Begin, or go on in, the W&B run of this run directory.

        Raises:
            SinkRefused: there is no key, or W&B refuses the settings.
            RunDirError: the run's id cannot be read or written.
        """
        known = {name: value for name, value in QUIET.items() if name in wandb.Settings.model_fields}
        settings = wandb.Settings(**known)
        try:
            run = wandb.init(
                id=_run_id(about.run / FILE),
                resume="allow",
                dir=str(about.run),
                name=os.environ.get("WANDB_NAME") or about.run.resolve().name,
                config=dict(about.recipe),
                settings=settings,
            )
        except UsageError as exc:
            raise SinkRefused(
                f"W&B does not start: {exc}; set WANDB_API_KEY, or WANDB_MODE=offline, or take wandb out of "
                "metrics.sinks"
            ) from exc
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        return cls(run, step=about.step)

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """One row of the history, unless W&B has that step already."""
        if step <= self._sent:
            return
        self._highest = step
        self._run.log({"step": step, **values})

    def go_on_at(self, step: int) -> None:
        """What comes up to the highest step so far was sent before."""
        self._sent = self._highest

    def close(self) -> None:
        """Finish, for at most half a minute: what is not sent by then is in the run directory, for `wandb sync`.

        Raises:
            TimeoutError: it took longer.
        """
        finishing = threading.Thread(target=self._run.finish, daemon=True, name="wandb-finish")
        finishing.start()
        finishing.join(FINISH_S)
        if finishing.is_alive():
            raise TimeoutError(f"not all was sent within {FINISH_S:g} s; `wandb sync` sends the rest")


def _run_id(path: Path) -> str:
    """The id of the run's W&B run; made and kept when there is none."""
    try:
        if path.exists():
            return str(json.loads(path.read_text(encoding="utf-8"))["id"])
        made = secrets.token_hex(8)
        write_whole(path, json.dumps({"id": made}) + "\n")
    except (OSError, ValueError, KeyError) as exc:
        raise RunDirError(f"cannot read or write {path}: {exc}; remove it to begin a new W&B run") from exc
    return made
