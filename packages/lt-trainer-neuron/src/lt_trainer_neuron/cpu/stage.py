"""Layers of one rank: the part of a Llama that its pipeline stage and tensor-parallel rank compute.

Weights are plain tensors under NxD's keys, sharded as in `lt_ckpt.nxd.layout`: embedding and head along the vocabulary,
q, k, v, gate and up along their outputs, o and down along their inputs; norms are not sharded. Attention follows NxD:
three projections, or its GQA layer with one key/value head per rank (`qkv_linear`), whose heads may be replicated,
stored as three matrices or as one (`fuse_qkv`). Only the weights determine the heads of a rank; the arithmetic is that
of `lt_model.llama` on fewer heads.

A weight that several ranks hold (a norm under sequence parallelism, a replicated head, a tied head on another stage)
gets only this rank's partial gradient here; `Zero1Optimizer.step` sums the parts.

Shapes: B batch, T positions (S with sequence parallelism between layers), D hidden_size, H, G this rank's query and
key/value heads, K head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lt_ckpt.nxd.layout import layers_per_stage, nxd_layout
from lt_ckpt.nxd.options import NxdOptions
from lt_model import LlamaConfig
from lt_model.attention import attention_backend
from lt_model.documents import DocumentBoundaries
from lt_model.llama import vocab_parallel_embedding
from lt_model.loss import LossParts, vocab_parallel_loss_parts
from lt_model.norm import rms_norm
from lt_model.rope import apply_rope, rope_tables
from lt_model.scoring import LabelScores, vocab_parallel_label_scores
from lt_model.swiglu import swiglu
from lt_trainer_neuron.cpu.collectives import RankGroup, all_reduce_max, copy_to_tp, reduce_from_tp
from lt_trainer_neuron.grid import Grid
from lt_trainer_neuron.tensor_slices import EMBED, HEAD


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Tensors of one micro-batch, [B, T] each; `doc_ids` is None if each row is one document."""

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    doc_ids: Tensor | None


