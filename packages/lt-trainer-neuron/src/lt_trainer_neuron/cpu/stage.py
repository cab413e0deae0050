"""One rank's layers: the part of a Llama that its pipeline stage and its tensor-parallel rank compute.

Weights are plain tensors under NxD's keys, cut as `lt_ckpt.nxd.layout` says: embedding and head along the vocabulary,
q, k, v, gate and up along their features, o and down along their inputs; norms are whole. Attention is as NxD's: three
projections, or its GQA layer with one key/value head per rank (`qkv_linear`), whose heads may be copies, stored
as three matrices or as one (`fuse_qkv`). Which heads a rank has is in the weights alone; the arithmetic is that of
`lt_model.llama` on fewer heads.

A weight that several ranks hold (a norm's under sequence parallelism, a replicated head's, a tied head's on another
stage) gets only its own part of the gradient here; `update` sums them.

Shapes: B batch, T positions (S with sequence parallelism between layers), D hidden_size, H, G this rank's query and
key/value heads, K head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lt_ckpt.nxd.layout import nxd_layout, stages
from lt_ckpt.nxd.options import NxdOptions
from lt_model import LlamaConfig
from lt_model.attention import attention_backend
from lt_model.norm import rms_norm
from lt_model.rope import apply_rope, rope_tables
from lt_model.swiglu import swiglu
from lt_trainer_neuron.cpu.collectives import Peers, enter, leave
from lt_trainer_neuron.cpu.loss import vocabulary_loss
from lt_trainer_neuron.grid import Grid
from lt_trainer_neuron.held import EMBED, HEAD


@dataclass(frozen=True, kw_only=True)
class Micro:
    """One micro-batch, [B, T] each; `documents` is None where rows are one document each."""

    ids: Tensor
    positions: Tensor
    labels: Tensor
    documents: Tensor | None


class Stage:
    """See the module's text.

    Args:
        config: the whole model.
        cut: how it is cut.
        grid: this rank's place.
        tp: its tensor-parallel ranks.
        sequence: whether they share the positions between layers.
        dtype: of what is computed and of the weights; norm weights are fp32 or wider.

    Attributes:
        weights: NxD's key → this rank's tensor, zeros until they are filled; a tied head on the only stage is the
            embedding's very tensor.
    """

    def __init__(
        self, config: LlamaConfig, cut: NxdOptions, grid: Grid, tp: Peers, *, sequence: bool, dtype: torch.dtype
    ) -> None:
        self._config, self._cut, self._grid, self._tp, self._sequence = config, cut, grid, tp, sequence
        self._layers = stages(config.n_layers, grid.pp)[grid.pp_rank]
        self._attention = attention_backend("auto")
        self._dtype = dtype
        wide = torch.promote_types(dtype, torch.float32)
        file = nxd_layout(config, cut).files[grid.pp_rank * grid.tp + grid.tp_rank]
        self.weights: Mapping[str, Tensor] = {
            tensor.key: torch.zeros(tensor.shape, dtype=wide if len(tensor.shape) == 1 else dtype, requires_grad=True)
            for tensor in file.tensors
        }
        if config.tie_word_embeddings and grid.pp == 1:
            self.weights = {**self.weights, HEAD: self.weights[EMBED]}

    def forward(self, micro: Micro, received: Tensor | None) -> Tensor:
        """This stage's output [B, S, D]: what the next stage is given, or the last norm's on the last stage.

        Args:
            micro: the micro-batch, which every stage has.
            received: the output of the stage before; None on the first.
        """
        x_BSD = self._embedded(micro.ids) if received is None else received
        rope = rope_tables(self._config, micro.positions, self._dtype)
        mask = self._attention.mask(micro.documents, x_BSD.device, self._dtype)
        for layer in self._layers:
            x_BSD = self._block(f"model.layers.{layer}.", x_BSD, rope, mask)
        return self._norm("model.norm", x_BSD) if self._grid.last_stage else x_BSD

    def loss(self, hidden_BSD: Tensor, micro: Micro, z_loss: float) -> tuple[Tensor, Tensor]:
        """The summed loss with its z-loss, and the cross-entropy alone; on the last stage."""
        hidden_BTD = self._enter(hidden_BSD)
        return vocabulary_loss(hidden_BTD, self.weights[HEAD], micro.labels, peers=self._tp, z_loss=z_loss)

    def shape_between(self, micro: Micro) -> tuple[int, int, int]:
        """Shape of what stages hand over."""
        rows, positions = micro.ids.shape
        return rows, positions // (self._tp.size if self._sequence else 1), self._config.hidden_size

    def _embedded(self, ids_BT: Tensor) -> Tensor:
        weight_VD = self.weights[EMBED]
        local_BT = ids_BT - self._tp.rank * weight_VD.shape[0]
        absent_BT = (local_BT < 0) | (local_BT >= weight_VD.shape[0])
        own_BTD = F.embedding(local_BT.masked_fill(absent_BT, 0), weight_VD)
        return self._leave(own_BTD.masked_fill(absent_BT[..., None], 0))

    def _block(self, prefix: str, x_BSD: Tensor, rope: tuple[Tensor, Tensor], mask: Any) -> Tensor:
        attended = self._attended(prefix, self._enter(self._norm(f"{prefix}input_layernorm", x_BSD)), rope, mask)
        x_BSD = x_BSD + self._leave(F.linear(attended, self.weights[f"{prefix}self_attn.o_proj.weight"]))
        normed_BTD = self._enter(self._norm(f"{prefix}post_attention_layernorm", x_BSD))
        gate, up = F.linear(normed_BTD, self.weights[f"{prefix}mlp.gate_up_proj.weight"]).chunk(2, -1)
        return x_BSD + self._leave(F.linear(swiglu(gate, up), self.weights[f"{prefix}mlp.down_proj.weight"]))

    def _attended(self, prefix: str, x_BTD: Tensor, rope: tuple[Tensor, Tensor], mask: Any) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self._config.head_dim)) for part in self._projected(f"{prefix}self_attn.", x_BTD)
        )
        return self._attention.attend(apply_rope(q, rope), apply_rope(k, rope), v, mask).flatten(2)

    def _projected(self, prefix: str, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """This rank's queries, keys and values, [B, T, H * K] and twice [B, T, G * K]."""
        if self._cut.qkv == "gqa_fused":
            fused = F.linear(x_BTD, self.weights[f"{prefix}qkv_proj.weight_qkv"])
            key_width = self._config.n_kv_heads * self._cut.kv_multiplier * self._config.head_dim // self._cut.tp
            return fused.split((fused.shape[-1] - 2 * key_width, key_width, key_width), -1)
        name = "qkv_proj.weight_{}" if self._cut.qkv == "gqa" else "{}_proj.weight"
        return tuple(F.linear(x_BTD, self.weights[prefix + name.format(which)]) for which in "qkv")

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self._config.norm_eps)

    def _enter(self, x: Tensor) -> Tensor:
        return enter(x, self._tp, sequence=self._sequence)

    def _leave(self, x: Tensor) -> Tensor:
        return leave(x, self._tp, sequence=self._sequence)
