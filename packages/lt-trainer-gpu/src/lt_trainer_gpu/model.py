"""Llama with its training loss, computed on a vocabulary-parallel head if it is one.

The head computes the loss itself (`LossHead`): FSDP can then gather its weight just before and free it just after.

Shapes: B batch, T positions, D hidden_size.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from lt_model.documents import DocumentBoundaries
from lt_model.llama import Llama
from lt_model.loss import LossParts, linear_loss_parts
from lt_trainer_gpu.collectives import TensorParallelGroup, all_reduce_softmax_terms, copy_to_tp


class LossHead(nn.Linear):
    """Output head whose forward pass is the training loss; made from a Llama's head by `attach_loss`."""

    tp_group: TensorParallelGroup | None
    vocab_start_index: int
    pad_vocab_to_multiple_of: int
    compile_loss: bool

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_BTD: Tensor, labels_BT: Tensor, z_loss: float
    ) -> LossParts:
        """Return the summed loss and its parts, the same on all tensor-parallel ranks."""
        all_reduce_softmax = None
        if self.tp_group is not None:
            hidden_BTD = copy_to_tp(hidden_BTD, self.tp_group)
            all_reduce_softmax = partial(all_reduce_softmax_terms, tp_group=self.tp_group)
        return linear_loss_parts(
            hidden_BTD,
            self.weight,
            labels_BT,
            z_loss=z_loss,
            pad_to_multiple_of=self.pad_vocab_to_multiple_of,
            vocab_start_index=self.vocab_start_index,
            all_reduce_softmax=all_reduce_softmax,
            compile=self.compile_loss,
        )


class LlamaWithLoss(Llama):
    """Llama whose forward pass is the training loss; made from a Llama by `attach_loss`."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor,
        boundaries: DocumentBoundaries,
        labels_BT: Tensor,
        z_loss: float,
    ) -> LossParts:
        """Return the summed loss and its parts, the same on all tensor-parallel ranks.

        Args:
            input_ids_BT: token ids.
            position_ids_BT: rotary positions.
            boundaries: document boundaries; on the host, where FSDP leaves them.
            labels_BT: the token after each position, -100 where none is to be learned.
            z_loss: coefficient of logsumexp(logits)^2.
        """
        hidden_BTD = self.hidden_states(input_ids_BT, position_ids_BT=position_ids_BT, boundaries=boundaries)
        return self.lm_head(hidden_BTD, labels_BT, z_loss)


def attach_loss(
    model: Llama, tp_group: TensorParallelGroup | None, vocab_start_index: int, *, compile: bool = False
) -> LlamaWithLoss:
    """Convert `model` in place; `vocab_start_index` is the token id of the head's first row."""
    model.__class__, head = LlamaWithLoss, model.lm_head
    head.__class__ = LossHead
    assert isinstance(model, LlamaWithLoss)
    assert isinstance(head, LossHead)
    head.tp_group, head.vocab_start_index, head.compile_loss = tp_group, vocab_start_index, compile
    head.pad_vocab_to_multiple_of = model.pad_vocab_to_multiple_of
    return model
