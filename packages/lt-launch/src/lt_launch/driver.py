"""Driver process of a launch on a target without a queue, in the foreground or background.

`python -m lt_launch.driver LAUNCH_DIRECTORY` runs it; it reads everything from the launch directory.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

from lt_launch import launch_dir
from lt_launch.attempt import Stop, Transport, handle_stop_signals
from lt_launch.errors import LaunchError
from lt_launch.hosts import Host
from lt_launch.launch_dir_status import read_logs, read_stage_statuses
from lt_launch.process_start import identify_process
from lt_launch.profile import Profile
from lt_launch.stage_runner import StageRunner
from lt_launch.target import Launch, LaunchTarget, RenderedLaunch, StageStatus, get_target

LOCK_OWNER = re.compile(r"process (?P<pid>\d+) on (?P<host>\S+) since (?P<start>\S+)")


class DrivenTarget(LaunchTarget):
    """Target without a queue: a process of ours runs its launches."""

    def hosts_and_transport(self, profile: Profile) -> tuple[tuple[Host, ...], Transport]:
        """Return the hosts in allocation order and the transport that reaches them."""
        raise NotImplementedError

    def submit(self, launch: Launch, rendered: RenderedLaunch, *, detach: bool) -> tuple[Mapping[str, str], int]:
        """Run the launch to its end, or in a background process."""
        return submit(launch, detach=detach)

    def status(self, launch: Launch) -> tuple[StageStatus, ...]:
        """Return the status from the launch directory."""
        return read_stage_statuses(launch)

    def logs(self, launch: Launch, *, stage: str, rank: int, follow: bool) -> Iterator[str]:
        """Yield log lines from the attempts' folders."""
        return read_logs(launch, stage=stage, rank=rank, follow=follow)

    def cancel(self, launch: Launch) -> Iterator[str]:
        """Send a stop signal to the process that runs the launch."""
        return cancel(launch)

    def list(self, profile: Profile) -> Iterable[StageStatus]:
        """Return an empty list: this machine lists its launches itself."""
        return ()


def submit(launch: Launch, *, detach: bool) -> tuple[Mapping[str, str], int]:
    """Run a launch to its end, or start the background process that does.

    Returns:
        The job ids (empty, or the background process's id) and the exit code.
    """
    folder = launch.directory.parent
    if not detach:
        from lt_ckpt.terminal_text import escape_controls

        line = f"# folder: {folder}; elsewhere: lt launch status {shlex.quote(folder.name)}"
        sys.stderr.write(escape_controls(line, keep="") + "\n")
        sys.stderr.flush()
        return {}, run_launch(launch)
    with open(launch.directory / "output.log", "ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "lt_launch.driver", str(launch.directory)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + 30
    while not launch_dir.lock_owner(launch.directory):
        if process.poll() is not None and process.returncode != 0:
            text = (launch.directory / "output.log").read_text(encoding="utf-8", errors="replace")
            raise LaunchError(f"the background process has ended with {process.returncode}: {text[-500:].strip()}")
        if process.poll() == 0 or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    process.returncode = process.returncode or 0  # detached: suppress the ResourceWarning of a running child
    sys.stderr.write(f"# in the background as process {process.pid}\n")
    return {stage.name: str(process.pid) for stage in launch.pipeline.stages}, 0


def run_launch(launch: Launch) -> int:
    """Run all stages of a launch in this process and return its exit code."""
    target = cast(DrivenTarget, get_target(launch.target))
    specs = target.stage_specs(launch.pipeline, launch.profile, cwd=os.getcwd())
    hosts, transport = target.hosts_and_transport(launch.profile)
    stop = Stop()
    with handle_stop_signals(stop):
        return StageRunner(launch, specs, transport, hosts, stop).run()


def cancel(launch: Launch) -> Iterator[str]:
    """Signal the process that runs a launch to stop it.

    Raises:
        LaunchError: the process that its lock names is another one.
    """
    owner = launch_dir.lock_owner(launch.directory)
    if not owner:
        yield "it is not running; there is nothing to stop"
        return
    match = LOCK_OWNER.fullmatch(owner)
    if match is None or match["host"] != socket.gethostname():
        raise LaunchError(f"{owner} runs it; cancel it there")
    pid = identify_process(f"{match['pid']} {match['start']}")
    if not pid:
        raise LaunchError(f"{owner} no longer runs, and another process holds {launch.directory}/launch.lock; end that")
    os.kill(pid, signal.SIGTERM)
    yield f"asked process {pid} on {match['host']} to stop; training saves and exits"


if __name__ == "__main__":
    sys.exit(run_launch(launch_dir.load_launch(sys.argv[1])))
