"""Throughput per device over the last logging steps: counts of all devices over time and devices.

A *batch* is a micro-batch, a *sample* a row of the batch, a *token* a position of a row (padding included). MFU is
flops_per_sec over the peak of one device; the caller chooses and reports the FLOP convention and the peak. HFU also
counts recomputed FLOPs; document MFU counts attention within documents only.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates per device and second; nan before the first measurement."""

    batches_per_sec: float
    samples_per_sec: float
    tokens_per_sec: float
    flops_per_sec: float
    mfu: float
    hfu: float
    mfu_documents: float


class Throughput:
    """Moving-window rates from counts of the whole run and a clock that can be paused.

    Args:
        devices: Number of devices of the run; rates are per device.
        peak_flops: Peak FLOP/s of one device, for MFU; None or 0 = unknown.
        window: Number of `update` calls in the window.
        clock: Monotonic clock in seconds.
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
        self._counts = (0.0,) * 6
        self._paused_at: float | None = None
        self._paused_s = 0.0
        self._points: deque[tuple[float, tuple[float, ...]]] = deque(maxlen=window + 1)
        self._points.append((self._now(), self._counts))

    def _now(self) -> float:
        """Return clock time without pauses, in seconds."""
        now = self._clock() if self._paused_at is None else self._paused_at
        return now - self._paused_s

    def pause(self) -> None:
        """Stop the clock for validation or a save."""
        if self._paused_at is None:
            self._paused_at = self._clock()

    def unpause(self) -> None:
        """Restart the clock."""
        if self._paused_at is not None:
            self._paused_s += self._clock() - self._paused_at
            self._paused_at = None

    def update(
        self,
        *,
        batches: float,
        samples: float,
        tokens: float,
        flops: float,
        recomputed_flops: float = 0.0,
        document_flops: float = math.nan,
    ) -> None:
        """Add the counts of all devices since the last call.

        Args:
            batches: micro-batches.
            samples: rows.
            tokens: positions.
            flops: model FLOPs without recomputation.
            recomputed_flops: recomputed FLOPs.
            document_flops: model FLOPs with attention counted within documents only; nan if unknown.
        """
        new = (batches, samples, tokens, flops, flops + recomputed_flops, document_flops)
        self._counts = tuple(old + more for old, more in zip(self._counts, new, strict=True))
        self._points.append((self._now(), self._counts))

    def rates(self) -> Rates:
        """Return the rates over the window that ends with the last `update`."""
        (start, before), (end, after) = self._points[0], self._points[-1]
        seconds = (end - start) * self._devices
        batches, samples, tokens, flops, hardware_flops, document_flops = (
            (now - then) / seconds if seconds > 0 else math.nan for then, now in zip(before, after, strict=True)
        )
        return Rates(
            batches_per_sec=batches,
            samples_per_sec=samples,
            tokens_per_sec=tokens,
            flops_per_sec=flops,
            mfu=flops / self._peak,
            hfu=hardware_flops / self._peak,
            mfu_documents=document_flops / self._peak,
        )
