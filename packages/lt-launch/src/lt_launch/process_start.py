"""Identification of a process by its id and its start time, since ids are used again."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def process_start(pid: int) -> str:
    """Return the start time of a running process as opaque text, "" if there is none.

    Linux: clock ticks since boot, from /proc; elsewhere: the date that ps tells.
    """
    if Path("/proc/self/stat").exists():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2].split()
        except OSError:
            return ""
        return "" if fields[0] == "Z" else fields[19]
    command = ["ps", "-o", "lstart=", "-p", str(pid)]
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return "-".join(done.stdout.split())


def identify_process(text: str) -> int:
    """Return the process id of the text "PID START", 0 if no such process runs."""
    pid, _, start = text.strip().partition(" ")
    if not pid.isascii() or not pid.isdecimal() or len(pid) > 10 or int(pid) < 2 or not start:
        return 0
    return int(pid) if process_start(int(pid)) == start else 0
