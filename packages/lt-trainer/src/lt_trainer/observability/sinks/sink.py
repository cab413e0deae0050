"""Sink interface, run information for sinks, and configuration error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lt_trainer.errors import TrainerError


class Sink(Protocol):
    """Destination for scalars by step. Methods may raise anything; the sink is then disabled."""

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Write the numbers of one record.

        Args:
            step: completed steps.
            time_s: Unix time in seconds.
            values: numbers by tag; may be nan or infinite.
        """
        ...

    def resume_at(self, step: int) -> None:
        """Restart at `step`: existing records of `step` and later are superseded."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Run information for opening a sink."""

    run: Path
    """Run directory."""
    recipe: Mapping[str, Any]
    """Recipe as nested tables."""
    toml: str
    """Recipe as TOML with origins."""
    step: int
    """Highest step reported before this start; 0 if none."""


class SinkConfigError(TrainerError):
    """Sink misconfigured by the environment; the user can fix it."""
