"""Stop signals: recorded by the handler, evaluated by the loop between steps.

SIGTERM (schedulers, torchrun), SIGINT (Ctrl-C), SIGHUP (closing terminal), SIGUSR1 and SIGUSR2 (Slurm's warning before
a time limit) all mean: finish this step, save, and exit with 75 to be restarted. The maximum number over all ranks
decides, so a signal to one rank stops all ranks at the same step.

Entry points call `process_stop_signals` before they import anything slow. This module loads a few milliseconds after
the interpreter; who starts a rank may block the stop signals until then.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def is_main_thread() -> bool:
    """Return whether this thread may handle signals."""
    return threading.current_thread() is threading.main_thread()


def install_handlers(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    """Handle every stop signal with `handler`; return the previous handlers. Respects nohup.

    In another thread than the main one, for which Python refuses handlers, nothing changes.
    """
    if not is_main_thread():
        return {}
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [number for number in STOP_SIGNALS if not (ignored and number == signal.SIGHUP)]
    return {number: signal.signal(number, handler) for number in numbers}


def restore_handlers(handlers: dict[signal.Signals, Any]) -> None:
    """Restore the handlers that `install_handlers` returned."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


class StopSignals:
    """Stop signals, recorded in `received` instead of ending the process.

    A context restores the handlers on exit. A process with nothing else to do installs them permanently (`install`): a
    second signal, or torchrun's to a rank that is already exiting, must not kill it.
    """

    def __init__(self) -> None:
        self.received = 0
        self.received_at = 0.0
        """Time of the first signal (`time.monotonic`)."""
        self.announce = False
        """Acknowledge the first signal on standard error, since a step may take long."""
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received_at = time.monotonic()
            if self.announce:
                os.write(2, f"# {signal.Signals(number).name}: stopping after this step and a checkpoint\n".encode())
        self.received = number

    def install(self) -> None:
        """Record stop signals from now on."""
        self._previous_handlers = install_handlers(self._on_signal)

    def restore(self) -> None:
        """Restore the handlers from before `install`."""
        restore_handlers(self._previous_handlers)

    def __enter__(self) -> StopSignals:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()


@cache
def process_stop_signals() -> StopSignals:
    """Record this process's stop signals from the first call on; return one object on every call.

    Until `ignore_stop_signals` at the end of the process, or `release_stop_signals` where it goes on. Receives signals
    that the parent process had blocked.
    """
    stop = StopSignals()
    stop.install()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return stop


def ignore_stop_signals() -> None:
    """Ignore stop signals from now on; for the end of a process, which no signal may interrupt.

    The interpreter restores default handlers before it unloads modules, so that a late signal would replace the exit
    code.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    process_stop_signals.cache_clear()


def release_stop_signals() -> None:
    """Restore the handlers from before `process_stop_signals`; its next call records anew."""
    process_stop_signals().restore()
    process_stop_signals.cache_clear()
