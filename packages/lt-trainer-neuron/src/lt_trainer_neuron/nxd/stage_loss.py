"""Micro-batches on the device, and the loss and the scores of one.

A micro-batch is one int32 tensor [4, B, T]: token ids, positions, labels, document ids; one transfer.

Cost: that of the model.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from lt_model.loss import LossParts
from lt_model.scoring import vocab_parallel_label_scores
from lt_trainer.engine import StepParts
from lt_trainer_neuron.nxd.collectives import Collectives
from lt_trainer_neuron.nxd.decoder import NxdPipelineStage
from lt_trainer_neuron.nxd.device import TensorDevice
from lt_trainer_neuron.nxd.loss import vocab_parallel_loss


def load_micro_batches(batch: StepParts, device: TensorDevice) -> Iterator[Tensor]:
    """Yield a step's micro-batches, int32 [4, B, T] each, copied to the device without waiting when asked for."""
    for part in batch.parts():
        arrays = (part.input_ids, part.position_ids, part.labels, part.doc_ids)
        for index in range(part.n_micro_batches):
            yield device.to_device(np.stack([array[index] for array in arrays]))


class StageWithLoss:
    """Pipeline stage with its loss.

    Args:
        stage: layers of the stage.
        collectives: collectives over the mesh axes.
        vocab_start_index: token id of the first row of this rank's head.
        z_loss: coefficient of logsumexp(logits)^2 in training.
        upcast_dtype: dtype of the loss.
        document_mask: restrict attention to the token's own document.
    """

    def __init__(
        self,
        stage: NxdPipelineStage,
        collectives: Collectives,
        *,
        vocab_start_index: int,
        z_loss: float,
        upcast_dtype: torch.dtype,
        document_mask: bool,
    ) -> None:
        self._stage, self._collectives, self._vocab_start_index = stage, collectives, vocab_start_index
        self._z_loss, self._upcast_dtype, self._document_mask = z_loss, upcast_dtype, document_mask

    def activation_shape(self, micro_batch: Tensor) -> tuple[int, int, int]:
        """Return the shape of activations sent between stages for a micro-batch."""
        return self._stage.activation_shape(micro_batch.shape[1], micro_batch.shape[2])

    def zero_loss(self, micro_batch: Tensor) -> Tensor:
        """Return a zero scalar: the cross-entropy of a stage without loss."""
        return torch.zeros((), dtype=self._upcast_dtype, device=micro_batch.device)

    def forward(self, stage_input: Tensor | None, micro_batch: Tensor) -> Tensor:
        """Return the stage's output for a micro-batch and the previous stage's activations, if any."""
        ids, positions, _, documents = micro_batch.to(torch.int64)
        return self._stage(
            ids if stage_input is None else stage_input, positions, documents if self._document_mask else None
        )

    def loss(self, logits: Tensor, micro_batch: Tensor, *, training: bool) -> LossParts:
        """Return the summed loss of the last stage's logits."""
        return vocab_parallel_loss(
            logits.flatten(0, 1),
            micro_batch[2].flatten(),
            collectives=self._collectives,
            vocab_start_index=self._vocab_start_index,
            z_loss=self._z_loss if training else 0.0,
            upcast_dtype=self._upcast_dtype,
        )

    def scores(self, logits: Tensor, micro_batch: Tensor) -> Tensor:
        """Return log-probability and greedy flag (1 or 0) of each label, [2, B * T]."""
        log_probs, is_greedy = vocab_parallel_label_scores(
            logits.flatten(0, 1),
            micro_batch[2].flatten(),
            all_reduce_max=lambda x: self._collectives.all_reduce_max(x, "tp"),
            all_reduce_sum=lambda x: self._collectives.all_reduce_sum(x, "tp"),
            vocab_start_index=self._vocab_start_index,
            upcast_dtype=self._upcast_dtype,
        )
        return torch.stack([log_probs, is_greedy.to(log_probs.dtype)])
