"""Layer factories of the model: torch's own for a single rank, or NxD's parallel layers.

NxD 0.18 sums the input gradient of its column-parallel layers in `reduce_dtype`, float32 by default, by casting into a
temporary tensor and dropping it: with bf16 weights and no sequence parallelism the sum over tensor-parallel ranks is
silently lost. So `reduce_dtype` is always the weights' dtype where sums are not reduce-scattered; a release of NxD
without the option ends with Python's TypeError.

Layers are created on the meta device; the caller allocates and fills them.

Cost: none.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

META = torch.device("meta")


class LayerFactory:
    """Factory of parallel layers, here torch's own for a single rank; weights are `[out, in]`.

    Args:
        dtype: dtype of weights and computation.
        upcast_dtype: dtype of norms, softmax and soft-caps.
    """

    tp, tp_rank = 1, 0
    sequence_parallel = False
    """If set, positions are sharded over tensor-parallel ranks between layers, and tensors are [T, B, D]."""

    def __init__(self, dtype: torch.dtype, upcast_dtype: torch.dtype) -> None:
        self.dtype, self.upcast_dtype = dtype, upcast_dtype

    def sum_over_tp(self, x: Tensor) -> Tensor:
        """Return the sum over tensor-parallel ranks, which each go on to use; its gradient is summed likewise."""
        return x

    def embedding(self, num_embeddings: int, embedding_dim: int) -> nn.Module:
        """Return an embedding sharded along the vocabulary.

        Maps token ids [B, T] to [B, T, D], or to [T/tp, B, D] under sequence parallelism.
        """
        return nn.Embedding(num_embeddings, embedding_dim, device=META, dtype=self.dtype)

    def column_parallel(
        self, in_features: int, out_features: int, *, n_stacked: int = 1, bias: bool = False
    ) -> nn.Module:
        """Return a linear layer sharded along its outputs.

        With `n_stacked` matrices concatenated along the rows, each is sharded separately.
        """
        return nn.Linear(in_features, out_features, bias=bias, device=META, dtype=self.dtype)

    def row_parallel(self, in_features: int, out_features: int, *, bias: bool = False) -> nn.Module:
        """Return a linear layer sharded along its inputs.

        Its output is summed over ranks, then the bias, whole on each of them, is added.
        """
        return nn.Linear(in_features, out_features, bias=bias, device=META, dtype=self.dtype)

    def qkv(
        self, in_features: int, q_out: int, kv_out: int, *, kv_size_multiplier: int, fuse_qkv: bool, bias: bool
    ) -> nn.Module:
        """Return NxD's GQA layer for q, k and v; each key/value head is on `kv_size_multiplier` ranks."""
        assert kv_size_multiplier == 1, "one rank has one copy"
        return QkvProjections(in_features, (q_out, kv_out, kv_out), self.dtype, fuse_qkv=fuse_qkv, bias=bias)


class QkvProjections(nn.Module):
    """Query, key and value projections of this rank, with the names of NxD's GQA layer."""

    def __init__(
        self, in_features: int, sizes: tuple[int, int, int], dtype: torch.dtype, *, fuse_qkv: bool, bias: bool
    ) -> None:
        super().__init__()
        self._sizes, self._has_bias = sizes, bias
        self._names = {"qkv": sum(sizes)} if fuse_qkv else dict(zip("qkv", sizes, strict=True))
        for name, out in self._names.items():
            for key, shape in {"weight": (out, in_features), **({"bias": (out,)} if bias else {})}.items():
                self.register_parameter(f"{key}_{name}", nn.Parameter(torch.empty(shape, dtype=dtype, device=META)))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values."""
        biases = self._split("bias") if self._has_bias else (None,) * 3
        return tuple(map(partial(nn.functional.linear, x), self._split("weight"), biases))

    def _split(self, key: str) -> tuple[Tensor, ...]:
        """Return weights or biases of queries, keys and values."""
        found = [getattr(self, f"{key}_{name}") for name in self._names]
        return tuple(found) if len(found) > 1 else found[0].split(self._sizes)


class NxdLayerFactory(LayerFactory):
    """NxD's parallel layers over its tensor-parallel group, which must be initialized.

    Args:
        dtype: dtype of weights and computation.
        upcast_dtype: dtype of norms, softmax and soft-caps.
        sequence_parallel: shard positions over the ranks between layers.
    """

    def __init__(self, dtype: torch.dtype, upcast_dtype: torch.dtype, *, sequence_parallel: bool) -> None:
        from neuronx_distributed.modules import qkv_linear
        from neuronx_distributed.parallel_layers import layers, mappings, parallel_state

        super().__init__(dtype, upcast_dtype)
        self._layers, self._qkv_linear, self._mappings = layers, qkv_linear, mappings
        self.tp = parallel_state.get_tensor_model_parallel_size()
        self.tp_rank = parallel_state.get_tensor_model_parallel_rank()
        self.sequence_parallel = sequence_parallel and self.tp > 1
        # NxD returns reduce-scattered sums in the dtype they were computed in; only all-reduced sums are lost.
        self._reduce_dtype = torch.float32 if self.sequence_parallel and dtype == torch.bfloat16 else dtype
        self._sequence_dim = 0 if self.sequence_parallel else None

    def sum_over_tp(self, x: Tensor) -> Tensor:
        """Return the sum over tensor-parallel ranks; its gradient is summed likewise."""
        summed = self._mappings.reduce_from_tensor_model_parallel_region(x)
        return self._mappings.copy_to_tensor_model_parallel_region(summed)

    def embedding(self, num_embeddings: int, embedding_dim: int) -> nn.Module:
        """Return an embedding sharded along the vocabulary."""
        return self._layers.ParallelEmbedding(
            num_embeddings,
            embedding_dim,
            device=META,
            dtype=self.dtype,
            shard_across_embedding=False,
            sequence_parallel_enabled=self.sequence_parallel,
        )

    def column_parallel(
        self, in_features: int, out_features: int, *, n_stacked: int = 1, bias: bool = False
    ) -> nn.Module:
        """Return a linear layer with sharded, ungathered outputs."""
        return self._layers.ColumnParallelLinear(
            in_features,
            out_features,
            bias=bias,
            gather_output=False,
            stride=n_stacked,
            dtype=self.dtype,
            device=META,
            sequence_parallel_enabled=self.sequence_parallel,
            sequence_dimension=self._sequence_dim,
            reduce_dtype=self._reduce_dtype,
        )

    def row_parallel(self, in_features: int, out_features: int, *, bias: bool = False) -> nn.Module:
        """Return a linear layer for inputs that are already sharded."""
        return self._layers.RowParallelLinear(
            in_features,
            out_features,
            bias=bias,
            input_is_parallel=True,
            dtype=self.dtype,
            device=META,
            sequence_parallel_enabled=self.sequence_parallel,
            sequence_dimension=self._sequence_dim,
            reduce_dtype=self._reduce_dtype,
        )

    def qkv(
        self, in_features: int, q_out: int, kv_out: int, *, kv_size_multiplier: int, fuse_qkv: bool, bias: bool
    ) -> nn.Module:
        """Return NxD's GQA layer.

        It sums the gradients of a key/value head over the ranks that hold it.
        """
        return self._qkv_linear.GQAQKVColumnParallelLinear(
            in_features,
            [q_out, kv_out],
            bias=bias,
            gather_output=False,
            kv_size_multiplier=kv_size_multiplier,
            fuse_qkv=fuse_qkv,
            dtype=self.dtype,
            device=META,
            sequence_parallel_enabled=self.sequence_parallel,
            reduce_dtype=self._reduce_dtype,
        )
