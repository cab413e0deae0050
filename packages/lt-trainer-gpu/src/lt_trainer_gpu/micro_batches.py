"""Micro-batches on the device, and passes through a model without a pipeline.

Shapes: M micro-batches, B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from lt_model.documents import DocumentBoundaries
from lt_trainer.engine import StepBatch, StepParts
from lt_trainer.torch import to_device
from lt_trainer_gpu.context_parallel_rows import rank_positions, split_boundaries
from lt_trainer_gpu.model import DecoderStage


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
    """Return this rank's positions of micro-batches on the device; does not synchronize.

    Args:
        batch: a part of a step, arrays [M, B, T].
        device: the rank's device.
        fixed_boundaries: keep the empty documents that pad the boundaries to one length, as compiled blocks need.
        cp: context-parallel ranks, of which each has its positions of every row.
        cp_rank: this rank's index among them.
        has_ids: copy the token ids, for the first stage.
        has_labels: copy the labels, for the last stage.
    """
    (n_micro, n_rows, seq_len), found = batch.input_ids.shape, []
    needed = ((batch.position_ids, True), (batch.input_ids, has_ids), (batch.labels, has_labels))
    arrays = [rank_positions(array, cp, cp_rank) if cp > 1 else array for array, is_needed in needed if is_needed]
    on_device = to_device(np.stack(arrays), device)  # in one transfer
    columns = [next(on_device) if is_needed else [None] * n_micro for _, is_needed in needed]
    for cu_seqlens, positions, ids, labels in zip(batch.cu_seqlens, *columns, strict=True):
        assert positions is not None
        if not fixed_boundaries:
            cu_seqlens = cu_seqlens[: np.searchsorted(cu_seqlens, n_rows * seq_len) + 1]
        boundaries = DocumentBoundaries(torch.from_numpy(cu_seqlens), n_rows, seq_len)
        if cp > 1:
            boundaries = split_boundaries(boundaries, cp, cp_rank, fixed_length=fixed_boundaries)
        found.append(DeviceMicroBatch(ids, positions, labels, boundaries))
    return found


class StepMicroBatches:
    """Micro-batches of a step on the device, each part copied there when its first one is asked for.

    Args:
        batch: the step.
        load: copies a part (`micro_batches`).
    """

    def __init__(self, batch: StepParts, load: Callable[[StepBatch], list[DeviceMicroBatch]]) -> None:
        self._batch, self._load = batch, load

    def __len__(self) -> int:
        return self._batch.n_micro_batches

    def __iter__(self) -> Iterator[DeviceMicroBatch]:
        for part in self._batch.parts():
            yield from self._load(part)


class MicroBatches(Protocol):
    """Micro-batches of a step, in order: a list, or `StepMicroBatches`."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[DeviceMicroBatch]: ...


class PassRunner(Protocol):
    """Forward and backward passes of a rank's stages over the micro-batches of a step."""

    def forward_backward(self, micros: MicroBatches, *, share: Tensor, z_loss: float) -> list[Tensor]:
        """Accumulate the gradients of the summed loss times `share`, one over the step's valid tokens.

        Returns:
            The summed cross-entropy in nats of each micro-batch, on the device; none where this rank has no head.

        Raises:
            PeerError: another rank is gone.
        """
        ...

    def forward(self, micros: MicroBatches, z_loss: float | None) -> list[Any]:
        """Return the `LossParts` by micro-batch, or with `z_loss` None the `LabelScores`; none without a head.

        Call under `torch.no_grad`.
        """
        ...


class ModelRunner:
    """Passes through a model that is not pipelined, one micro-batch after the other."""

    def __init__(self, model: DecoderStage) -> None:
        self._model = model

    def forward_backward(self, micros: MicroBatches, *, share: Tensor, z_loss: float) -> list[Tensor]:
        """Accumulate the gradients, as `PassRunner` says."""
        losses = []
        for index, (ids, positions, labels, boundaries) in enumerate(micros):
            if self._model.balance is not None and labels is not None:
                self._model.balance.begin_pass(labels, len(micros))
            parts = self._model(ids, positions, boundaries, labels, z_loss)
            if self._model.fsdp_sync is not None:
                self._model.fsdp_sync.on_backward_begin(is_last=index == len(micros) - 1)
            total = parts.total * share if share.is_cpu else parts.total
            total.backward(None if share.is_cpu else share)  # which with a gradient imports sympy
            losses.append(parts.cross_entropy)
        return losses

    def forward(self, micros: MicroBatches, z_loss: float | None) -> list[Any]:
        """Return the losses or the scores, as `PassRunner` says."""
        return [self._model(ids, positions, bounds, labels, z_loss) for ids, positions, labels, bounds in micros]
