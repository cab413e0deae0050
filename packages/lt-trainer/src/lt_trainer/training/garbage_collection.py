"""Garbage collection of Python at fixed steps, the same on all ranks.

Python collects by itself in the middle of a step, on each rank in another step, and all ranks wait for the one that
does: with thousands of ranks nearly every step has one. Here the automatic collection is off while the loop runs; all
ranks collect young objects after every `interval` steps, and everything while they pause for a checkpoint or a
validation (as torchtitan does).

What is there when the loop begins (modules, the model's parts, the store) lives as long as the loop: it is frozen, so
that a pause looks at what came since, not at the 365,000 objects that importing torch and transformers leaves.

Cost: a few milliseconds of host time per interval and per pause, which a device that runs ahead of the host does not
see; with torch imported, a collection of everything would take 0.24 s a pause.
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
        self._froze = False

    def __enter__(self) -> GarbageCollection:
        self._was_enabled = gc.isenabled()
        if self._interval:
            gc.collect()
            gc.disable()
            # A caller who has frozen most of it keeps it so: the end would thaw his objects too. (Not none: Python
            # 3.12 counts immortal objects as frozen.)
            self._froze = gc.get_freeze_count() < len(gc.get_objects())
            if self._froze:
                gc.freeze()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._froze:
            gc.unfreeze()
        if self._interval and self._was_enabled:
            gc.enable()

    def on_step_end(self, step: int) -> None:
        """Collect young objects if `step` is due."""
        if self._interval and step % self._interval == 0:
            gc.collect(YOUNG_GENERATION)

    def on_pause(self) -> None:
        """Collect everything that came since the loop began, while training pauses anyway."""
        if self._interval:
            gc.collect()
