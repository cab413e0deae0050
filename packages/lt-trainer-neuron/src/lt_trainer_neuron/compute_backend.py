"""Compute backend protocol of the engine, implemented by `cpu` (gloo, any torch) and `nxd` (Trainium).

The engine defines the order of a step and maps model tensors to their positions in rank tensors; a backend owns process
groups, collectives, parallel layers, optimizer tensors and the step mark. Per step the engine calls, on every rank,

    loss = forward_backward(batch)            forward and backward of all micro-batches
    loss, norm = optimizer_step(loss, lr)     sum over data-parallel ranks, norm, clipping, optimizer step with ZeRO-1
    mark_step()                               on a lazy device: ends the graph of the step

none of which waits for the device; `fetch_scalars` does. A new backend has its layers built and its tensors unfilled;
the engine then fills `optimizer_state` (initial weights, checkpoint or pretrained model) and calls `sync_model_params`.

Tensors are identified by NxD's keys. `lt_ckpt.nxd.layout` defines, for all backends, the model tensors in each key and
their order of heads. Numbers that change from step to step (lr, valid tokens, the step count) enter a lazy device's
graph as tensors: as Python numbers, each new value would be a new graph.

Cost: nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    import numpy as np

    from lt_trainer.control import Control
    from lt_trainer.engine import Device, StepBatch, Stopwatch
    from lt_trainer_neuron.grid import Grid

__all__ = ["MASTER_WEIGHTS", "ComputeBackend", "RowSlice"]

MASTER_WEIGHTS = "weights"
"""State group of the weights that the optimizer updates: fp32 master weights if any, else the layers' weights."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSlice:
    """Rows of one of this rank's layer tensors, in memory of the device.

    Only whole tensors move between host and device, and not their views: on a lazy device a slice is a graph, and after
    a backward pass so is what `detach` returns; each would be compiled.

    Attributes:
        stored: the rows, followed by ZeRO-1's padding.
        n_rows: number of rows without padding; 0 if this rank holds only padding.
        start_row: index of the first row in the layer's tensor.
    """

    stored: Tensor
    n_rows: int
    start_row: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rows, without padding."""
        return (self.n_rows, *self.stored.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the rows."""
        return self.stored.dtype

    @property
    def n_bytes(self) -> int:
        """Bytes of the rows, without padding."""
        return prod(self.shape) * self.stored.element_size()

    @property
    def is_on_host(self) -> bool:
        """True if host memory holds the rows, so that they can be used in place."""
        return self.stored.device.type == "cpu"

    def to_host(self) -> Tensor:
        """Return the rows: a copy from a device, else a view."""
        return self.stored.cpu().detach()[: self.n_rows]

    def empty_on_host(self) -> Tensor:
        """Return memory for new rows, for `store`: on the host the rows themselves."""
        return self.to_host() if self.is_on_host else torch.zeros(self.shape, dtype=self.dtype)

    def store(self, rows: Tensor) -> None:
        """Copy rows from `empty_on_host` to the device."""
        if not self.is_on_host:
            padding = [0, 0] * (rows.ndim - 1) + [0, self.stored.shape[0] - self.n_rows]
            with torch.no_grad():
                self.stored.copy_(functional.pad(rows, padding))


class ComputeBackend(Protocol):
    """Protocol of a compute backend; see the module docstring."""

    grid: Grid
    """This rank's coordinates in the process groups that the backend has created."""
    control: Control
    device: Device
    stopwatch: Stopwatch
    recomputed_flops_per_token: float

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """NxD's key → this rank's full layer tensor, in the compute dtype.

        The keys are those of this rank's file in `lt_ckpt.nxd.layout.nxd_layout`, in that order. A tied head has its
        own key: with one stage it is the same tensor as the embedding, else a replica on the last stage.
        """
        ...

    @property
    def optimizer_state(self) -> Mapping[str, Mapping[str, RowSlice]]:
        """Optimizer state group → NxD's key → the rows that this rank's optimizer updates.

        Groups are `MASTER_WEIGHTS` and the optimizer's slots. With ZeRO-1 the rows are those of
        `lt_ckpt.nxd.zero1.shard_rows`, without it all rows. A head that is the same tensor as the embedding has no
        entry of its own.
        """
        ...

    @property
    def step_count(self) -> int:
        """Number of optimizer steps that were not skipped; waits for the device."""
        ...

    @step_count.setter
    def step_count(self, value: int) -> None: ...

    def sync_model_params(self) -> None:
        """Copy the master weights, gathered and cast, into the layers' weights."""
        ...

    def forward_backward(self, batch: StepBatch) -> Tensor:
        """Run forward and backward of every micro-batch and accumulate gradients.

        The gradients are those of (sum of the loss) / batch.valid_tokens.

        Returns:
            Summed cross-entropy in nats of this rank's rows, divided by batch.valid_tokens: a scalar on the device.
            Equal on all tensor-parallel ranks; 0 on every stage but the last.
        """
        ...

    def optimizer_step(self, loss: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        """Reduce and clip gradients, update the weights, zero the gradients.

        If the loss or the norm is not finite, weights, moments and step count stay unchanged; this is decided on the
        device.

        Args:
            loss: result of `forward_backward`.
            lr: learning rate.

        Returns:
            Loss of the global batch and its gradient norm before clipping, scalars, equal on every rank.
        """
        ...

    def validate(self, batch: StepBatch) -> Tensor:
        """Return the summed loss in nats, without gradients or z-loss.

        Equal on all tensor-parallel ranks; 0 on every stage but the last.
        """
        ...

    def score(self, batch: StepBatch) -> Tensor | None:
        """Return log-probability and greedy flag (1 or 0) of each label, [2, M, B * T], on the device.

        Equal on all tensor-parallel ranks; 0 where there is no label. None on every stage but the last.
        """
        ...

    def mark_step(self) -> None:
        """End the graph of a lazy device; no-op on other devices."""
        ...

    def fetch_scalars(self, values: Sequence[Tensor]) -> list[float]:
        """Return scalars as floats; waits for the device, as only `step_count` and `fetch_array` do otherwise."""
        ...

    def fetch_array(self, values: Tensor) -> np.ndarray:
        """Return a tensor of a finished graph as a float64 array; waits for the device."""
        ...

    def memory_bytes(self) -> int:
        """Return the peak memory in bytes of this rank's device (on a CPU: of the process)."""
        ...

    def close(self) -> None:
        """Release devices and process groups."""
        ...
