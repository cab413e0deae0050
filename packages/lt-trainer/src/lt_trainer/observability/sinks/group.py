"""Fan-out of records to all sinks, isolating their failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from lt_trainer.observability.sinks.sink import Sink
from lt_trainer.observability.sinks.tags import scalars


class SinkGroup:
    """Open sinks of a run.

    Args:
        sinks: sinks by name.
        clock: Unix time in seconds.
    """

    def __init__(self, sinks: Mapping[str, Sink] | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self._sinks, self._clock = dict(sinks or {}), clock
        self._last: int | None = None

    def write(self, record: Mapping[str, Any], extra: Mapping[str, float] | None = None) -> dict[str, str]:
        """Write the numbers of a record to every sink.

        Args:
            record: training or validation record as plain values.
            extra: further numbers of the same step, by tag.

        Returns:
            Errors by sink name; these sinks are removed.
        """
        step, now = record["step"], self._clock()
        values = {**scalars(record), **(extra or {})}
        is_restart = "loss" in record and (self._last is None or step <= self._last)
        if "loss" in record:
            self._last = step

        def send(sink: Sink) -> None:
            if is_restart:
                sink.resume_at(step)
            sink.write(step, now, values)

        return self._for_each(send)

    def close(self) -> dict[str, str]:
        """Close all sinks; return errors by sink name."""
        errors = self._for_each(lambda sink: sink.close())
        self._sinks = {}
        return errors

    def _for_each(self, action: Callable[[Sink], None]) -> dict[str, str]:
        errors = {}
        for name, sink in self._sinks.items():
            try:
                action(sink)
            except Exception as exc:  # noqa: BLE001 - no error of a library may stop the run
                errors[name] = f"{type(exc).__name__}: {exc}"
        self._sinks = {name: sink for name, sink in self._sinks.items() if name not in errors}
        return errors
