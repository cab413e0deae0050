"""Control collectives: small exchanges between ranks outside the step, without torch.

`torch.GlooControl` implements them over a network. Cost: a few hundred bytes between hosts per call; none with one
rank.
"""

from typing import Any, Protocol


class Control(Protocol):
    """Control collectives over a CPU process group."""

    def all_reduce_max(self, value: int) -> int:
        """Return the maximum of all ranks' values."""
        ...

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value (JSON-serializable) on every rank."""
        ...

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values (JSON-serializable) of all ranks, by rank."""
        ...


class SoloControl:
    """Control collectives with one rank."""

    def all_reduce_max(self, value: int) -> int:
        """Return the value."""
        return value

    def broadcast(self, value: Any) -> Any:
        """Return the value."""
        return value

    def all_gather(self, value: Any) -> list[Any]:
        """Return the value in a list."""
        return [value]
