"""What every benchmark prints of the machine and as a table, and cases in processes of their own.

Scripts print the Markdown lines that stand on the pages of docs/benchmarks.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


def describe_machine(*packages: str) -> str:
    """Return date, processor, memory, load, and versions of Python and of packages."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (
        f"{datetime.date.today()}, {names[0] if names else platform.machine()}, {os.cpu_count()} CPUs, "
        f"{memory / 2**30:.0f} GiB, load {os.getloadavg()[0]:.1f}. Python {platform.python_version()}"
        + "".join(f", {name} {version(name)}" for name in packages)
        + "."
    )


def format_table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = ["| " + " | ".join(line) + " |" for line in (head, *rows)]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]


def run_child(command: Sequence[str | Path]) -> dict[str, Any]:
    """Run a command; return the JSON object on the last line of its output."""
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])
