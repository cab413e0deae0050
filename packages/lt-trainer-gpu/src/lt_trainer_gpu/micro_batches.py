"""Micro-batches on the device, and passes through a model without a pipeline.

Shapes: M micro-batches, B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from lt_model.documents import DocumentBoundaries
from lt_model.loss import LossParts
from lt_model.scoring import LabelScores
from lt_trainer.engine import StepBatch
from lt_trainer.torch import micro_batches_to_device
from lt_trainer_gpu.context_parallel_rows import rank_positions, split_boundaries
from lt_trainer_gpu.device_sum import DeviceSum
from lt_trainer_gpu.fsdp_sync import FsdpSync
from lt_trainer_gpu.model import LlamaStage


class DeviceMicroBatch(NamedTuple):
    """Rows of one forward and backward pass.

    Attributes:
        input_ids: int64 [B, T], under context parallelism this rank's positions of the rows; None where no stage of
            this rank has the embedding.
        position_ids: int64 [B, T].
        labels: int64 [B, T]; None where no stage of this rank has the head.
        boundaries: document boundaries, on the host; under context parallelism `QuerySegments`.
    """

    input_ids: Tensor | None
    position_ids: Tensor
    labels: Tensor | None
    boundaries: DocumentBoundaries

    @property
    def first_inputs(self) -> Tensor:
        """Input of the model's first stage."""
        assert self.input_ids is not None
        return self.input_ids


def micro_batches(
    batch: StepBatch,
    device: torch.device,
    *,
    fixed_boundaries: bool,
    cp: int = 1,
    cp_rank: int = 0,
    has_ids: bool = True,
    has_labels: bool = True,
) -> list[DeviceMicroBatch]:
    """Return this rank's positions of a step's micro-batches on the device; does not synchronize.

    Args:
        batch: arrays [M, B, T].
        device: the rank's device.
        fixed_boundaries: keep the empty documents that pad the boundaries to one length, as compiled blocks need.
        cp: context-parallel ranks, of which each has its positions of every row.
        cp_rank: this rank's index among them.
        has_ids: copy the token ids, for the first stage.
        has_labels: copy the labels, for the last stage.
    """
    (n_micro, n_rows, seq_len), found = batch.input_ids.shape, []

    def copy(array: np.ndarray, is_needed: bool) -> Iterable[Tensor | None]:
        return micro_batches_to_device(rank_positions(array, cp, cp_rank), device) if is_needed else [None] * n_micro

    positions_of = micro_batches_to_device(rank_positions(batch.position_ids, cp, cp_rank), device)
    ids_and_labels = zip(copy(batch.input_ids, has_ids), copy(batch.labels, has_labels), strict=True)
    for cu_seqlens, positions, (ids, labels) in zip(batch.cu_seqlens, positions_of, ids_and_labels, strict=True):
        if not fixed_boundaries:
            cu_seqlens = cu_seqlens[: np.searchsorted(cu_seqlens, n_rows * seq_len) + 1]
        boundaries = DocumentBoundaries(torch.from_numpy(cu_seqlens), n_rows, seq_len)
        if cp > 1:
            boundaries = split_boundaries(boundaries, cp, cp_rank, fixed_length=fixed_boundaries)
        found.append(DeviceMicroBatch(ids, positions, labels, boundaries))
    return found


class PassRunner(Protocol):
    """Forward and backward passes of a rank's stages over the micro-batches of a step."""

    def forward_backward(self, micros: Sequence[DeviceMicroBatch], *, valid_tokens: int, z_loss: float) -> Tensor:
        """Accumulate the gradients of the summed loss / `valid_tokens`.

        Returns:
            The summed cross-entropy in nats, on the device; 0 where this rank has no head.

        Raises:
            PeerError: another rank is gone.
        """
        ...

    def forward(self, micros: Sequence[DeviceMicroBatch]) -> Tensor:
        """Return the summed cross-entropy, as above; call under `torch.no_grad`."""
        ...

    def score(self, micros: Sequence[DeviceMicroBatch]) -> list[LabelScores]:
        """Return the scores of the labels by micro-batch, [B, T] each; call under `torch.no_grad`.

        Empty where this rank has no head.
        """
        ...


class ModelRunner:
    """Passes through a model that is not pipelined, one micro-batch after the other.

    Args:
        model: all layers.
        fsdp_sync: its communication schedule.
        device: the rank's device.
    """

    def __init__(self, model: LlamaStage, fsdp_sync: FsdpSync, device: torch.device) -> None:
        self._model, self._fsdp_sync, self._device = model, fsdp_sync, device

    def forward_backward(self, micros: Sequence[DeviceMicroBatch], *, valid_tokens: int, z_loss: float) -> Tensor:
        """Accumulate the gradients, as `PassRunner` says."""
        loss_sum = DeviceSum(self._device)
        for index, parts in enumerate(self._losses(micros, z_loss)):
            self._fsdp_sync.on_backward_begin(is_last=index == len(micros) - 1)
            (parts.total / valid_tokens).backward()
            loss_sum.add(parts.cross_entropy)
        return loss_sum.total

    def forward(self, micros: Sequence[DeviceMicroBatch]) -> Tensor:
        """Return the summed cross-entropy."""
        loss_sum = DeviceSum(self._device)
        for parts in self._losses(micros, z_loss=0.0):
            loss_sum.add(parts.cross_entropy)
        return loss_sum.total

    def score(self, micros: Sequence[DeviceMicroBatch]) -> list[LabelScores]:
        """Return the scores of the labels."""
        return [self._forward(micro, None) for micro in micros]

    def _losses(self, micros: Sequence[DeviceMicroBatch], z_loss: float) -> Iterable[LossParts]:
        for micro in micros:
            yield self._forward(micro, z_loss)

    def _forward(self, micro: DeviceMicroBatch, z_loss: float | None) -> Any:
        return self._model(micro.first_inputs, micro.position_ids, micro.boundaries, micro.labels, z_loss)
