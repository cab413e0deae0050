"""Energy of one GPU from its energy counter, or else integrated from its power."""

from __future__ import annotations


class EnergyMeter:
    """Energy used by a GPU since the first reading.

    The counter is exact up to the driver's update interval (some milliseconds). Without a counter, or if it was reset
    (driver reload), the mean of two power readings times the interval is used.
    """

    def __init__(self) -> None:
        self.joules: float | None = None
        """None before the first reading."""
        self._previous: tuple[float, float | None, float | None] | None = None

    def update(self, now_s: float, energy_counter_j: float | None, power_w: float | None) -> float | None:
        """Add a reading.

        Args:
            now_s: monotonic time.
            energy_counter_j: the GPU's energy counter, or None.
            power_w: its power, or None.

        Returns:
            Joules since the first reading; None if unknown.
        """
        if energy_counter_j is None and power_w is None:
            return self.joules
        if self._previous is None:
            self.joules = 0.0
        else:
            last_s, last_counter_j, last_power_w = self._previous
            assert self.joules is not None
            if energy_counter_j is not None and last_counter_j is not None and energy_counter_j >= last_counter_j:
                self.joules += energy_counter_j - last_counter_j
            else:
                powers = [power for power in (last_power_w, power_w) if power is not None]
                self.joules += (now_s - last_s) * sum(powers) / max(len(powers), 1)
        self._previous = (now_s, energy_counter_j, power_w)
        return self.joules
