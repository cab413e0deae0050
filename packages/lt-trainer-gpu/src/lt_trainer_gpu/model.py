"""Consecutive layers of a decoder with the training loss: a pipeline stage, or the whole model.

The first stage has the embedding, the last one the norm and the head, which computes the loss, or the scores of labels,
itself (`LossHead`): FSDP can then gather its weight just before and free it just after. Modules keep their names, so a
parameter is called the same in every stage and checkpoint. Only a tied head away from the embedding is a parameter of
its own: `stage_params` returns it under the embedding's name.

Shapes: B batch, T positions, D hidden_size.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lt_model import ModelConfig, ParamSpec, param_specs
from lt_model.decoder import Decoder
from lt_model.documents import DocumentBoundaries
from lt_model.loss import LossParts, linear_loss_parts
from lt_model.scoring import LabelScores, linear_label_scores
from lt_trainer_gpu.collectives import TensorParallelGroup, all_reduce_softmax_terms, copy_to_tp
from lt_trainer_gpu.fsdp_sync import FsdpSync
from lt_trainer_gpu.module_class import exchange_class

if TYPE_CHECKING:
    from lt_trainer_gpu.balancing import Balance


class LossHead(nn.Linear):
    """Output head whose forward pass is the loss, or scores; made from a decoder's head by `build_stage`."""

    tp_group: TensorParallelGroup | None
    vocab_start_index: int
    pad_vocab_to_multiple_of: int
    chunk_tokens: int
    compile_loss: bool
    softcap: float

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_BTD: Tensor, labels_BT: Tensor, z_loss: float | None
    ) -> LossParts | LabelScores:
        """Return the summed loss and its parts, the same on all tensor-parallel ranks.

        With `z_loss` None, return the score of each label instead; not differentiable.
        """
        arguments: dict[str, Any] = {
            "pad_to_multiple_of": self.pad_vocab_to_multiple_of,
            "vocab_start_index": self.vocab_start_index,
            "chunk_tokens": self.chunk_tokens,
            "softcap": self.softcap,
        }
        if self.tp_group is not None:
            hidden_BTD = copy_to_tp(hidden_BTD, self.tp_group)
            arguments["all_reduce_softmax"] = partial(all_reduce_softmax_terms, tp_group=self.tp_group)
        if z_loss is None:
            return linear_label_scores(hidden_BTD, self.weight, labels_BT, **arguments)
        return linear_loss_parts(
            hidden_BTD, self.weight, labels_BT, z_loss=z_loss, compile=self.compile_loss, **arguments
        )


class DecoderStage(Decoder):
    """Consecutive layers of a decoder; made by `build_stage`.

    Attributes:
        is_first: it has the embedding.
        is_last: it has the norm, the head and the loss.
        fsdp_sync: its communication schedule, where it is sharded or replicated.
        balance: what its routers share, if the model has experts.
    """

    fsdp_sync: FsdpSync | None = None
    balance: Balance | None = None
    is_first: bool
    is_last: bool

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        inputs: Tensor,
        position_ids_BT: Tensor,
        boundaries: DocumentBoundaries,
        labels_BT: Tensor | None,
        z_loss: float | None,
    ) -> Tensor | LossParts | LabelScores:
        """Return the loss or scores on the last stage, equal on all tensor-parallel ranks; else x_BTD.

        Args:
            inputs: token ids [B, T] on the first stage, else the x_BTD of the previous stage.
            position_ids_BT: rotary positions.
            boundaries: document boundaries; on the host, where FSDP leaves them.
            labels_BT: the token after each position, -100 where none is to be learned; for the last stage.
            z_loss: coefficient of logsumexp(logits)^2 in the loss; None for the scores of the labels instead.
        """
        x_BTD = self.hidden_states(inputs, position_ids_BT=position_ids_BT, boundaries=boundaries)
        return self.lm_head(x_BTD, labels_BT, z_loss) if self.is_last else x_BTD

    def tie_weights(self) -> None:
        """Make the head's weight the embedding's where both are in this stage and the model is tied."""
        if self.is_first and self.is_last and self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight


def build_stage(
    config: ModelConfig,
    layers: range,
    *,
    attention: str,
    dtype: torch.dtype,
    pad_vocab_to_multiple_of: int = 1,
    loss_chunk_tokens: int = 0,
) -> DecoderStage:
    """Return a stage with `layers` of the model, on the meta device."""
    with torch.device("meta"):
        stage = Decoder(config, attention=attention, pad_vocab_to_multiple_of=pad_vocab_to_multiple_of).to(dtype)
    exchange_class(stage, DecoderStage)
    assert isinstance(stage, DecoderStage)
    stage.layers, stage.is_first, stage.is_last = layers, layers.start == 0, layers.stop == config.n_layers
    head = stage.lm_head
    exchange_class(head, LossHead)
    assert isinstance(head, LossHead)
    head.tp_group, head.vocab_start_index, head.compile_loss = None, 0, False
    head.pad_vocab_to_multiple_of, head.chunk_tokens = pad_vocab_to_multiple_of, loss_chunk_tokens
    head.softcap = config.logits_softcap
    blocks = {index: stage.model.layers[index] for index in layers}
    stage.blocks = list(blocks.values())  # pyright: ignore[reportAttributeAccessIssue]
    stage.model.layers = nn.ModuleDict({str(index): block for index, block in blocks.items()})  # pyright: ignore[reportAttributeAccessIssue]
    if not stage.is_first:
        stage.model.embed_tokens = None  # pyright: ignore[reportAttributeAccessIssue]
    if not stage.is_last:
        stage.model.norm = stage.lm_head = None  # pyright: ignore[reportAttributeAccessIssue]
    elif not stage.is_first:
        # Untied from the embedding, which is in another stage: a copy, whose gradient is added to the embedding's.
        stage.lm_head.weight = nn.Parameter(torch.empty_like(stage.lm_head.weight))
    return stage


def stage_param_specs(stage: DecoderStage) -> dict[str, ParamSpec]:
    """Return the parameters of a stage: name within the stage → row of the parameter table."""
    specs = {spec.name: spec for spec in param_specs(stage.config)}
    if stage.config.tie_word_embeddings:
        specs["lm_head.weight"] = specs["model.embed_tokens.weight"]
    return {name: specs[name] for name, _ in stage.named_parameters()}


def stage_buffers(stage: DecoderStage) -> dict[str, Tensor]:
    """Return what a stage has of the parameter table without training it: selection biases."""
    names = {spec.name for spec in param_specs(stage.config) if not spec.is_trained}
    return {name: buffer for name, buffer in stage.named_buffers() if name in names}


def stage_params(stage: DecoderStage) -> dict[str, nn.Parameter]:
    """Return the parameters of a stage by their names in checkpoints."""
    specs = stage_param_specs(stage)
    return {specs[name].name: parameter for name, parameter in stage.named_parameters()}
