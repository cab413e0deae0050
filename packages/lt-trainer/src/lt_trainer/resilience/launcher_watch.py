"""Watch of the process that started this one: when it dies, this one stops as on SIGTERM.

A torchrun or a Slurm step daemon that is killed leaves its processes behind. They would train on to the last step
unwatched, on devices that the scheduler may give to another job. So a thread compares the parent's number, which the
kernel changes when the parent dies, and raises SIGTERM: a rank saves and exits with 75, torchrun ends its ranks.

Cost: one system call per second.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time

POLL_S = 1.0
LAUNCHED_VARIABLE = "TORCHELASTIC_RUN_ID"
"""Environment variable of ranks whose launcher waits for them. A shell may end before what it started, under nohup."""


LAUNCHER_PID_VARIABLE = "LT_LAUNCHER_PID"
"""Environment variable with a process to watch besides the parent, where a shell stands between the two."""


def stop_when_launcher_dies() -> None:
    """Raise SIGTERM in this process once the parent of now has died."""
    parent = os.getppid()
    launcher = int(os.environ.get(LAUNCHER_PID_VARIABLE) or 0)
    watched = launcher if launcher and _exists(launcher) else 0  # it is not seen from within some containers

    def watch() -> None:
        while os.getppid() == parent and (not watched or _exists(watched)):
            time.sleep(POLL_S)
        os.write(2, f"# process {parent}, which started this one, has died: stopping as on SIGTERM\n".encode())
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="launcher watch", daemon=True).start()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as exc:
        return exc.errno == errno.EPERM  # it runs as another user
    return True
