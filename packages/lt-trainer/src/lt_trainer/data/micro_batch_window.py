"""Micro-batches of a step by index, for the schedules of pipelines, which need several at a time and never all.

Cost: those between the first that is not released and the last that was asked for.
"""

from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class MicroBatchWindow(Generic[T]):
    """Micro-batches in order, each made when it or a later one is first asked for and held until it is released.

    Args:
        micro_batches: the micro-batches of the step.
    """

    def __init__(self, micro_batches: Iterable[T]) -> None:
        self._source = iter(micro_batches)
        self._held: dict[int, T] = {}
        self._n_made = 0

    def __getitem__(self, index: int) -> T:
        while self._n_made <= index:
            self._held[self._n_made] = next(self._source)
            self._n_made += 1
        return self._held[index]

    def release(self, index: int) -> None:
        """Let go of a micro-batch that no later pass needs."""
        del self._held[index]
