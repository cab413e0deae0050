"""What a pipeline stage does in a step, one thing after the other: one forward, one backward (1F1B). Pure functions.

Stage s of P first runs min(P - 1 - s, M) of the M micro-batches forward, then one forward and one backward in turn,
then what is left backward (PipeDream-Flush, arXiv:2006.09503). Between, it takes and gives tensors.

A transfer may block until both stages have come to it: on Trainium it is a collective of two ranks, which cannot tell a
tensor from another of the same shape. So two neighbours must name their transfers in one order, and no stages may wait
for each other in a circle. An output that is ready while the gradient of an earlier micro-batch is awaited is given
*after* that gradient was taken: the next stage, too, gives its gradient before it asks for another input. (NxD's
scheduler has the same order.)

Cost: 6 turns per micro-batch at most; min(P - s, M) micro-batches are held between forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

__all__ = ["TRANSFERS", "Kind", "Turn", "forward_only", "one_forward_one_backward"]

Kind = Literal["take input", "forward", "give output", "take gradient", "backward", "give gradient"]

Turn = tuple[Kind, int]
"""What is done, and the number of the micro-batch."""

TRANSFERS: dict[Kind, tuple[Kind, int]] = {
    "give output": ("take input", 1),
    "take input": ("give output", -1),
    "give gradient": ("take gradient", -1),
    "take gradient": ("give gradient", 1),
}
"""Kind of a transfer → what the neighbour does for it, and where that is: 1 is the next stage, -1 the one before."""


def one_forward_one_backward(stage: int, n_stages: int, n_micro: int) -> Iterator[Turn]:
    """The turns of a stage in training."""
    first, last = stage == 0, stage == n_stages - 1
    ahead = min(n_stages - 1 - stage, n_micro)
    for index in range(n_micro + ahead):
        done = index - ahead  # the micro-batch that goes back, if there is one yet
        if index < n_micro:
            if not first:
                yield "take input", index
            yield "forward", index
        if done >= 0 and not last:
            yield "take gradient", done
        if index < n_micro and not last:
            yield "give output", index
        if done >= 0:
            yield "backward", done
            if not first:
                yield "give gradient", done


def forward_only(stage: int, n_stages: int, n_micro: int) -> Iterator[Turn]:
    """The turns of a stage in evaluation."""
    for index in range(n_micro):
        if stage > 0:
            yield "take input", index
        yield "forward", index
        if stage < n_stages - 1:
            yield "give output", index
