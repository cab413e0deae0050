"""Slurm's commands and what they print; one function runs them, the others are pure.

`squeue` knows a job until some minutes after its end (MinJobAge), `sacct` works only with accounting enabled, so
neither is asked for what the launch directory has.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lt_launch.errors import LaunchError
from lt_launch.target import StageState

NAMES: Mapping[StageState, str] = {
    "pending": "PENDING CONFIGURING",
    "requeued": "REQUEUED REQUEUE_HOLD SPECIAL_EXIT PREEMPTED",
    "running": "RUNNING COMPLETING STAGE_OUT SUSPENDED SIGNALING RESIZING STOPPED",
    "completed": "COMPLETED",
    "cancelled": "CANCELLED",
    "failed": "FAILED DEADLINE TIMEOUT OUT_OF_MEMORY",
    "lost": "BOOT_FAIL NODE_FAIL",
}
STATES: Mapping[str, StageState] = {name: state for state, names in NAMES.items() for name in names.split()}
"""State of a stage by Slurm's name of it."""
NO_CLUSTER_ERRORS = ("configuration source", "Unable to contact slurm controller", "process configuration file")
"""Error texts of Slurm's commands without a cluster."""
QUEUE = ("squeue", "-h", "-r", "-o", "%F|%K|%T|%r")
"""Command whose lines `parse_queue` reads: one for each job and element of an array."""


class QueueJob(NamedTuple):
    """A job, or one element of an array, in the queue."""

    id: str
    element: int | None
    """Index in its array."""
    state: StageState
    """"failed" of a job that ended in a state without a name here."""
    reason: str
    """Reason of the queue, else Slurm's name of the state."""

    @property
    def label(self) -> str:
        """Id as Slurm's commands take it."""
        return self.id if self.element is None else f"{self.id}_{self.element}"


def run_slurm_command(*words: str, cwd: Path | None = None, allowed_errors: Sequence[str] = ()) -> str:
    """Run a Slurm command and return its output.

    Args:
        words: the command line.
        cwd: working folder.
        allowed_errors: error texts that count as empty output.

    Raises:
        LaunchError: the command is missing or fails.
    """
    try:
        result = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False, timeout=120)
    except FileNotFoundError:
        raise LaunchError(f"{words[0]} is not installed here; run this on a machine of the cluster") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{' '.join(words)}: no answer in 120 s; check the controller with scontrol ping") from None
    error = result.stderr.strip() or result.stdout.strip()
    if not result.returncode:
        return result.stdout
    if any(text in error for text in allowed_errors):
        return ""
    unknown = any(text in error for text in NO_CLUSTER_ERRORS)
    remedy = "; run this on a login node of the cluster, or set SLURM_CONF" if unknown else ""
    raise LaunchError(f"{' '.join(words)}: {error}{remedy}")


def parse_queue(text: str) -> list[QueueJob]:
    """Parse the jobs in the output of `QUEUE`."""
    jobs = []
    for line in text.splitlines():
        id_, index, state, reason = line.split("|")
        number = int(index) if index.isdigit() else None
        jobs.append(QueueJob(id_, number, STATES.get(state, "failed"), state if reason == "None" else reason))
    return jobs
