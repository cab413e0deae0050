"""What the ranks of a run say to each other outside the step, without torch (over a network: `torch.GlooControl`).

Cost: a few hundred bytes between hosts for each call; nothing in a world of one process.
"""

from typing import Any, Protocol


class Control(Protocol):
    """The little that ranks say to each other outside the step, over a CPU group."""

    def all_max(self, value: int) -> int:
        """The largest `value` of all ranks."""
        ...

    def broadcast(self, value: Any) -> Any:
        """Rank 0's `value` (anything JSON can hold) on every rank."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (anything JSON can hold) on every rank, by rank."""
        ...


class SoloControl:
    """Control of a world of one process."""

    def all_max(self, value: int) -> int:
        """The value itself."""
        return value

    def broadcast(self, value: Any) -> Any:
        """The value itself."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """The value itself, alone."""
        return [value]
