"""Reports of the ranks of a run that is in trouble, and the cause that they show.

Every rank leaves `<run>/alive/rank00003.json` at its start (host, pid). One that hangs, fails or loses contact reports
where it is in `<run>/alive/trouble-<attempt>/`; the others see the folder and report, too. What they say, and which
rank says nothing, shows the cause: a rank's own error, else the silent ranks, else those with the smallest (step,
stage).
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

ALIVE_FOLDER = "alive"
STAGES = ("start", "data", "step", "sync_stop", "fetch_metrics", "validate", "evaluate", "save", "restore")
"""Stages that the loop marks, in the order of one step."""


@dataclass(frozen=True)
class RankReport:
    """Place of a rank in the run, and the error of its own that ended it, if any."""

    rank: int
    pid: int
    host: str
    step: int
    stage: str
    error: str = ""
    namespace: int = 0
    """`pid_namespace` of the process; 0 where it is unknown."""

    @property
    def name(self) -> str:
        """Rank, host and process, for messages."""
        return f"rank {self.rank} on {self.host} (pid {self.pid})"

    @property
    def progress(self) -> tuple[int, int]:
        """Step and number of the stage; an unknown stage counts as the end of its step."""
        return self.step, STAGES.index(self.stage) if self.stage in STAGES else len(STAGES)

    @property
    def place(self) -> str:
        """Stage and step, for messages."""
        return "before its first step" if self.stage == STAGES[0] else f"in stage {self.stage} of step {self.step}"


def write_report(folder: Path, report: RankReport) -> None:
    """Write a report, in full or not at all.

    Raises:
        OSError: the file system fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"rank{report.rank:05}.tmp"
    temporary.write_text(json.dumps(asdict(report)), encoding="utf-8")
    os.replace(temporary, temporary.with_suffix(".json"))


def read_reports(folder: Path) -> dict[int, RankReport]:
    """Return the reports in a folder by rank, without unreadable ones."""
    reports = {}
    for path in folder.glob("rank*.json"):
        with suppress(OSError, ValueError, TypeError):
            report = RankReport(**json.loads(path.read_bytes()))
            reports[report.rank] = report
    return reports


def pid_namespace() -> int:
    """Return the number of the namespace in which this process has its pid; 0 where the system does not say."""
    path = Path("/proc/self/ns/pid")
    return path.stat().st_ino if path.exists() else 0


def is_gone(start: RankReport) -> bool:
    """Return True if the process of a rank is known to have ended: it ran on this host, and the kernel has it no more.

    Of a process in another container nothing is known. One that its parent has not asked for yet (a zombie) has ended.
    """
    if not start.namespace or (start.host, start.namespace) != (socket.gethostname(), pid_namespace()):
        return False
    try:
        return Path(f"/proc/{start.pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def find_cause(reports: Mapping[int, RankReport], starts: Mapping[int, RankReport], world_size: int, logs: Path) -> str:
    """Return the most likely cause as a sentence that names a rank and its log.

    Args:
        reports: reports of this trouble, by rank.
        starts: reports of the start, for host and pid of silent ranks.
        world_size: number of ranks.
        logs: folder of the ranks' logs.
    """
    found = sorted(reports.values(), key=lambda report: (*report.progress, report.rank))
    silent = [rank for rank in range(world_size) if rank not in reports]
    failed = [report for report in found if report.error]
    if failed:
        rank, text = failed[0].rank, f"{failed[0].name} has failed {failed[0].place}: {failed[0].error}"
    elif silent:
        rank = silent[0]
        name = starts[rank].name if rank in starts else f"rank {rank}"
        text = f"{name} does not answer{_also(silent[1:])}: it was killed, is frozen, or its machine is lost"
    elif found[0].progress < found[-1].progress:
        rank = found[0].rank
        also = _also([report.rank for report in found[1:] if report.progress == found[0].progress])
        text = f"{found[0].name} is behind{also}, {found[0].place}, and blocks others {found[-1].place}"
    elif world_size > 1:
        return f"no rank has made progress, all {found[0].place}; their stacks are in {logs}"
    else:
        rank, text = found[0].rank, f"{found[0].name} has made no progress {found[0].place}"
    return f"{text}; its log is {logs / f'rank{rank:05}.log'}"


def _also(ranks: Sequence[int]) -> str:
    return f" (nor do {len(ranks)} more, such as rank {ranks[0]})" if ranks else ""
