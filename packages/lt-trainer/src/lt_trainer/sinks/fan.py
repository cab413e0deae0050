"""The fan that gives every record to all of them and survives each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from lt_trainer.sinks.sink import Sink
from lt_trainer.sinks.tags import scalars


class Sinks:
    """All sinks of a run.

    Args:
        sinks: by name.
        clock: seconds since 1970.
    """

    def __init__(self, sinks: Mapping[str, Sink] | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self._sinks, self._clock = dict(sinks or {}), clock
        self._last: int | None = None

    def write(self, record: Mapping[str, Any], beside: Mapping[str, float] | None = None) -> dict[str, str]:
        """Give a record's numbers to every sink.

        Args:
            record: a training or validation record as plain values.
            beside: more numbers of the same step, by tag.

        Returns:
            What went wrong, by the name of the sink, which is then left out.
        """
        step, now = record["step"], self._clock()
        values = {**scalars(record), **(beside or {})}
        anew = "loss" in record and (self._last is None or step <= self._last)
        if "loss" in record:
            self._last = step

        def send(sink: Sink) -> None:
            if anew:
                sink.go_on_at(step)
            sink.write(step, now, values)

        return self._each(send)

    def close(self) -> dict[str, str]:
        """Close all; returns what went wrong."""
        failed = self._each(lambda sink: sink.close())
        self._sinks = {}
        return failed

    def _each(self, do: Callable[[Sink], None]) -> dict[str, str]:
        failed = {}
        for name, sink in self._sinks.items():
            try:
                do(sink)
            except Exception as exc:  # noqa: BLE001 - whatever a library raises here must not end a run of weeks
                failed[name] = f"{type(exc).__name__}: {exc}"
        self._sinks = {name: sink for name, sink in self._sinks.items() if name not in failed}
        return failed
