"""The training of a quickstart: two processes, one after the other, watched through the run directory.

The first stops halfway exactly as SIGTERM would make it: it saves and exits with 75. Before it exits it runs some
shadow steps on, which are written apart and saved nowhere. The second process resumes from the checkpoint; its first
losses must equal the shadow's bit for bit, which shows that nothing was lost between them.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt_data import Progress
from lt_trainer.journal import SHADOW
from lt_trainer.metrics import read_jsonl
from lt_trainer.quickstart.settings import Folder, QuickstartError, Settings
from lt_trainer.run import EXIT_DONE, EXIT_REQUEUE

LOOK_EVERY_S = 0.25


@dataclass(frozen=True, kw_only=True)
class Resume:
    """What the stop and the resume showed: losses of the shadow steps, and of the same steps in the new process."""

    step: int
    shadow: tuple[float, ...]
    resumed: tuple[float, ...]

    @property
    def equal(self) -> bool:
        """Whether every loss is the same bit for bit (JSON keeps every digit of a float)."""
        return len(self.shadow) > 0 and self.shadow == self.resumed


def losses(folder: Folder) -> dict[int, float]:
    """Training loss by step; where a step was run twice, the later run counts."""
    return {
        int(record["step"]): record["loss"] for record in _records(folder.run / "metrics.jsonl") if "loss" in record
    }


def validation_loss(folder: Folder) -> tuple[float, int]:
    """The last validation loss in nats per token, and the tokens it is over."""
    record = [record for record in _records(folder.run / "metrics.jsonl") if "val_loss" in record][-1]
    return record["val_loss"], int(record["val_tokens"])


def last_metrics(folder: Folder) -> dict[str, float]:
    """The record of the last training step."""
    return [record for record in _records(folder.run / "metrics.jsonl") if "loss" in record][-1]


def peak_source(folder: Folder) -> str:
    """Where the peak behind MFU comes from, as the last process said."""
    return [record for record in _records(folder.run / "events.jsonl") if record["event"] == "start"][-1]["peak_source"]


def _records(path: Path) -> list[dict[str, Any]]:
    return read_jsonl(path) if path.exists() else []


def shadow_losses(folder: Folder) -> dict[int, float]:
    """Loss of each shadow step."""
    return {int(record["step"]): record["loss"] for record in _records(folder.run / SHADOW)}


def train(folder: Folder, settings: Settings, progress: Progress) -> Resume:
    """Train to the end, stopping once halfway; what an earlier start has done already is not done again.

    Raises:
        QuickstartError: a training process failed; its message is passed on.
    """
    if not shadow_losses(folder) and not is_done(folder):
        _process(
            folder,
            settings,
            progress,
            "--stop-at-step",
            str(settings.halfway),
            "--shadow-steps",
            str(settings.shadow_steps),
        )
    if not is_done(folder):
        _process(folder, settings, progress)
    if not is_done(folder):
        raise QuickstartError(
            f"training was stopped after step {max(losses(folder), default=0)} and saved; run the same command "
            "again to go on"
        )
    shadow, resumed = shadow_losses(folder), losses(folder)
    return Resume(step=settings.halfway, shadow=tuple(shadow.values()), resumed=tuple(resumed[step] for step in shadow))


def is_done(folder: Folder) -> bool:
    """Whether the run has finished."""
    return any(record["event"] == "done" for record in _records(folder.run / "events.jsonl"))


def _process(folder: Folder, settings: Settings, progress: Progress, *options: str) -> None:
    """One training process, with its output in a log and its steps shown as progress."""
    command = [sys.executable, "-m", "lt_trainer", "run", str(folder.recipe), *options]
    with open(folder.log, "a", encoding="utf-8") as log:
        start = log.tell()
        log.write(f"$ {shlex.join(command)}\n")
        log.flush()
        with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process:
            while process.poll() is None:
                time.sleep(LOOK_EVERY_S)
                progress(max(losses(folder), default=0), settings.steps, "steps")
    if process.returncode not in (EXIT_DONE, EXIT_REQUEUE):
        with open(folder.log, encoding="utf-8") as log:
            log.seek(start)
            tail = "".join(log.readlines()[-12:])
        raise QuickstartError(
            f"training ended with exit code {process.returncode}; its last lines (all are in {folder.log}):\n{tail}"
        )
