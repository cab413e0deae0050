"""Forward and backward of micro-batches where all layers are on one stage.

A micro-batch is one tensor [4, B, T] of int32: token ids, positions, labels, document numbers; one transfer.

Cost: that of the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lt_model.loss import LossParts
from lt_trainer.engine import StepBatch
from lt_trainer_neuron.nxd.device import TensorDevice
from lt_trainer_neuron.nxd.llama import Stage
from lt_trainer_neuron.nxd.loss import vocabulary_loss
from lt_trainer_neuron.nxd.ranks import Ranks
from lt_trainer_neuron.nxd.step import AfterMicro

__all__ = ["OneStage", "StageLoss", "micro_batches"]


def micro_batches(batch: StepBatch, device: TensorDevice) -> list[Tensor]:
    """The micro-batches of a step on their way to the device, int32 [4, B, T] each."""
    parts = (batch.input_ids, batch.position_ids, batch.labels, batch.doc_ids)
    return [device.put(np.stack([part[index] for part in parts])) for index in range(batch.input_ids.shape[0])]


class StageLoss:
    """A stage with its loss.

    Args:
        stage: the layers.
        ranks: the other ranks.
        first_column: which token id this rank's first row of the head is.
        z_loss: coefficient of logsumexp(logits)^2 in training.
        wide: dtype of the loss.
        documents: whether a token sees its own document only.
    """

    def __init__(
        self, stage: Stage, ranks: Ranks, *, first_column: int, z_loss: float, wide: torch.dtype, documents: bool
    ) -> None:
        self._stage, self._ranks, self._first_column = stage, ranks, first_column
        self._z_loss, self._wide, self._documents = z_loss, wide, documents

    def shape_between(self, micro: Tensor) -> tuple[int, int, int]:
        """Shape of what stages hand over for a micro-batch."""
        return self._stage.shape_between(micro.shape[1], micro.shape[2])

    def no_loss(self, micro: Tensor) -> Tensor:
        """The cross-entropy of a stage that has none: zero, a scalar."""
        return torch.zeros((), dtype=self._wide, device=micro.device)

    def forward(self, received: Tensor | None, micro: Tensor) -> Tensor:
        """What the stage makes of a micro-batch, or of what the stage before gave for it."""
        ids, positions, _, documents = micro.to(torch.int64)
        return self._stage(ids if received is None else received, positions, documents if self._documents else None)

    def loss(self, logits: Tensor, micro: Tensor, *, training: bool) -> LossParts:
        """The summed loss of the last stage's logits."""
        return vocabulary_loss(
            logits.flatten(0, 1),
            micro[2].flatten(),
            ranks=self._ranks,
            first_column=self._first_column,
            z_loss=self._z_loss if training else 0.0,
            wide=self._wide,
        )


class OneStage:
    """See the module's text."""

    def __init__(self, stage: StageLoss) -> None:
        self._stage = stage

    def train(self, micros: Sequence[Tensor], valid_tokens: Tensor, after: AfterMicro) -> None:
        """Run the micro-batches forward and backward, one after the other."""
        for micro in micros:
            parts = self._stage.loss(self._stage.forward(None, micro), micro, training=True)
            (parts.total / valid_tokens).backward()
            after(parts.cross_entropy)

    @torch.no_grad()
    def evaluate(self, micros: Sequence[Tensor]) -> Tensor:
        """The summed cross-entropy."""
        losses = [
            self._stage.loss(self._stage.forward(None, micro), micro, training=False).cross_entropy for micro in micros
        ]
        return torch.stack(losses).sum()
