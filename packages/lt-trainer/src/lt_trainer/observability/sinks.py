"""Metrics sinks besides metrics.jsonl: TensorBoard, Weights & Biases and Trackio, by `metrics.sinks`.

A sink whose library is not installed is refused before the start. One that fails later is reported once and dropped: an
outage of a web service must not stop a run. Libraries are imported when their sink is opened.

A run repeats steps after a rollback or a restart from an older checkpoint. A new TensorBoard event file with
`purge_step` makes readers drop the earlier events of these steps. W&B and Trackio are append-only: they keep the first
record of a step, and `step` is a metric of its own there, the x axis of all charts. The name in `<run>/sinks.json`
makes every start of a run continue the same W&B and Trackio run, and keeps runs with equal folder names apart.

No key is ever written or requested: without one, an online start of W&B is refused. Output, machine, packages and
source are not collected again, since the run directory has them. Cost: a record takes the main thread about a
millisecond; threads or processes of the libraries write and upload.
"""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lt_trainer.errors import RecipeError, RunDirError, TrainerError
from lt_trainer.files import write_atomic

NAME_FILE = "sinks.json"
WANDB_FINISH_S = 30.0
"""Maximum wait for pending uploads at the end of a run."""
WANDB_OFF: dict[str, Any] = {"console": "off", "disable_git": True, "save_code": False, "symlink": False}
WANDB_OFF |= {"x_disable_meta": True, "x_disable_stats": True, "x_save_requirements": False}
TAG_GROUPS = {
    "train": ("loss", "learning_rate", "grad_norm", "valid_tokens"),
    "speed": ("batches_per_sec", "samples_per_sec", "tokens_per_sec", "flops_per_sec", "mfu", "hfu", "mfu_documents"),
    "memory": ("memory_gib",),
    "time": ("elapsed_s", "data_s", "forward_backward_s", "optimizer_s", "checkpoint_s", "validation_s", "rest_s"),
    "energy": ("joules_per_token", "energy_kwh"),
}
TAG_BY_FIELD = {field: f"{group}/{field}" for group, names in TAG_GROUPS.items() for field in names}


class Sinks:
    """Open sinks of a run; a failure of one never reaches the run or the others."""

    def __init__(self, sinks: Mapping[str, _TensorBoard | _History] | None = None) -> None:
        self._sinks = dict(sinks or {})
        self._last: int | None = None

    def log(self, record: Mapping[str, Any], extra: Mapping[str, float] | None = None) -> dict[str, str]:
        """Write the numbers of a record, and further ones of the same step by tag, to every sink.

        Returns:
            Errors by sink name; these sinks are dropped.
        """
        step, values = record["step"], {**scalars(record), **(extra or {})}
        is_restart = "loss" in record and (self._last is None or step <= self._last)
        if "loss" in record:
            self._last = step

        def send(sink: _TensorBoard | _History) -> None:
            if is_restart:
                sink.restart(step)
            sink.log(step, values)

        return self._for_each(send)

    def close(self) -> dict[str, str]:
        """Close all sinks; return errors by sink name."""
        errors = self._for_each(lambda sink: sink.close())
        self._sinks = {}
        return errors

    def _for_each(self, action: Callable[[_TensorBoard | _History], None]) -> dict[str, str]:
        errors = {}
        for name, sink in self._sinks.items():
            try:
                action(sink)
            except Exception as exc:  # noqa: BLE001 - no error of a library may stop the run
                errors[name] = f"{type(exc).__name__}: {exc}"
        self._sinks = {name: sink for name, sink in self._sinks.items() if name not in errors}
        return errors


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return a record's numbers by tag: "train/loss", "validation/NAME/loss", "evaluation/TASK/acc"."""
    if "eval_task" in record:
        prefix, group = "eval_", f"evaluation/{record['eval_task']}"
    elif "val_loss" in record:
        prefix, group = "val_", f"validation/{record['val_set']}" if "val_set" in record else "validation"
    else:
        return {TAG_BY_FIELD[name]: float(value) for name, value in record.items() if name in TAG_BY_FIELD}
    return {
        f"{group}/{name.removeprefix(prefix)}": float(value)
        for name, value in record.items()
        if name.startswith(prefix) and name not in ("eval_task", "val_set")
    }


def check_sinks_installed(names: Sequence[str]) -> None:
    """Check that the libraries of the sinks are installed.

    Raises:
        RecipeError: a library is not installed; the message names the extra.
    """
    for name in names:
        spec = find_spec(name)  # the module has the name of the extra
        if spec is None or spec.origin is None:  # W&B leaves a folder `wandb/`, which imports as an empty package
            raise RecipeError(
                f"the library of {name} is not installed",
                values={"metrics.sinks": tuple(names)},
                remedy=f"pip install 'lt-trainer[{name}]', or remove {name} from metrics.sinks",
            )


