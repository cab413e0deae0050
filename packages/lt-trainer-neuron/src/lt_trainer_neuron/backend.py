"""What the engine needs of whatever computes: one protocol, met by `cpu` (gloo, any torch) and by `nxd` (Trainium).

The engine keeps the order of a step and knows which part of which model tensor lies where; a backend keeps groups,
collectives, parallel layers, the optimizer's tensors and the step mark. Per step the engine calls, on every rank,

    loss = accumulate(batch)          forward and backward of all micro-batches
    loss, norm = update(loss, lr)     sum over data-parallel ranks, norm, clipping, AdamW with ZeRO-1
    mark()                            on a lazy device: here the step's one graph ends

and none of them waits for the device; `read` does. A backend is opened with its layers made and its tensors unfilled.
The engine then fills `slots` (initial weights, a checkpoint, a model) and calls `slots_changed`.

Tensors go by NxD's keys. Which model tensors a key is made of, and in which order of heads, is `lt_ckpt.nxd.layout`,
for all backends alike. Numbers that change from step to step (lr, valid tokens, the step count) enter a lazy device's
graph as tensors: as plain numbers each new value is a new graph.

Cost: nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from lt_trainer.control import Control
    from lt_trainer.engine import Device, StepBatch, Stopwatch
    from lt_trainer_neuron.grid import Grid

__all__ = ["MASTERS", "MOMENTS", "Backend", "Rows"]

MASTERS = "weights"
"""Group of the weights that the optimizer updates: fp32 masters where there are any, else what the layers hold."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Groups of AdamW's moments."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Rows of a tensor that this rank's layers hold.

    Attributes:
        local: the rows, without ZeRO-1's padding; may view a larger tensor. Of no rows where padding is all there is.
        first: number of the first of them.
    """

    local: Tensor
    first: int = 0


class Backend(Protocol):
    """See the module's text."""

    grid: Grid
    """This rank's place, by the groups that the backend has made."""
    control: Control
    device: Device
    stopwatch: Stopwatch
    recomputed_flops_per_token: float

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """NxD's key → the whole of it that this rank's layers hold, in the dtype they compute in.

        The keys are those of this rank's file in `lt_ckpt.nxd.layout.nxd_layout`, in that order. A tied head is there
        under its own key: on one stage the very tensor of the embedding, else a copy on the last stage.
        """
        ...

    @property
    def slots(self) -> Mapping[str, Mapping[str, Rows]]:
        """`MASTERS` and each of `MOMENTS` → NxD's key → the rows that this rank's optimizer updates.

        With ZeRO-1 those are the rows of `lt_ckpt.nxd.zero.shard_rows`, without it all. A head that is the embedding's
        very tensor has none of its own.
        """
        ...

    @property
    def steps(self) -> int:
        """Updates that had an effect; waits for the device."""
        ...

    @steps.setter
    def steps(self, value: int) -> None: ...

    def slots_changed(self) -> None:
        """The engine has filled the masters: give the layers their weights, gathered and cast."""
        ...

    def accumulate(self, batch: StepBatch) -> Tensor:
        """Forward and backward of every micro-batch; adds up gradients of (sum of the loss) / batch.valid_tokens.

        Returns:
            This rank's rows' cross-entropy in nats, summed, divided by batch.valid_tokens: a scalar on the device.
            Equal on all tensor-parallel ranks; 0 on every stage but the last.
        """
        ...

    def update(self, loss: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        """Sum gradients over ranks, clip, update the weights, forget the gradients.

        Where the loss or the norm is not finite the weights, moments and step count stay, decided on the device.

        Args:
            loss: what `accumulate` returned.
            lr: learning rate.

        Returns:
            The loss of the global batch and the norm of its gradient before clipping, scalars, equal on every rank.
        """
        ...

    def evaluate(self, batch: StepBatch) -> Tensor:
        """The summed loss in nats, without gradients or z-loss; which rank has what is as with `accumulate`."""
        ...

    def summed(self, values: Tensor) -> Tensor:
        """A small tensor summed over data-parallel ranks and stages, once per set of tensor-parallel ranks."""
        ...

    def mark(self) -> None:
        """The graph of a lazy device ends here; nothing elsewhere."""
        ...

    def read(self, values: Sequence[Tensor]) -> list[float]:
        """Scalars as numbers; the only method, besides `steps`, that waits for the device."""
        ...

    def memory_bytes(self) -> int:
        """Peak memory of this rank's device (on a CPU: of the process) since it was last asked, in bytes."""
        ...

    def close(self) -> None:
        """Release devices and process groups."""
        ...
