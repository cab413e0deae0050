"""The process that runs a launch on a target without a queue: this one, or one in the background.

`python -m lt_launch.driver LAUNCH_DIRECTORY` is that process; it reads everything from the launch directory.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, cast

from lt_launch import record
from lt_launch.backend import Launch, backend
from lt_launch.conduct import Stop, Transport
from lt_launch.errors import LaunchError
from lt_launch.hosts import Host
from lt_launch.job import Pipeline
from lt_launch.profile import Profile
from lt_launch.stages import Stages, stop_signals

__all__ = ["cancel", "drive", "submit"]

HOLDER = re.compile(r"process (\d+) on (\S+)")


class Reaching(Protocol):
    """What a target without a queue has besides a `Backend`."""

    def specs(self, pipeline: Pipeline, profile: Profile, *, cwd: str) -> Mapping[str, Mapping[str, Any]]:
        """What the agents get, by stage."""
        ...

    def reach(self, profile: Profile) -> tuple[tuple[Host, ...], Transport]:
        """The hosts in allocation order, and how to reach them."""
        ...


def submit(launch: Launch, *, detach: bool) -> tuple[Mapping[str, str], int]:
    """Run a launch to its end, or start the process that does.

    Returns:
        No ids, or the background process's; and the exit code.
    """
    if not detach:
        return {}, drive(launch)
    with open(launch.directory / "output.log", "ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "lt_launch.driver", str(launch.directory)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + 30
    while not record.holder(launch.directory):
        if process.poll() is not None and process.returncode != 0:
            text = (launch.directory / "output.log").read_text(encoding="utf-8", errors="replace")
            raise LaunchError(f"the background process has ended with {process.returncode}: {text[-500:].strip()}")
        if process.poll() == 0 or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    process.returncode = process.returncode or 0  # it is on its own from here on
    sys.stderr.write(f"# in the background as process {process.pid}; lt launch status {launch.directory.parent}\n")
    return {stage.name: str(process.pid) for stage in launch.pipeline.stages}, 0


def drive(launch: Launch) -> int:
    """Run all stages of a launch from this process; its exit code."""
    target = cast(Reaching, backend(launch.backend))
    specs = target.specs(launch.pipeline, launch.profile, cwd=os.getcwd())
    hosts, transport = target.reach(launch.profile)
    stop = Stop()
    with stop_signals(stop):
        return Stages(launch, specs, transport, hosts, stop).run()


def cancel(launch: Launch) -> Iterator[str]:
    """Ask the process that runs a launch to stop it."""
    who = record.holder(launch.directory)
    if not who:
        yield "nobody runs it any more; there is nothing to stop"
        return
    match = HOLDER.fullmatch(who)
    if match is None or match[2] != socket.gethostname():
        raise LaunchError(f"it is run by {who}; cancel it there")
    os.kill(int(match[1]), signal.SIGTERM)
    yield f"asked {who} to stop; training saves and leaves"


if __name__ == "__main__":
    sys.exit(drive(record.open_launch(sys.argv[1])))
