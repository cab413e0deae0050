"""The layers that a model is made of: NxD's parallel layers, or torch's own for one rank alone.

NxD 0.18 sums the input gradient of its column-parallel layers in `reduce_dtype`, float32 by default, by casting into a
temporary and dropping it: with bf16 weights and no sequence parallelism the sum over tensor-parallel ranks is lost
without a word. So `reduce_dtype` is always the dtype of the weights where sums are not scattered, and `NxdLayers`
refuses a layer that does not take the option.

The layers are made on the meta device: whoever makes a model gives it memory and fills it.

Cost: none.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

__all__ = ["Layers", "NxdLayers", "Projections", "TorchLayers"]

META = torch.device("meta")


class Layers(Protocol):
    """See the module's text. Weights are `[out, in]`, without biases; `sequence` is the dimension of positions."""

    tp: int
    tp_rank: int
    sequence_parallel: bool
    """Whether positions are cut over the tensor-parallel ranks between layers; then tensors are [T, B, D]."""

    def embedding(self, rows: int, width: int) -> nn.Module:
        """Token ids [B, T] to [B, T, D], or to [T/tp, B, D] under sequence parallelism; rows are cut."""
        ...

    def column(self, width: int, out: int, *, stacked: int = 1) -> nn.Module:
        """A linear layer whose outputs are cut; `stacked` matrices one below the other, each cut by itself."""
        ...

    def row(self, width: int, out: int) -> nn.Module:
        """A linear layer whose inputs are cut; its output is summed over ranks."""
        ...

    def qkv(self, width: int, q_out: int, kv_out: int, *, copies: int, fused: bool) -> nn.Module:
        """Queries, keys and values of NxD's GQA layer: three tensors; each key/value head is on `copies` ranks."""
        ...


class TorchLayers:
    """One rank alone: torch's own layers."""

    tp, tp_rank, sequence_parallel = 1, 0, False

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def embedding(self, rows: int, width: int) -> nn.Module:
        """A whole embedding."""
        return nn.Embedding(rows, width, device=META, dtype=self._dtype)

    def column(self, width: int, out: int, *, stacked: int = 1) -> nn.Module:
        """A whole linear layer."""
        return nn.Linear(width, out, bias=False, device=META, dtype=self._dtype)

    def row(self, width: int, out: int) -> nn.Module:
        """A whole linear layer."""
        return nn.Linear(width, out, bias=False, device=META, dtype=self._dtype)

    def qkv(self, width: int, q_out: int, kv_out: int, *, copies: int, fused: bool) -> nn.Module:
        """Three whole projections under the names of NxD's GQA layer."""
        assert copies == 1, "one rank has one copy"
        return Projections(width, q_out, kv_out, fused=fused, dtype=self._dtype)


class Projections(nn.Module):
    """Queries, keys and values under the names that NxD's GQA layer gives its weights."""

    def __init__(self, width: int, q_out: int, kv_out: int, *, fused: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self._sizes = (q_out, kv_out, kv_out)
        outs = (
            {"weight_qkv": q_out + 2 * kv_out} if fused else {"weight_q": q_out, "weight_k": kv_out, "weight_v": kv_out}
        )
        for name, out in outs.items():
            self.register_parameter(name, nn.Parameter(torch.empty(out, width, dtype=dtype, device=META)))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys, values."""
        weights = list(self.parameters())
        if len(weights) == 1:
            return nn.functional.linear(x, weights[0]).split(self._sizes, dim=-1)
        return tuple(nn.functional.linear(x, weight) for weight in weights)


class NxdLayers:
    """NxD's parallel layers over its tensor-parallel group, which must be initialised.

    Args:
        dtype: of weights and of what is computed.
        sequence_parallel: positions are cut over the ranks between layers.
    """

    def __init__(self, dtype: torch.dtype, *, sequence_parallel: bool) -> None:
        from neuronx_distributed.modules import qkv_linear
        from neuronx_distributed.parallel_layers import layers, parallel_state

        self._layers, self._qkv_linear, self._dtype = layers, qkv_linear, dtype
        self.tp = parallel_state.get_tensor_model_parallel_size()
        self.tp_rank = parallel_state.get_tensor_model_parallel_rank()
        self.sequence_parallel = sequence_parallel and self.tp > 1
        # Scattered sums come back from NxD in whatever dtype they were made in; only plain ones are lost.
        self._reduce_dtype = torch.float32 if self.sequence_parallel and dtype == torch.bfloat16 else dtype
        self._dim = 0 if self.sequence_parallel else None

    def embedding(self, rows: int, width: int) -> nn.Module:
        """Rows of the vocabulary are cut."""
        return self._layers.ParallelEmbedding(
            rows,
            width,
            device=META,
            dtype=self._dtype,
            shard_across_embedding=False,
            sequence_parallel_enabled=self.sequence_parallel,
        )

    def column(self, width: int, out: int, *, stacked: int = 1) -> nn.Module:
        """Outputs are cut and stay where they are."""
        return self._layers.ColumnParallelLinear(
            width,
            out,
            bias=False,
            gather_output=False,
            dtype=self._dtype,
            device=META,
            stride=stacked,
            sequence_parallel_enabled=self.sequence_parallel,
            sequence_dimension=self._dim,
            reduce_dtype=self._reduce_dtype,
        )

    def row(self, width: int, out: int) -> nn.Module:
        """Inputs are cut already."""
        return self._layers.RowParallelLinear(
            width,
            out,
            bias=False,
            input_is_parallel=True,
            dtype=self._dtype,
            device=META,
            sequence_parallel_enabled=self.sequence_parallel,
            sequence_dimension=self._dim,
            reduce_dtype=self._reduce_dtype,
        )

    def qkv(self, width: int, q_out: int, kv_out: int, *, copies: int, fused: bool) -> nn.Module:
        """NxD's GQA layer, which sums the gradients of a key/value head over the ranks that have it."""
        return self._qkv_linear.GQAQKVColumnParallelLinear(
            width,
            [q_out, kv_out],
            bias=False,
            gather_output=False,
            dtype=self._dtype,
            device=META,
            sequence_parallel_enabled=self.sequence_parallel,
            kv_size_multiplier=copies,
            fuse_qkv=fused,
            reduce_dtype=self._reduce_dtype,
        )
