"""Joules of one GPU, from its energy counter, or else from its power over time."""

from __future__ import annotations


class EnergyMeter:
    """Adds up what a GPU has used since the first reading.

    The counter is exact to the driver's own step (some milliseconds). Where there is none, the mean of two power
    readings stands for the time between them. A counter that has gone back (the driver was loaded anew) is bridged
    the same way.
    """

    def __init__(self) -> None:
        self.joules: float | None = None
        """None until there is something to measure with."""
        self._before: tuple[float, float | None, float | None] | None = None

    def read(self, now_s: float, counter_j: float | None, power_w: float | None) -> float | None:
        """Take a reading.

        Args:
            now_s: a clock that only goes forward.
            counter_j: the GPU's energy counter, or None.
            power_w: its power, or None.

        Returns:
            Joules since the first reading; None while nothing can be said.
        """
        if counter_j is None and power_w is None:
            return self.joules
        if self._before is None:
            self.joules = 0.0
        else:
            then_s, counter_before, power_before = self._before
            assert self.joules is not None
            if counter_j is not None and counter_before is not None and counter_j >= counter_before:
                self.joules += counter_j - counter_before
            else:
                powers = [power for power in (power_before, power_w) if power is not None]
                self.joules += (now_s - then_s) * sum(powers) / max(len(powers), 1)
        self._before = (now_s, counter_j, power_w)
        return self.joules
