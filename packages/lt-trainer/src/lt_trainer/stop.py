"""Signals become one number that the loop looks at between steps; nothing else happens inside a handler.

SIGTERM (schedulers, torchrun), SIGINT (Ctrl-C), SIGUSR1 and SIGUSR2 (Slurm's warning before the end of a time limit)
all mean the same: finish this step, save, exit 75 so that whoever started the run starts it again. The largest number
over all ranks decides, so that a signal to one rank stops every rank at the same step.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class StopSignals:
    """A context in which the stop signals are noted in `received` instead of ending the process."""

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[signal.Signals, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number

    def __enter__(self) -> StopSignals:
        for number in STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
