"""Step timing on CUDA with stream events; no host synchronization within a step.

An event records when the device reached it, so a part's time is device time: while the host waits for its batches and
the device is still busy with the previous step, "data" counts nothing; while the device is idle for lack of batches,
"data" counts that idle time. Communication on other streams counts where this stream waits for it.

Cost: some microseconds of host time per lap; events are reused once read.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from lt_trainer.engine import STEP_PARTS, Stopwatch


class CudaStopwatch(Stopwatch):
    """Stopwatch on the current stream of the current device; it starts in "rest"."""

    def __init__(self) -> None:
        self._events: list[tuple[str, torch.cuda.Event]] = []
        self._free_events: list[torch.cuda.Event] = []
        self.begin("rest")

    def begin(self, part: str) -> None:
        """Attribute the work queued from now on to `part`, one of `STEP_PARTS`."""
        event = self._free_events.pop() if self._free_events else torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append((part, event))

    def pop_times(self) -> dict[str, float]:
        """Return seconds by part since the last call, up to the newest lap; the device must have reached it."""
        seconds = dict.fromkeys(STEP_PARTS, 0.0)
        for (part, begin), (_, end) in pairwise(self._events):
            seconds[part] += begin.elapsed_time(end) / 1000
        self._free_events += [event for _, event in self._events[:-1]]
        self._events = self._events[-1:]
        return seconds


def create_stopwatch(device: torch.device) -> Stopwatch:
    """Return the stopwatch for `device`; a GPU must be the current device."""
    return CudaStopwatch() if device.type == "cuda" else Stopwatch()
