"""What a sink is, what it is told about the run, and the error of one that a person has to mend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lt_trainer.errors import TrainerError


class Sink(Protocol):
    """A place for numbers by step. Its methods may raise anything; then it is not called any more."""

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Take the numbers of one record, by tag.

        Args:
            step: updates done.
            time_s: seconds since 1970.
            values: numbers by tag; any of them may be nan or infinite.
        """
        ...

    def go_on_at(self, step: int) -> None:
        """What comes next is of `step` and later ones; what is there of them belongs to a way that was left."""
        ...

    def close(self) -> None:
        """Send or write what is left."""
        ...


@dataclass(frozen=True, kw_only=True)
class About:
    """What a sink is told about the run."""

    run: Path
    """The run directory."""
    recipe: Mapping[str, Any]
    """All values, as nested tables."""
    toml: str
    """The same as TOML with origins."""
    step: int
    """The highest step that the run has reported before this start; 0 for none."""


class SinkRefused(TrainerError):
    """A sink that cannot work as the environment is, which a person can mend."""
