"""Signals become one number that the loop looks at between steps; nothing else happens inside a handler.

SIGTERM (schedulers, torchrun), SIGINT (Ctrl-C), SIGHUP (a terminal that closes), SIGUSR1 and SIGUSR2 (Slurm's warning
before the end of a time limit) all mean the same: finish this step, save, exit 75 and whoever started the run starts
it again. The largest number over all ranks decides, so a signal to one rank stops every rank at the same step.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def take(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    """Handle every stop signal with `handler`; returns the handlers before. What nohup ignores stays ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [number for number in STOP_SIGNALS if not (ignored and number == signal.SIGHUP)]
    return {number: signal.signal(number, handler) for number in numbers}


def give_back(handlers: dict[signal.Signals, Any]) -> None:
    """Put back what `take` returned."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


class StopSignals:
    """The stop signals, noted in `received` instead of ending the process.

    As a context it gives them back at its end. A process that has nothing else to do takes them for good (`take`):
    a second signal, or torchrun's to a rank that is already leaving, must not kill it half-way.
    """

    def __init__(self) -> None:
        self.received = 0
        self.received_at = 0.0
        """When the first one came, on the clock of `time.monotonic`."""
        self.told = False
        """Whether the first signal is answered on standard error: a long step would else leave a person in doubt."""
        self._before: dict[signal.Signals, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.told and not self.received:
            name = signal.Signals(number).name
            os.write(2, f"# {name}: this step is finished, the run saved and left\n".encode())
        if not self.received:
            self.received_at = time.monotonic()
        self.received = number

    def take(self) -> None:
        """Note stop signals from now on."""
        self._before = take(self._note)

    def __enter__(self) -> StopSignals:
        self.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        give_back(self._before)
