"""One-forward-one-backward (1F1B) pipeline schedule of a stage, as a sequence of actions.

Pure functions. Stage s of P first runs min(P - 1 - s, M) of the M micro-batches forward, then alternates one forward
and one backward, then runs the remaining backward passes (PipeDream-Flush, arXiv:2006.09503), with sends and receives
in between.

A transfer may block until both stages have reached it: on Trainium it is a collective of two ranks, which cannot
distinguish tensors of equal shape. So adjacent stages must issue their transfers in the same order, without circular
waits. An output that is ready while the gradient of an earlier micro-batch is pending is sent *after* that gradient has
been received: the next stage, too, sends its gradient before it receives another input. (NxD's scheduler uses the same
order.)

Cost: at most 6 actions per micro-batch; min(P - s, M) micro-batches are held between forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

ActionKind = Literal["recv_forward", "forward", "send_forward", "recv_backward", "backward", "send_backward"]

PipelineAction = tuple[ActionKind, int]
"""Kind of action and index of the micro-batch."""

PEER_ACTIONS: dict[ActionKind, tuple[ActionKind, int]] = {
    "send_forward": ("recv_forward", 1),
    "recv_forward": ("send_forward", -1),
    "send_backward": ("recv_backward", -1),
    "recv_backward": ("send_backward", 1),
}
"""Kind of a transfer → matching action of the peer, and the peer's offset: 1 next stage, -1 previous stage."""


def one_forward_one_backward(stage: int, n_stages: int, n_micro_batches: int) -> Iterator[PipelineAction]:
    """Yield the actions of a stage in training."""
    first, last = stage == 0, stage == n_stages - 1
    ahead = min(n_stages - 1 - stage, n_micro_batches)
    for index in range(n_micro_batches + ahead):
        done = index - ahead  # the micro-batch whose backward pass is due, if any
        if index < n_micro_batches:
            if not first:
                yield "recv_forward", index
            yield "forward", index
        if done >= 0 and not last:
            yield "recv_backward", done
        if index < n_micro_batches and not last:
            yield "send_forward", index
        if done >= 0:
            yield "backward", done
            if not first:
                yield "send_backward", done


def forward_only(stage: int, n_stages: int, n_micro_batches: int) -> Iterator[PipelineAction]:
    """Yield the actions of a stage in validation."""
    for index in range(n_micro_batches):
        if stage > 0:
            yield "recv_forward", index
        yield "forward", index
        if stage < n_stages - 1:
            yield "send_forward", index
