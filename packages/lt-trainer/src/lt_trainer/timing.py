"""Where the time of a run goes: a stopwatch with laps, each of which belongs to a part of the work.

`lap(part)` says that from here on time belongs to `part`. An engine on a device has a stopwatch of its own, whose laps
are marks in the device's queue (see `lt_trainer.engine.Stopwatch`); this one is for engines that compute on the host,
where a mark is a look at the clock. Cost: one clock reading and one addition per lap.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PARTS: tuple[str, ...] = ("data", "forward_backward", "optimizer", "checkpoint", "validation", "rest")
"""waiting for batches; forward and backward passes; clipping and the update; saving or restoring; validating; all else:
agreeing with other ranks about a stop, reading numbers, reporting."""


class HostStopwatch:
    """A stopwatch on the host's clock; it starts in "rest"."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._part, self._since = "rest", clock()
        self._seconds = dict.fromkeys(PARTS, 0.0)

    def lap(self, part: str) -> None:
        """Time from here on belongs to `part`, one of `PARTS`."""
        now = self._clock()
        self._seconds[self._part] += now - self._since
        self._part, self._since = part, now

    def times(self) -> dict[str, float]:
        """Seconds by part since this was last asked, or since the beginning; they add up to the time between."""
        self.lap(self._part)
        found, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return found
