"""Pipeline schedules: the order of a rank's forward and backward passes. Torch-free.

The model's layers are cut into consecutive stages (`lt_model.stage_layers`); stage s is on pipeline rank s % pp. With
one stage per rank the schedule is 1F1B (PipeDream-Flush, arXiv:2006.09503): rank p runs pp - p - 1 forward passes
ahead, then alternates one forward and one backward pass, so it holds the activations of at most pp - p micro-batches.
With v stages per rank it is interleaved 1F1B (Megatron-LM, arXiv:2104.04473): the idle share of a step, (pp - 1) / n of
its work with n micro-batches, shrinks to (pp - 1) / (v n) for v times the messages; micro-batches run in groups of pp,
so n must be a multiple of pp.

Each rank runs its own list of passes in order and knows the peer of each message. Between two ranks, messages of one
direction are sent and received in the same order, so one communicator per directed edge needs no tags and cannot
deadlock, even if a send waits for its receiver (tests/test_pipeline_schedule.py simulates that). Zero-bubble schedules
are not offered: they split the backward pass in two, which compiled blocks do not support.

Cost: 2 n v passes per rank and step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StagePass:
    """Forward or backward pass of one micro-batch through one of a rank's stages.

    Attributes:
        is_forward: forward, else backward.
        chunk: index among the rank's stages.
        micro_batch: index in the step.
    """

    is_forward: bool
    chunk: int
    micro_batch: int


def training_passes(*, pp: int, pp_rank: int, stages_per_rank: int, n_micro_batches: int) -> list[StagePass]:
    """Return the passes of one rank and step, in order.

    Args:
        pp: number of pipeline ranks.
        pp_rank: this rank.
        stages_per_rank: stages of each rank.
        n_micro_batches: micro-batches of the step; a multiple of `pp` if a rank has several stages.
    """
    total = n_micro_batches * stages_per_rank
    if stages_per_rank == 1:
        n_ahead = min(pp - pp_rank - 1, total)
    else:
        assert n_micro_batches % pp == 0
        n_ahead = min((pp - pp_rank - 1) * 2 + (stages_per_rank - 1) * pp, total)
    forward = list(forward_passes(pp=pp, stages_per_rank=stages_per_rank, n_micro_batches=n_micro_batches))
    backward = [
        StagePass(is_forward=False, chunk=stages_per_rank - 1 - one.chunk, micro_batch=one.micro_batch)
        for one in forward
    ]
    alternating = [one for pair in zip(forward[n_ahead:], backward, strict=False) for one in pair]
    return [*forward[:n_ahead], *alternating, *backward[total - n_ahead :]]


def forward_passes(*, pp: int, stages_per_rank: int, n_micro_batches: int) -> Iterator[StagePass]:
    """Yield the forward passes of a step: groups of `pp` micro-batches through one stage after the other."""
    for first in range(0, n_micro_batches, pp):
        for chunk in range(stages_per_rank):
            for micro_batch in range(first, min(first + pp, n_micro_batches)):
                yield StagePass(is_forward=True, chunk=chunk, micro_batch=micro_batch)
