"""The stopwatch of a CUDA device: laps are events in the stream, and reading them never makes the host wait in a step.

An event says when the device got there. So a part's time is the device's: where the host waits for its batches while
the device is still busy with the step before, "data" gets nothing, and where the device stands idle for them, it gets
just that. Communication on other streams counts where the stream waits for it.

Cost: some microseconds of the host per lap; events are used again once they have been read.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from lt_trainer.engine import Stopwatch
from lt_trainer.timing import PARTS, HostStopwatch


class CudaStopwatch:
    """A stopwatch in the current stream of the current device; it starts in "rest"."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        self._free: list[torch.cuda.Event] = []
        self.lap("rest")

    def lap(self, part: str) -> None:
        """What is queued from here on belongs to `part`, one of `PARTS`."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((part, event))

    def times(self) -> dict[str, float]:
        """Seconds by part since this was last asked, up to the newest lap; the device must have got there."""
        seconds = dict.fromkeys(PARTS, 0.0)
        for (part, begin), (_, end) in pairwise(self._marks):
            seconds[part] += begin.elapsed_time(end) / 1000
        self._free += [event for _, event in self._marks[:-1]]
        self._marks = self._marks[-1:]
        return seconds


def stopwatch(device: torch.device) -> Stopwatch:
    """The stopwatch for an engine on `device`, which is the current one if it is a GPU."""
    return CudaStopwatch() if device.type == "cuda" else HostStopwatch()
