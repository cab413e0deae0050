"""The model as the engine calls it: documents stay on the host, and the loss follows the head's layout.

FSDP moves every tensor that is given to the model to the device. The numbers of documents must not go there: most
attention backends ask the host where documents begin, and would then wait for the device. So they come wrapped.

Shapes: B batch, T positions.
"""

from __future__ import annotations

from torch import Tensor

from lt_model.llama import Llama
from lt_model.loss import LossParts, linear_loss_parts
from lt_trainer_gpu.collectives import TensorAxis, enter
from lt_trainer_gpu.vocabulary_loss import vocabulary_loss_parts


class OnHost:
    """A tensor that nobody moves."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class TrainedLlama(Llama):
    """A Llama whose forward pass is the training loss. Made of a Llama by `trained`."""

    axis: TensorAxis | None
    first_id: int

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids_BT: Tensor, position_ids_BT: Tensor, documents: OnHost | None, labels_BT: Tensor, z_loss: float
    ) -> LossParts:
        """Return the summed loss and its parts, the same on all tensor-parallel ranks.

        Args:
            input_ids_BT: token ids.
            position_ids_BT: rotary positions.
            documents: document number of each token, or None where rows are one document each.
            labels_BT: the token after each position, -100 where none is to be learnt.
            z_loss: coefficient of logsumexp(logits)^2.
        """
        hidden = self.hidden_states(
            input_ids_BT,
            position_ids_BT=position_ids_BT,
            doc_ids_BT=None if documents is None else documents.tensor,
        )
        weight = self.lm_head.weight
        if self.axis is None:
            return linear_loss_parts(hidden, weight, labels_BT, z_loss=z_loss, pad_to=self.pad_vocab_to)
        return vocabulary_loss_parts(
            enter(hidden, self.axis),
            weight,
            labels_BT,
            axis=self.axis,
            first=self.first_id,
            z_loss=z_loss,
            pad_to=self.pad_vocab_to,
        )


def trained(model: Llama, axis: TensorAxis | None, first_id: int) -> TrainedLlama:
    """Turn `model` in place into a `TrainedLlama`; `first_id` is that of this rank's first row of the head."""
    model.__class__ = TrainedLlama
    assert isinstance(model, TrainedLlama)
    model.axis, model.first_id = axis, first_id
    return model