def open_sinks(
    names: Sequence[str], run: Path, *, recipe: Mapping[str, Any], step: int
) -> tuple[Sinks, dict[str, str]]:
    """Open the sinks of a recipe.

    Args:
        names: names of the sinks.
        run: run directory.
        recipe: recipe as nested tables.
        step: highest step that was reported before this start; 0 if none.

    Returns:
        The open sinks, and the errors of the others (such as an unreachable service) by name.

    Raises:
        TrainerError: a sink needs user action, such as a missing key.
        RunDirError: the run directory cannot be written.
    """
    opened: dict[str, _TensorBoard | _History] = {}
    errors: dict[str, str] = {}
    for name in names:
        try:
            if name == "tensorboard":
                opened[name] = _TensorBoard(run / "tensorboard", recipe)
            elif name == "wandb":
                opened[name] = _open_wandb(run, recipe, step)
            else:
                opened[name] = _open_trackio(run, recipe, step)
        except TrainerError:
            Sinks(opened).close()
            raise
        except Exception as exc:  # noqa: BLE001 - an unreachable service must not stop the run
            errors[name] = f"{type(exc).__name__}: {exc}"
    return Sinks(opened), errors


class _TensorBoard:
    """Event files in `<run>/tensorboard/`, one for each start and rollback; flushed after each record."""

    def __init__(self, folder: Path, recipe: Mapping[str, Any]) -> None:
        self._folder = str(folder)
        try:
            self._open(None)
        except OSError as exc:
            raise RunDirError(f"cannot write {folder}: {exc.strerror}; free space or fix its permissions") from exc
        self._writer.add_text("recipe", f"```json\n{json.dumps(recipe, indent=1)}\n```", 0)

    def _open(self, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(self._folder, purge_step=purge_step)

    def restart(self, step: int) -> None:
        self._writer.close()
        self._open(step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _History:
    """Append-only history of W&B or Trackio: steps that were sent before are not sent again.

    Args:
        send: sends one row.
        finish: flushes and closes.
        step: highest step that an earlier start sent.
    """

    def __init__(self, send: Callable[[int, Mapping[str, float]], object], finish: Callable[[], None], step: int):
        self._send, self.close = send, finish
        self._last_step = self._sent_up_to = step

    def restart(self, step: int) -> None:
        self._sent_up_to = self._last_step

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step > self._sent_up_to:
            self._last_step = step
            self._send(step, values)


def _open_wandb(run: Path, recipe: Mapping[str, Any], step: int) -> _History:
    """Create or resume the W&B run, by WANDB_MODE and the other WANDB_* variables; its files are in `<run>/wandb/`."""
    import wandb
    from wandb.errors import UsageError

    try:
        opened = wandb.init(
            id=_saved_name(run),
            resume="allow",
            dir=str(run),
            name=os.environ.get("WANDB_NAME") or run.resolve().name,
            config=dict(recipe),
            settings=wandb.Settings(**WANDB_OFF),
        )
    except UsageError as exc:
        raise TrainerError(
            f"cannot start W&B: {exc}; set WANDB_API_KEY or WANDB_MODE=offline, or remove wandb from metrics.sinks"
        ) from exc
    opened.define_metric("step", hidden=True)
    opened.define_metric("*", step_metric="step")

    def finish() -> None:
        thread = threading.Thread(target=opened.finish, daemon=True, name="wandb-finish")
        thread.start()
        thread.join(WANDB_FINISH_S)
        if thread.is_alive():
            raise TimeoutError(f"uploads still pending after {WANDB_FINISH_S:g} s; `wandb sync` uploads the rest")

    return _History(lambda step, values: opened.log({"step": step, **values}), finish, step)


def _open_trackio(run: Path, recipe: Mapping[str, Any], step: int) -> _History:
    """Create or resume the Trackio run, in `<run>/trackio/` unless a TRACKIO_* variable names another place."""
    os.environ.setdefault("TRACKIO_DIR", str((run / "trackio").resolve()))  # read when trackio is imported
    trackio = import_module("trackio")
    try:
        with redirect_stdout(io.StringIO()):  # keep the library's messages out of the run's output
            opened = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", "lt"),
                name=_saved_name(run),
                config=dict(recipe),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
    except ValueError as exc:
        raise TrainerError(
            f"cannot start Trackio: {exc}; fix the TRACKIO_* variables, or remove trackio from metrics.sinks"
        ) from exc

    def finish() -> None:
        with warnings.catch_warnings(record=True) as caught, redirect_stdout(io.StringIO()):
            warnings.simplefilter("always")  # the library reports what it could not store as warnings
            trackio.finish()  # opened.finish() would make the library's atexit hook finish it again
        if messages := [str(warning.message) for warning in caught if "trackio" in str(warning.filename)]:
            raise RuntimeError("; ".join(messages))

    return _History(lambda step, values: opened.log(dict(values), step=step), finish, step)


def _saved_name(run: Path) -> str:
    """Return the name of the run at W&B and Trackio; make and save it if there is none."""
    path = run / NAME_FILE
    try:
        if path.exists():
            return str(json.loads(path.read_text(encoding="utf-8"))["name"])
        folder = re.sub(r"[^A-Za-z0-9_-]+", "-", run.resolve().name)[:40]  # what W&B takes as an id
        name = f"{folder}-{secrets.token_hex(4)}"
        write_atomic(path, json.dumps({"name": name}) + "\n")
    except (OSError, ValueError, KeyError) as exc:
        raise RunDirError(f"cannot read or write {path}: {exc}; remove it to start a new W&B or Trackio run") from exc
    return name
