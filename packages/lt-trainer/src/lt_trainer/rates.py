"""Speed per device: the whole run's counts over the last logging steps, divided by time and devices.

A *batch* is a micro-batch, a *sample* a row of the batch, a *token* a position of a row (padding included). MFU is
flops_per_sec over the peak of one device, with the FLOPs that the caller counts; which convention and which peak is the
caller's to say beside it. HFU adds the FLOPs that are done a second time.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Rates", "Throughput"]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Speed per device and second; nan before any time was measured."""

    batches_per_sec: float
    samples_per_sec: float
    tokens_per_sec: float
    flops_per_sec: float
    mfu: float
    hfu: float


class Throughput:
    """Rates over the last updates, from the counts of the whole run and a clock that can be paused.

    Args:
        devices: Devices of the run; rates are per device.
        peak_flops: FLOP/s that one device can do, for MFU; None or 0 = unknown.
        window: How many calls of `update` a rate looks back.
        clock: Seconds, only differences count.
    """

    def __init__(
        self,
        *,
        devices: int,
        peak_flops: float | None = None,
        window: int = 10,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert devices >= 1, devices
        assert window >= 1, window
        self._devices, self._peak, self._clock = devices, peak_flops or math.nan, clock
        self._counts = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._paused_at: float | None = None
        self._paused_s = 0.0
        self._points: deque[tuple[float, tuple[float, ...]]] = deque(maxlen=window + 1)
        self._points.append((self._now(), self._counts))

    def _now(self) -> float:
        """Seconds on the clock, without the pauses."""
        now = self._clock() if self._paused_at is None else self._paused_at
        return now - self._paused_s

    def pause(self) -> None:
        """What follows is not training (validation, a save) and does not count."""
        if self._paused_at is None:
            self._paused_at = self._clock()

    def proceed(self) -> None:
        """Training goes on."""
        if self._paused_at is not None:
            self._paused_s += self._clock() - self._paused_at
            self._paused_at = None

    def update(self, *, batches: float, samples: float, tokens: float, flops: float, again: float = 0.0) -> None:
        """Count what the whole run has done since the last call, all devices together.

        Args:
            batches: micro-batches.
            samples: rows.
            tokens: positions.
            flops: model FLOPs, each counted once.
            again: FLOPs of these that were done a second time.
        """
        new = (batches, samples, tokens, flops, flops + again)
        self._counts = tuple(old + more for old, more in zip(self._counts, new, strict=True))
        self._points.append((self._now(), self._counts))

    def rates(self) -> Rates:
        """The rates over the window that ends with the last `update`."""
        (start, before), (end, after) = self._points[0], self._points[-1]
        seconds = (end - start) * self._devices
        batches, samples, tokens, flops, hardware_flops = (
            (now - then) / seconds if seconds > 0 else math.nan for then, now in zip(before, after, strict=True)
        )
        return Rates(
            batches_per_sec=batches,
            samples_per_sec=samples,
            tokens_per_sec=tokens,
            flops_per_sec=flops,
            mfu=flops / self._peak,
            hfu=hardware_flops / self._peak,
        )
