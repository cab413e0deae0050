"""Stopwatch for the parts of a training step.

`begin(part)` attributes the time from then on to a part. `HostStopwatch` is for engines that compute on the host;
engines on a device have their own, whose laps are events in the device's queue (`lt_trainer.engine.Stopwatch`).
Cost: one clock reading and one addition per lap.
"""

from __future__ import annotations

import time
from collections.abc import Callable

STEP_PARTS: tuple[str, ...] = ("data", "forward_backward", "optimizer", "checkpoint", "validation", "rest")
"""Waiting for batches; forward and backward passes; gradient clipping and optimizer step; checkpoint
save or restore; validation and evaluation; everything else, such as stop synchronization, fetching metrics and logging.
"""


class HostStopwatch:
    """Stopwatch on the host's clock; starts in "rest"."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._part, self._since = "rest", clock()
        self._seconds = dict.fromkeys(STEP_PARTS, 0.0)

    def begin(self, part: str) -> None:
        """Attribute the time from now on to `part`, one of `STEP_PARTS`."""
        now = self._clock()
        self._seconds[self._part] += now - self._since
        self._part, self._since = part, now

    def pop_times(self) -> dict[str, float]:
        """Return and reset the seconds by part since the last call; they sum to the elapsed time."""
        self.begin(self._part)
        times, self._seconds = self._seconds, dict.fromkeys(STEP_PARTS, 0.0)
        return times
