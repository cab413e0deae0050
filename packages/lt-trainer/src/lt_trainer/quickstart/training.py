"""Training of a quickstart: two processes in sequence, monitored through the run directory.

The first stops halfway as on SIGTERM: it saves and exits with 75. Before that it runs some steps beyond the checkpoint,
whose losses go to a separate file and whose state is not saved. The second process resumes from the checkpoint; its
first losses must equal those bit for bit, which shows that the checkpoint has the full state.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt_data import Progress
from lt_trainer.constants import EXIT_DONE, EXIT_REQUEUE
from lt_trainer.files import open_for_appending, open_regular
from lt_trainer.observability.run_logger import RESUME_CHECK_FILE
from lt_trainer.quickstart.settings import QuickstartError, QuickstartFolder, QuickstartSettings
from lt_trainer.run_directory.jsonl import read_jsonl
from lt_trainer.run_directory.typed_records import is_int, is_number, read_events, read_metrics

POLL_INTERVAL_S = 0.25


@dataclass(frozen=True, kw_only=True)
class ResumeCheck:
    """Losses of the steps after the stop, and of the same steps in the resumed process."""

    step: int
    expected: tuple[float, ...]
    resumed: tuple[float, ...]

    @property
    def is_equal(self) -> bool:
        """True if all losses are bitwise equal (JSON keeps all digits of a float)."""
        return len(self.expected) > 0 and self.expected == self.resumed


def losses(folder: QuickstartFolder) -> dict[int, float]:
    """Return the training loss by step; a repeated step has its last loss."""
    return {record["step"]: record["loss"] for record in _metrics(folder) if "loss" in record}


def validation_loss(folder: QuickstartFolder) -> tuple[float, int]:
    """Return the last validation loss in nats per token, and its number of tokens."""
    record = _last(_metrics(folder), ("val_loss", "val_tokens"), folder)
    return record["val_loss"], record["val_tokens"]


def last_metrics(folder: QuickstartFolder) -> dict[str, float]:
    """Return the record of the last training step."""
    return _last(_metrics(folder), ("loss", "tokens_per_sec", "mfu"), folder)


def peak_source(folder: QuickstartFolder) -> str:
    """Return the source of the peak FLOP/s behind MFU, from the last process."""
    return _last(_events(folder), ("peak_source",), folder)["peak_source"]


def _metrics(folder: QuickstartFolder) -> list[dict[str, Any]]:
    path = folder.run / "metrics.jsonl"
    return read_metrics(path) if path.exists() else []


def _events(folder: QuickstartFolder) -> list[dict[str, Any]]:
    path = folder.run / "events.jsonl"
    return read_events(path) if path.exists() else []


def _last(records: Sequence[dict[str, Any]], fields: Sequence[str], folder: QuickstartFolder) -> dict[str, Any]:
    found = [record for record in records if all(name in record for name in fields)]
    if not found:
        raise QuickstartError(f"{folder.run} has no record with {', '.join(fields)}; start over with --overwrite")
    return found[-1]


def expected_losses(folder: QuickstartFolder) -> dict[int, float]:
    """Return the loss of each resume-check step."""
    path = folder.run / RESUME_CHECK_FILE
    records = read_jsonl(path) if path.exists() else []
    if not all(is_int(record.get("step")) and is_number(record.get("loss")) for record in records):
        raise QuickstartError(f"{path} is damaged: a record without step or loss; start over with --overwrite")
    return {record["step"]: record["loss"] for record in records}


def train(folder: QuickstartFolder, settings: QuickstartSettings, progress: Progress) -> ResumeCheck:
    """Train to the end with one stop halfway; continues an earlier start.

    Raises:
        QuickstartError: a training process failed; the message has the end of its log.
    """
    if not expected_losses(folder) and not is_done(folder):
        _run_process(
            folder,
            settings,
            progress,
            "--stop-after-step",
            str(settings.stop_after_step),
            "--verify-resume-steps",
            str(settings.verify_resume_steps),
        )
    if not is_done(folder):
        _run_process(folder, settings, progress)
    if not is_done(folder):
        raise QuickstartError(
            f"training was stopped and saved after step {max(losses(folder), default=0)}; rerun to resume"
        )
    expected, resumed = expected_losses(folder), losses(folder)
    if missing := sorted({1, *expected} - set(resumed)):
        raise QuickstartError(f"{folder.run} has no record of step {missing[0]}; start over with --overwrite")
    return ResumeCheck(
        step=settings.stop_after_step,
        expected=tuple(expected.values()),
        resumed=tuple(resumed[step] for step in expected),
    )


def is_done(folder: QuickstartFolder) -> bool:
    """Return True if the run has completed."""
    return any(record["event"] == "completed" for record in _events(folder))


def _open_log(path: Path) -> int:
    try:
        return open_for_appending(path)
    except OSError as exc:
        raise QuickstartError(f"cannot write {path}: {exc.strerror}; free space or choose another --out") from exc


def _run_process(folder: QuickstartFolder, settings: QuickstartSettings, progress: Progress, *options: str) -> None:
    """Run one training process with its output in the log, and report progress."""
    command = [sys.executable, "-P", "-m", "lt_trainer", "run", str(folder.recipe), *options]
    with os.fdopen(_open_log(folder.log), "a", encoding="utf-8") as log:
        start = log.tell()
        log.write(f"$ {shlex.join(command)}\n")
        log.flush()
        with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process:
            while process.poll() is None:
                time.sleep(POLL_INTERVAL_S)
                progress(max(losses(folder), default=0), settings.steps, "steps")
    if process.returncode not in (EXIT_DONE, EXIT_REQUEUE):
        with open_regular(folder.log) as output:
            output.seek(start)
            tail = b"".join(output.readlines()[-12:]).decode(errors="replace")
        raise QuickstartError(f"training exited with code {process.returncode}; last lines of {folder.log}:\n{tail}")
