"""Garbage collection of Python at fixed steps, the same on all ranks.

Python collects by itself in the middle of a step, on each rank in another step, and all ranks wait for the one that
does: with thousands of ranks nearly every step has one. Here the automatic collection is off while the loop runs; all
ranks collect young objects after every `interval` steps, and everything while they pause for a checkpoint or a
validation (as torchtitan does).

Cost: a few milliseconds of host time per interval, which a device that runs ahead of the host does not see.
"""

from __future__ import annotations

import gc

YOUNG_GENERATION = 1


class GarbageCollection:
    """Context in which garbage is collected at fixed steps; outside it, Python's setting is as before.

    Args:
        interval: steps between collections of young objects; 0 leaves all to Python.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._was_enabled = gc.isenabled()

    def __enter__(self) -> GarbageCollection:
        self._was_enabled = gc.isenabled()
        if self._interval:
            gc.collect()
            gc.disable()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._interval and self._was_enabled:
            gc.enable()

    def on_step_end(self, step: int) -> None:
        """Collect young objects if `step` is due."""
        if self._interval and step % self._interval == 0:
            gc.collect(YOUNG_GENERATION)

    def on_pause(self) -> None:
        """Collect everything, while training pauses anyway."""
        if self._interval:
            gc.collect()