class CpuPipelineStage:
    """Llama layers of one pipeline stage and tensor-parallel rank.

    Args:
        config: configuration of the whole model.
        nxd_options: sharding of the model.
        grid: this rank's coordinates.
        tp_group: tensor-parallel group of this rank.
        sequence_parallel: shard positions over `tp_group` between layers.
        dtype: dtype of computation and weights; norm weights are fp32 or wider.

    Attributes:
        weights: NxD's key → this rank's tensor, initially zeros; with one stage, a tied head is the same tensor as the
            embedding.
    """

    def __init__(
        self,
        config: LlamaConfig,
        nxd_options: NxdOptions,
        grid: Grid,
        tp_group: RankGroup,
        *,
        sequence_parallel: bool,
        dtype: torch.dtype,
    ) -> None:
        self._config, self._nxd_options, self._grid, self._tp_group, self._sequence_parallel = (
            config,
            nxd_options,
            grid,
            tp_group,
            sequence_parallel,
        )
        self._layers = layers_per_stage(config.n_layers, grid.pp)[grid.pp_rank]
        self._attention = attention_backend("auto")
        self._dtype = dtype
        wide = torch.promote_types(dtype, torch.float32)
        file = nxd_layout(config, nxd_options).files[grid.pp_rank * grid.tp + grid.tp_rank]
        self.weights: Mapping[str, Tensor] = {
            tensor.key: torch.zeros(tensor.shape, dtype=wide if len(tensor.shape) == 1 else dtype, requires_grad=True)
            for tensor in file.tensors
        }
        if config.tie_word_embeddings and grid.pp == 1:
            self.weights = {**self.weights, HEAD: self.weights[EMBED]}

    def forward(self, micro_batch: MicroBatch, stage_input: Tensor | None) -> Tensor:
        """Return this stage's output [B, S, D]; on the last stage, the output of the final norm.

        Args:
            micro_batch: the micro-batch, available on every stage.
            stage_input: output of the previous stage; None on the first.
        """
        x_BSD = self._embed(micro_batch.input_ids) if stage_input is None else stage_input
        rope = rope_tables(self._config, micro_batch.position_ids, self._dtype)
        boundaries = None if micro_batch.doc_ids is None else DocumentBoundaries.from_doc_ids(micro_batch.doc_ids)
        mask = self._attention.make_mask(boundaries, x_BSD.device, self._dtype)
        for layer in self._layers:
            x_BSD = self._block(f"model.layers.{layer}.", x_BSD, rope, mask)
        return self._norm("model.norm", x_BSD) if self._grid.is_last_stage else x_BSD

    def loss(self, hidden_BSD: Tensor, micro_batch: MicroBatch, z_loss: float) -> LossParts:
        """Return the summed loss of the last stage's output, equal on all tensor-parallel ranks."""
        logits_BTV = F.linear(self._copy_to_tp(hidden_BSD), self.weights[HEAD])
        return vocab_parallel_loss_parts(
            logits_BTV.flatten(0, 1), micro_batch.labels.flatten(), z_loss=z_loss, **self._vocabulary(logits_BTV)
        )

    def scores(self, hidden_BSD: Tensor, micro_batch: MicroBatch) -> LabelScores:
        """Return the scores of the labels, [B * T], equal on all tensor-parallel ranks."""
        logits_BTV = F.linear(self._copy_to_tp(hidden_BSD), self.weights[HEAD])
        return vocab_parallel_label_scores(
            logits_BTV.flatten(0, 1), micro_batch.labels.flatten(), **self._vocabulary(logits_BTV)
        )

    def _vocabulary(self, logits_BTV: Tensor) -> dict[str, Any]:
        """Return the options of `vocab_parallel_softmax` for this rank's columns."""
        return {
            "vocab_start_index": self._tp_group.rank * logits_BTV.shape[2],
            "all_reduce_max": partial(all_reduce_max, group=self._tp_group),
            "all_reduce_sum": partial(reduce_from_tp, tp_group=self._tp_group, sequence_parallel=False),
        }

    def activation_shape(self, micro_batch: MicroBatch) -> tuple[int, int, int]:
        """Return the shape of activations sent between stages."""
        rows, positions = micro_batch.input_ids.shape
        return rows, positions // (self._tp_group.size if self._sequence_parallel else 1), self._config.hidden_size

    def _embed(self, ids_BT: Tensor) -> Tensor:
        weight_VD = self.weights[EMBED]
        return self._reduce_from_tp(
            vocab_parallel_embedding(ids_BT, weight_VD, self._tp_group.rank * weight_VD.shape[0])
        )

    def _block(self, prefix: str, x_BSD: Tensor, rope: tuple[Tensor, Tensor], mask: Any) -> Tensor:
        attended = self._attend(prefix, self._copy_to_tp(self._norm(f"{prefix}input_layernorm", x_BSD)), rope, mask)
        x_BSD = x_BSD + self._reduce_from_tp(F.linear(attended, self.weights[f"{prefix}self_attn.o_proj.weight"]))
        normed_BTD = self._copy_to_tp(self._norm(f"{prefix}post_attention_layernorm", x_BSD))
        gate, up = F.linear(normed_BTD, self.weights[f"{prefix}mlp.gate_up_proj.weight"]).chunk(2, -1)
        return x_BSD + self._reduce_from_tp(F.linear(swiglu(gate, up), self.weights[f"{prefix}mlp.down_proj.weight"]))

    def _attend(self, prefix: str, x_BTD: Tensor, rope: tuple[Tensor, Tensor], mask: Any) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self._config.head_dim)) for part in self._project_qkv(f"{prefix}self_attn.", x_BTD)
        )
        return self._attention.attend(apply_rope(q, rope), apply_rope(k, rope), v, mask).flatten(2)

    def _project_qkv(self, prefix: str, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """Return this rank's queries, keys and values, [B, T, H * K] and twice [B, T, G * K]."""
        if self._nxd_options.qkv == "gqa_fused":
            fused = F.linear(x_BTD, self.weights[f"{prefix}qkv_proj.weight_qkv"])
            key_width = (
                self._config.n_kv_heads
                * self._nxd_options.kv_size_multiplier
                * self._config.head_dim
                // self._nxd_options.tp
            )
            return fused.split((fused.shape[-1] - 2 * key_width, key_width, key_width), -1)
        name = "qkv_proj.weight_{}" if self._nxd_options.qkv == "gqa" else "{}_proj.weight"
        return tuple(F.linear(x_BTD, self.weights[prefix + name.format(which)]) for which in "qkv")

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self._config.norm_eps)

    def _copy_to_tp(self, x: Tensor) -> Tensor:
        return copy_to_tp(x, self._tp_group, sequence_parallel=self._sequence_parallel)

    def _reduce_from_tp(self, x: Tensor) -> Tensor:
        return reduce_from_tp(x, self._tp_group, sequence_parallel=self._sequence_parallel)
