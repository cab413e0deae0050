"""Slurm's own commands: what is asked, and how the answers read. Text in, values out; one function runs them.

`scontrol` knows a job until some minutes after its end (MinJobAge), `sacct` only where the cluster keeps accounts, so
neither is asked for what the launch's own folder tells.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lt_launch.backend import Node, State
from lt_launch.errors import LaunchError

__all__ = ["STATES", "QueueJob", "ask", "jobs_of", "nodes_of", "sacct_states", "submit"]

FIELD = re.compile(r"(?:^| )([A-Za-z:/_]+)=((?:(?! [A-Za-z:/_]+=).)*)")
STATES: Mapping[str, State] = {
    "PENDING": "waiting",
    "CONFIGURING": "waiting",
    "REQUEUED": "requeued",
    "REQUEUE_HOLD": "requeued",
    "SPECIAL_EXIT": "requeued",
    "RUNNING": "running",
    "COMPLETING": "running",
    "STAGE_OUT": "running",
    "SUSPENDED": "running",
    "SIGNALING": "running",
    "RESIZING": "running",
    "STOPPED": "running",
    "COMPLETED": "done",
    "CANCELLED": "cancelled",
    "DEADLINE": "failed",
    "FAILED": "failed",
    "TIMEOUT": "failed",
    "OUT_OF_MEMORY": "failed",
    "BOOT_FAIL": "lost",
    "NODE_FAIL": "lost",
    "PREEMPTED": "requeued",
}


NO_CLUSTER = ("configuration source", "Unable to contact slurm controller", "Unable to process configuration file")
"""In what Slurm's commands say where they find no cluster."""


@dataclass(frozen=True, kw_only=True)
class QueueJob:
    """A job, or one element of an array, as the controller shows it."""

    id: str
    index: int | None
    state: str
    reason: str = ""
    nodes: str = ""
    restarts: int = 0
    exit_code: int | None = None
    fields: Mapping[str, str] = field(default_factory=dict)


def ask(*words: str, cwd: Path | None = None, allow: Sequence[str] = ()) -> str:
    """Run one of Slurm's commands; its output.

    Args:
        words: the command line.
        cwd: where.
        allow: texts in an error that make it an empty answer.

    Raises:
        LaunchError: the command is missing or fails.
    """
    try:
        done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False, timeout=120)
    except FileNotFoundError:
        raise LaunchError(f"{words[0]} is not installed here; start this on a machine of the cluster") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{' '.join(words)} has not answered for 120 s; is the controller up? (scontrol ping)"
        ) from None
    if done.returncode:
        error = done.stderr.strip() or done.stdout.strip()
        if any(text in error for text in allow):
            return ""
        remedy = ""
        if any(text in error for text in NO_CLUSTER):
            remedy = "; no Slurm controller is known here: start this on a login node of the cluster, or set SLURM_CONF"
        raise LaunchError(f"{' '.join(words)}: {error}{remedy}")
    return done.stdout


def jobs_of(text: str) -> list[QueueJob]:
    """The jobs in the answer of `scontrol -o show job`, one a line."""
    found = []
    for line in text.splitlines():
        fields = {match[1]: match[2].strip() for match in FIELD.finditer(line)}
        if "JobId" not in fields:
            continue
        code = fields.get("ExitCode", "").partition(":")[0]
        index = fields.get("ArrayTaskId", "")
        found.append(
            QueueJob(
                id=fields.get("ArrayJobId", fields["JobId"]),
                index=int(index) if index.isdigit() else None,
                state=fields.get("JobState", ""),
                reason="" if fields.get("Reason", "None") == "None" else fields["Reason"],
                nodes="" if fields.get("NodeList", "(null)") == "(null)" else fields["NodeList"],
                restarts=int(fields.get("Restarts", "0") or 0),
                exit_code=int(code) if code.isdigit() else None,
                fields=fields,
            )
        )
    return found


def nodes_of(text: str) -> list[Node]:
    """The nodes in the answer of `sinfo -h -N -o '%N|%P|%T|%G|%E'`."""
    found = []
    for line in text.splitlines():
        name, partition, state, gres, reason = (word.strip() for word in line.split("|", 4))
        found.append(
            Node(
                name=name,
                state=state.rstrip("*~#!%$@^-") + (" (no answer)" if state.endswith("*") else ""),
                partition=partition.rstrip("*"),
                devices="" if gres == "(null)" else gres,
                reason="" if reason == "none" else reason,
            )
        )
    return found


def sacct_states(text: str) -> dict[str, tuple[str, str]]:
    """State and exit code by job id, from `sacct -X -n -P -o JobID,State,ExitCode`."""
    found: dict[str, tuple[str, str]] = {}
    for line in text.splitlines():
        words = line.split("|")
        if len(words) >= 3:
            found[words[0]] = (words[1].partition(" ")[0], words[2])
    return found


def submit(commands: Sequence[Sequence[str]], stages: Sequence[str], folder: Path) -> dict[str, str]:
    """Submit in order, each with the ids of those before it; what was submitted is taken back when one is refused.

    Raises:
        LaunchError: Slurm refuses one, in its own words.
    """
    ids: dict[str, str] = {}
    for stage, command in zip(stages, commands, strict=True):
        words = [_with_ids(word, ids) for word in command]
        try:
            answer = ask(*words, cwd=folder)
        except LaunchError as exc:
            if ids:
                ask("scancel", *ids.values())
            also = f"; the {len(ids)} stage(s) before it were taken back" if ids else ""
            raise LaunchError(f"Slurm refuses stage {stage}: {exc}{also}") from exc
        ids[stage] = answer.strip().splitlines()[-1].partition(";")[0]
    return ids


def _with_ids(word: str, ids: Mapping[str, str]) -> str:
    return re.sub(r"\{jobid:([^}]*)\}", lambda match: ids[match[1]], word)
