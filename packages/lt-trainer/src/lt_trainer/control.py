"""Small exchanges between ranks outside the step; engines and the torch-free parts of a run share the interface."""

from typing import Any


class Control:
    """Control collectives: small exchanges between ranks outside the step; these are those of one rank.

    `torch.GlooControl` has those over a network. Cost: a few hundred bytes between hosts per call.
    """

    def all_reduce_max(self, value: int) -> int:
        """Return the maximum of all ranks' values."""
        return value

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value (JSON-serializable) on every rank."""
        return value

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values (JSON-serializable) of all ranks, by rank."""
        return [value]
