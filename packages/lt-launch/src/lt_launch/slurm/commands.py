"""Slurm's commands and parsers of their output; one function runs them, the others are pure.

`scontrol` retains a job until some minutes after its end (MinJobAge), `sacct` works only with accounting enabled, so
neither is queried for information that the launch directory has.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lt_launch.errors import LaunchError
from lt_launch.target import StageState, TargetNode

FIELD_PATTERN = re.compile(r"(?:^| )([A-Za-z:/_]+)=((?:(?! [A-Za-z:/_]+=).)*)")
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
NO_CLUSTER_ERRORS = (
    "configuration source",
    "Unable to contact slurm controller",
    "Unable to process configuration file",
)
"""Error texts of Slurm's commands without a cluster."""


@dataclass(frozen=True, kw_only=True)
class QueueJob:
    """A job, or one element of an array, in the queue of the controller."""

    id: str
    index: int | None
    state: str
    reason: str = ""
    nodes: str = ""
    restarts: int = 0
    exit_code: int | None = None
    fields: Mapping[str, str] = field(default_factory=dict)


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
        raise LaunchError(
            f"{' '.join(words)} no answer within 120 s; check the controller with scontrol ping"
        ) from None
    if result.returncode:
        error = result.stderr.strip() or result.stdout.strip()
        if any(text in error for text in allowed_errors):
            return ""
        remedy = ""
        if any(text in error for text in NO_CLUSTER_ERRORS):
            remedy = "; run this on a login node of the cluster, or set SLURM_CONF"
        raise LaunchError(f"{' '.join(words)}: {error}{remedy}")
    return result.stdout


def parse_jobs(text: str) -> list[QueueJob]:
    """Parse the jobs in the output of `scontrol -o show job`, one per line."""
    jobs = []
    for line in text.splitlines():
        fields = {match[1]: match[2].strip() for match in FIELD_PATTERN.finditer(line)}
        if "JobId" not in fields:
            continue
        code = fields.get("ExitCode", "").partition(":")[0]
        index = fields.get("ArrayTaskId", "")
        jobs.append(
            QueueJob(
                id=fields.get("ArrayJobId", fields["JobId"]),
                index=_parse_int(index),
                state=fields.get("JobState", ""),
                reason="" if fields.get("Reason", "None") == "None" else fields["Reason"],
                nodes="" if fields.get("NodeList", "(null)") == "(null)" else fields["NodeList"],
                restarts=_parse_int(fields.get("Restarts", "")) or 0,
                exit_code=_parse_int(code),
                fields=fields,
            )
        )
    return jobs


def _parse_int(text: str) -> int | None:
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def parse_nodes(text: str) -> list[TargetNode]:
    """Parse the nodes in the output of `sinfo -h -N -o '%N|%P|%T|%G|%E'`.

    Raises:
        LaunchError: a line is none of a node.
    """
    nodes = []
    for line in text.splitlines():
        try:
            name, partition, state, gres, reason = (word.strip() for word in line.split("|", 4))
        except ValueError:
            raise LaunchError(f"sinfo: {line[:200]!r} is not a line of NODE|PARTITION|STATE|GRES|REASON") from None
        nodes.append(
            TargetNode(
                name=name,
                state=state.rstrip("*~#!%$@^-") + (" (no answer)" if state.endswith("*") else ""),
                partition=partition.rstrip("*"),
                devices="" if gres == "(null)" else gres,
                reason="" if reason == "none" else reason,
            )
        )
    return nodes


def parse_sacct(text: str) -> dict[str, tuple[str, str]]:
    """Parse state and exit code by job id from `sacct -X -n -P -o JobID,State,ExitCode`."""
    states: dict[str, tuple[str, str]] = {}
    for line in text.splitlines():
        words = line.split("|")
        if len(words) >= 3:
            states[words[0]] = (words[1].partition(" ")[0], words[2])
    return states


def submit_chain(commands: Sequence[Sequence[str]], stages: Sequence[str], folder: Path) -> dict[str, str]:
    """Submit in order, each with the ids of its predecessors; a failure cancels those already submitted.

    Raises:
        LaunchError: Slurm rejects one; with Slurm's message.
    """
    ids: dict[str, str] = {}
    for stage, command in zip(stages, commands, strict=True):
        words = [_substitute_job_ids(word, ids) for word in command]
        try:
            answer = run_slurm_command(*words, cwd=folder)
        except LaunchError as exc:
            if ids:
                run_slurm_command("scancel", *ids.values())
            cancelled = f"; the {len(ids)} stage(s) before it were cancelled" if ids else ""
            raise LaunchError(f"Slurm rejected stage {stage}: {exc}{cancelled}") from exc
        lines = answer.strip().splitlines()
        if not lines:
            raise LaunchError(f"sbatch answered nothing for stage {stage}; see squeue for what it has submitted")
        ids[stage] = lines[-1].partition(";")[0]
    return ids


def _substitute_job_ids(word: str, ids: Mapping[str, str]) -> str:
    return re.sub(r"\{jobid:([^}]*)\}", lambda match: ids[match[1]], word)
