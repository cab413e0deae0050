"""Process beside those of a node that ends them when whoever started them is gone.

It does nothing but wait for the end of its standard input, which the kernel closes when the launcher dies, however it
does. Then every process group gets SIGTERM, so that training saves, and what is left after the grace time SIGKILL.
Processes are found by a variable in their environment, not by parents or groups, since torchrun gives each rank a
session of its own. Standard library only and Python 3.9: the target ssh sends this file to its hosts.

Cost: one idle process per node and attempt; when it is needed, a look at the environment of every process there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

TOKEN = "LT_LAUNCH_TOKEN"
"""Environment variable of all processes of an attempt on a node."""
DONE = b"done"
POLL_S = 0.2
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def find_processes(token: str) -> list[int]:
    """Return the processes with a token in their environment; none where the system does not tell (macOS)."""
    wanted, found = f"{TOKEN}={token}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def kill_processes(token: str) -> bool:
    """Kill the processes that have a token; return False if there is none."""
    found = find_processes(token)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(found)


def signal_groups(groups: Iterable[int], number: int) -> bool:
    """Send a signal to process groups; return False if none is left."""
    left = False
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
            left = True
    return left


def main(token: str, grace_period_s: float) -> None:
    """Wait for the end of standard input, then end the groups named there and all with the token."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    words = sys.stdin.buffer.read().split()
    if DONE in words:
        return
    groups = [int(word) for word in words]
    signal_groups(groups, signal.SIGTERM)
    deadline = time.monotonic() + grace_period_s
    while time.monotonic() < deadline and (find_processes(token) or signal_groups(groups, 0)):
        time.sleep(POLL_S)
    while kill_processes(token) or signal_groups(groups, signal.SIGKILL):
        time.sleep(POLL_S)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
