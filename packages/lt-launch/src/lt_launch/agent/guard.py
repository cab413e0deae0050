"""A process above an agent that nobody else watches: it tells the other nodes when the agent was killed.

Under Slurm nothing stands between the nodes but the shared folder: srun leaves the other tasks alone when one ends
(they may have a checkpoint to save), so an agent that the kernel killed would leave them at work for a result that
cannot come any more. The guard forks the agent, hands stop signals on, and when a signal has ended it makes
`first.json`, by which the other agents know that something has failed. Whoever watches agents himself (--control)
needs no guard.

Cost: one idle process, which waits in the kernel.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from .node import STOP_SIGNALS
from .ranks import dies_with_parent


def guarded(run: Callable[[], int], folder: Path, node: int) -> int:
    """Run in a process of its own; this returns in both, each of which is about to end.

    Args:
        run: what the agent does; its exit code.
        folder: of the attempt.
        node: the number of the node.

    Returns:
        The exit code of `run`; in the guard 128 + the number of the signal that ended the agent, if one has.
    """
    waited = {*STOP_SIGNALS, signal.SIGCHLD}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
        waited.discard(signal.SIGHUP)
    tie = dies_with_parent()
    # Held back in both: the agent takes them once it can, and here they wait for `sigwait`. They stay held back: what
    # comes after the agent's end must not change the exit code.
    signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    child = os.fork()
    if child == 0:
        if tie is not None:
            tie()
        return run()
    while True:
        number = signal.sigwait(waited)
        if number != signal.SIGCHLD:
            os.kill(child, number)
            continue
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            break
    if os.WIFEXITED(status):
        return os.WEXITSTATUS(status)
    number = os.WTERMSIG(status)
    record = {"node": node, "time": time.time(), "signal": number, "reason": "the agent was killed"}
    with suppress(OSError), open(folder / "first.json", "x", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    return 128 + number
