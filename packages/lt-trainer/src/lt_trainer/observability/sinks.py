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
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lt_trainer.errors import RecipeError, TrainerError
from lt_trainer.files import write_atomic
from lt_trainer.run_directory.jsonl import read_jsonl

WANDB_FINISH_S = 30.0
"""Maximum wait for pending uploads at the end of a run."""
WANDB_OFF: dict[str, Any] = {"console": "off", "disable_git": True, "save_code": False, "symlink": False}
WANDB_OFF |= {"x_disable_meta": True, "x_disable_stats": True, "x_save_requirements": False}
USER_ERRORS = ("UsageError", "ValueError")
"""Errors of W&B and Trackio for a missing key or a wrong variable, which end a start."""


class Sinks:
    """Open sinks of a run; a failure of one never reaches the run or the others."""

    def __init__(self, sinks: Mapping[str, _TensorBoard | _History]) -> None:
        self._sinks = dict(sinks)
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
    """Return a record's numbers by tag: "train/loss", "validation/NAME/loss", "evaluation/TASK/acc".

    Of a field by layer each has its own: "train/expert_load/0".
    """
    group, prefix = "train", ""
    if "eval_task" in record:
        group, prefix = f"evaluation/{record['eval_task']}", "eval_"
    elif "val_loss" in record:
        group, prefix = f"validation/{record.get('val_set', '')}".rstrip("/"), "val_"
    numbers: dict[str, Any] = {}
    for name, value in record.items():
        if name.startswith(prefix) and name != "step" and not isinstance(value, str | None):
            tag = f"{group}/{name.removeprefix(prefix)}"
            numbers |= (
                {f"{tag}/{layer}": one for layer, one in enumerate(value)} if isinstance(value, list) else {tag: value}
            )
    return {tag: float(number) for tag, number in numbers.items()}


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


def open_sinks(names: Sequence[str], run: Path, recipe: Mapping[str, Any]) -> tuple[Sinks, dict[str, str]]:
    """Open the sinks of a recipe.

    Args:
        names: names of the sinks.
        run: run directory.
        recipe: recipe as nested tables.

    Returns:
        The open sinks, and the errors of the others (such as an unreachable service) by name.

    Raises:
        TrainerError: a sink needs user action, such as a missing key.
    """
    metrics = run / "metrics.jsonl"
    records = read_jsonl(metrics) if metrics.exists() else []
    last_step = max((record["step"] for record in records if "loss" in record), default=0)
    opened: dict[str, _TensorBoard | _History] = {}
    errors: dict[str, str] = {}
    for name in names:
        try:
            if name == "tensorboard":
                opened[name] = _TensorBoard(run / "tensorboard", recipe)
            else:
                opened[name] = {"wandb": _open_wandb, "trackio": _open_trackio}[name](run, recipe, last_step)
        except Exception as exc:
            if type(exc).__name__ in USER_ERRORS:
                Sinks(opened).close()
                remedy = f"fix the {name.upper()}_* variables (WANDB_MODE=offline needs no key)"
                raise TrainerError(f"cannot start {name}: {exc}; {remedy}, or remove it from metrics.sinks") from exc
            errors[name] = f"{type(exc).__name__}: {exc}"
    return Sinks(opened), errors


class _TensorBoard:
    """Event files in `<run>/tensorboard/`, one for each start and rollback; flushed after each record."""

    def __init__(self, folder: Path, recipe: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._open = lambda purge_step: SummaryWriter(str(folder), purge_step=purge_step)
        self._writer = self._open(None)
        self._writer.add_text("recipe", f"```json\n{json.dumps(recipe, indent=1)}\n```", 0)

    def restart(self, step: int) -> None:
        self._writer.close()
        self._writer = self._open(step)

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

    opened = wandb.init(
        id=_saved_name(run),
        resume="allow",
        dir=str(run),
        name=os.environ.get("WANDB_NAME") or run.resolve().name,
        config=dict(recipe),
        settings=wandb.Settings(**WANDB_OFF),
    )
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
    options = {"name": _saved_name(run), "config": dict(recipe), "resume": "allow", "embed": False}
    with redirect_stdout(io.StringIO()):  # keep the library's messages out of the run's output
        project = os.environ.get("TRACKIO_PROJECT", "lt")
        opened = trackio.init(project=project, **options, auto_log_gpu=False, auto_log_cpu=False)

    def finish() -> None:
        with redirect_stdout(io.StringIO()):
            trackio.finish()  # opened.finish() would make the library's atexit hook finish it again

    return _History(lambda step, values: opened.log(dict(values), step=step), finish, step)


def _saved_name(run: Path) -> str:
    """Return the name of the run at W&B and Trackio; make and save it if there is none."""
    path = run / "sinks.json"
    if not path.exists():
        folder = re.sub(r"[^A-Za-z0-9_-]+", "-", run.resolve().name)[:40]  # what W&B takes as an id
        write_atomic(path, json.dumps({"name": f"{folder}-{secrets.token_hex(4)}"}) + "\n")
    return json.loads(path.read_bytes())["name"]
