"""Search for the fastest setting: line searches over micro-batches, one per recomputation mode.

The time of a step over the micro-batch size falls while launches and messages are shared by more rows, and rises
again, if at all, where memory runs out; kernels add bumps of a few per cent. So on each line (a mode of recomputation,
compiled or not) the search walks from the best micro-batch known so far to larger ones and to smaller ones, and stops
in a direction after `PATIENCE` settings in a row that are slower than the best of the line.

1. The line of the start.
2. The other lines, each from the micro-batch of the best setting so far. Where that does not fit it goes down until one
   does.
3. Of a line whose first two settings that fit are both more than `HOPELESS` slower than the best of all, no more is
   measured, unless a smaller memory allows it micro-batches that did not fit on the best line.
4. The sizes of the loss's chunks, each once, with the best setting so far: they change the time of the head alone.

What did not fit is known of every setting that needs no less memory, and is not tried. Everything else is measured
once. Cost: 60 % of a grid in the mean of the generated ones of `tests/test_tuning.py`, in all of which what is found is
within 3 % of the fastest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from lt_trainer.tuning.settings import SettingGrid, TunedSetting

PATIENCE = 2
HOPELESS = 1.15


def find_fastest(
    grid: SettingGrid, measure: Callable[[TunedSetting], float | None], *, max_probes: int = 0
) -> TunedSetting | None:
    """Return the fastest setting that was measured; None if none worked.

    Args:
        grid: candidates.
        measure: returns the seconds of a step, or None if the setting does not work here.
        max_probes: limit of measurements; 0 for none.
    """
    search = _Search(grid=grid, measure=measure, max_probes=max_probes)
    search.walk(grid.start)
    for line in grid.lines():
        best = search.best
        search.walk(line if best is None else replace(line, micro_batch_size=best.micro_batch_size))
    if search.best is not None:
        for setting in grid.loss_chunks(search.best):
            search.time(setting)
    return search.best


@dataclass(kw_only=True)
class _Search:
    grid: SettingGrid
    measure: Callable[[TunedSetting], float | None]
    max_probes: int
    seconds: dict[TunedSetting, float | None] = field(default_factory=dict)

    @property
    def best(self) -> TunedSetting | None:
        """The fastest setting so far."""
        worked = {setting: value for setting, value in self.seconds.items() if value is not None}
        return min(worked, key=lambda setting: worked[setting], default=None)

    def walk(self, start: TunedSetting) -> None:
        """Search the line of `start`, to larger micro-batches and then to smaller ones."""
        previous = self.best
        line: dict[TunedSetting, float] = {}
        for step in (1, -1):
            at: TunedSetting | None = start if step == 1 else self.grid.neighbor(start, step)
            n_slower = 0
            while at is not None and n_slower < PATIENCE:
                value = self.time(at)
                if value is None:
                    if step == 1:  # larger ones need more; smaller ones follow
                        break
                else:
                    n_slower = n_slower + 1 if line and value >= min(line.values()) else 0
                    line[at] = value
                    if self._is_hopeless(line, previous):
                        return
                at = self.grid.neighbor(at, step)

    def _is_hopeless(self, line: dict[TunedSetting, float], best: TunedSetting | None) -> bool:
        """Return True if two settings of a line say enough; not if the best line had no room for larger ones."""
        if best is None or len(line) < 2:
            return False
        limit = self.seconds[best]
        larger = self.grid.neighbor(best, 1)
        was_full = larger is not None and self.seconds.get(larger, 0.0) is None
        return limit is not None and not was_full and min(line.values()) > HOPELESS * limit

    def time(self, setting: TunedSetting) -> float | None:
        """Return the seconds of a setting, measured at most once; None if it does not work or is not tried."""
        if setting not in self.seconds:
            failed = [other for other, value in self.seconds.items() if value is None]
            if any(setting.needs_no_less_than(other) for other in failed):
                return None
            if self.max_probes and len(self.seconds) >= self.max_probes:
                return None
            self.seconds[setting] = self.measure(setting)
        return self.seconds[setting]
