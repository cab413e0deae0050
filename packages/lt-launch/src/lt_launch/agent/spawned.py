"""What a torchrun of a node hides: which of its processes failed, and with which code.

`python -m lt_trainer` leaves each rank's code in the folder LT_EXIT_CODES; of other programs torchrun's own report on
standard error tells the first failure. What is found stands for the node.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

WANTS_A_PERSON = (64, 70)
REQUEUE = 75
RANK, CODE = re.compile(r"^\s*rank\s*:\s*(\d+)"), re.compile(r"^\s*exitcode\s*:\s*(-?\d+)")


def codes_of_torchrun(folder: Path, node: int, rank: int, code: int, lines: list[str]) -> tuple[int, int]:
    """Rank and exit code that stand for a node whose torchrun has ended with `code`.

    Args:
        folder: of the attempt.
        node: number of the node.
        rank: the node's first rank, which is named where nothing better is known.
        code: of torchrun, -n for signal n.
        lines: what torchrun and its processes wrote last.
    """
    noted = _noted(folder / f"codes-{node:05}")
    if code == 0:
        return rank, 0
    told = _reported(lines)
    for wanted in (*WANTS_A_PERSON, REQUEUE):
        for one in sorted(noted):
            if noted[one] == wanted:
                return one, wanted
    return told or (rank, code)


def _noted(folder: Path) -> dict[int, int]:
    try:
        names = [name for name in os.listdir(folder) if name.isdigit()]
        return {int(name): int((folder / name).read_text(encoding="ascii")) for name in names}
    except (OSError, ValueError):
        return {}


def _reported(lines: list[str]) -> tuple[int, int] | None:
    """The root cause in torchrun's report; None where there is none."""
    at = next((at for at, line in enumerate(lines) if line.startswith("Root Cause")), None)
    if at is None:
        return None
    rank = next((int(match[1]) for line in lines[at:] if (match := RANK.match(line))), None)
    code = next((int(match[1]) for line in lines[at:] if (match := CODE.match(line))), None)
    return None if rank is None or code is None else (rank, code)
