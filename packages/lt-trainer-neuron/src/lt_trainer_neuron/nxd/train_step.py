"""Training step on a lazy device: accumulate gradients, sum over ranks, clip, optimizer step.

Nothing here waits for the device.

Two graphs serve every step: one of a micro-batch (forward, backward, accumulate), run once per micro-batch, and one of
the optimizer step. With `single_graph` they are one graph, which grows with the number of micro-batches: for few it
saves launches, for many it cannot be compiled. (With pipeline stages a micro-batch is several graphs: `pipeline`.) All
tensors that a graph reads or writes are allocated at the start: gradients are accumulated into memory that the
optimizer step zeroes, so the first micro-batch is not a special case.

ZeRO-1 splits each tensor of a rank along its rows over the data-parallel ranks, padded with rows of zeros (NxD's
shards): gradients are reduce-scattered, the rows of the master weights updated, the weights gathered and cast. The loss
was divided by the tokens of the global batch, so gradients are summed and not averaged.

The norm counts every parameter of the model once: a replicated tensor is counted by its first rank.

A tied embedding is on the first and on the last stage, and each has a partial gradient. They are summed over all
stages, of which the others contribute zeros: that needs no process groups besides NxD's. The sum has a graph of its
own, since a compiler may order the operations of a graph differently on different stages.

Cost: per step and parameter one reduce-scatter and one all-gather over the data-parallel ranks; all-reduces of two
numbers; for an embedding tied across stages one more all-reduce, and on the stages between a gradient of zeros. Memory:
gradients, master weights and slots as in `DtypePolicy`, the last two sharded by ZeRO-1 (gradients are not).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lt_ckpt.nxd.zero1 import shard_rows
from lt_trainer.config.optimizer_section import OptimizerOptions
from lt_trainer.optimizers import optimizer_spec
from lt_trainer.optimizers.driver import OptimizerDriver
from lt_trainer.optimizers.spec import ParamSlice
from lt_trainer_neuron.grid import Grid
from lt_trainer_neuron.nxd.collectives import Collectives
from lt_trainer_neuron.nxd.device import TensorDevice

if TYPE_CHECKING:
    from lt_model import ParamSpec
    from lt_trainer_neuron.nxd.pipeline import PipelineSchedule


@dataclass(frozen=True, kw_only=True)
class DtypePolicy:
    """Dtypes of a run in torch.

    Attributes:
        compute_dtype: dtype of the layers' weights and computation.
        master_dtype: dtype of master weights, slots and accumulated gradients.
        upcast_dtype: dtype of norms, softmax and the loss.
    """

    compute_dtype: torch.dtype
    master_dtype: torch.dtype
    upcast_dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class LocalWeight:
    """Weight tensor of a rank, with optimizer metadata.

    Attributes:
        parameter: parameter of the layers.
        specs: specs of the model parameters in it, concatenated along the rows.
        decay: whether weight decay applies.
        norm_row_ranges: row ranges (begin, end) whose gradient this rank counts in the norm.
        reduce_grad_over_tp: each tensor-parallel rank has a partial gradient (norms and
            biases under sequence parallelism, norms of single heads).
    """

    parameter: nn.Parameter
    specs: tuple[ParamSpec, ...]
    decay: bool
    norm_row_ranges: tuple[tuple[int, int], ...]
    reduce_grad_over_tp: bool = False


class TrainStep:
    """Training step of one rank.

    Args:
        weights: this rank's distinct tensors by NxD's key.
        options: the recipe's `[optimizer]`.
        dtype_policy: dtypes.
        device: tensor device.
        collectives: collectives over the mesh axes.
        grid: this rank's coordinates.
        zero1: shard the optimizer's tensors over data-parallel ranks.
        single_graph: one graph per step.
        tied_embedding: key of the tied embedding (on the last stage, of the head) and its shape, if stages have
            partial gradients of it; on stages without it the key is not in `weights`.
    """

    def __init__(
        self,
        weights: Mapping[str, LocalWeight],
        options: OptimizerOptions,
        *,
        dtype_policy: DtypePolicy,
        device: TensorDevice,
        collectives: Collectives,
        grid: Grid,
        zero1: bool,
        single_graph: bool = False,
        tied_embedding: tuple[str, tuple[int, ...]] | None = None,
    ) -> None:
        self._weights, self._options, self._dtype_policy = weights, options, dtype_policy
        self._tied_embedding = tied_embedding
        self._device, self._collectives, self._grid, self._single_graph = device, collectives, grid, single_graph
        self._is_sharded = zero1 and grid.dp > 1
        self._weights_are_master = not self._is_sharded and dtype_policy.compute_dtype == dtype_policy.master_dtype
        """The optimizer updates the layers' weights directly."""
        self.master_weights: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}
        with torch.no_grad():
            for key, weight in weights.items():
                parameter = weight.parameter
                gradient = torch.zeros_like(parameter, dtype=dtype_policy.master_dtype)
                self._gradients[key] = gradient
                if dtype_policy.compute_dtype == dtype_policy.master_dtype:
                    parameter.grad = gradient  # autograd accumulates in place
                self.master_weights[key] = (
                    parameter if self._weights_are_master else torch.zeros_like(self._new_shard(gradient))
                )
        params = {
            key: ParamSlice(
                specs=weight.specs,
                offset=(self._start_row(weight.parameter), *(0,) * (weight.parameter.ndim - 1)),
                decay=weight.decay,
            )
            for key, weight in weights.items()
        }
        self.optimizer = OptimizerDriver(optimizer_spec(options.name), options, params, self.master_weights)
        self._loss = torch.zeros((), dtype=dtype_policy.upcast_dtype, device=device.torch_device)
        device.mark_step()  # makes the new tensors data of the first graph, as in all later graphs

    @property
    def is_sharded(self) -> bool:
        """True if ZeRO-1 shards the optimizer's tensors."""
        return self._is_sharded

    def _start_row(self, tensor: Tensor) -> int:
        return shard_rows(tensor.shape[0], self._grid.dp, self._grid.dp_rank)[0] if self._is_sharded else 0

    def _new_shard(self, tensor: Tensor) -> Tensor:
        """Return an empty tensor shaped as this rank's padded rows; without ZeRO-1, `tensor` itself."""
        if not self._is_sharded:
            return tensor
        _, _, n_stored = shard_rows(tensor.shape[0], self._grid.dp, self._grid.dp_rank)
        return tensor.new_empty((n_stored, *tensor.shape[1:]))

    @torch.no_grad()
    def sync_model_params(self) -> None:
        """Copy the master weights, gathered and cast, into the layers' weights."""
        self._copy_master_weights()
        self._device.mark_step()

    def _copy_master_weights(self) -> None:
        for key, weight in self._weights.items() if not self._weights_are_master else ():
            rows = self.master_weights[key].to(weight.parameter.dtype)
            whole = self._collectives.all_gather(rows, "dp") if self._is_sharded else rows
            weight.parameter.copy_(whole[: weight.parameter.shape[0]])

    def forward_backward(
        self, schedule: PipelineSchedule, micro_batches: Iterable[Tensor], n_micro_batches: int, valid_tokens: int
    ) -> Tensor:
        """Run forward and backward of every micro-batch.

        Args:
            schedule: schedule that runs them.
            micro_batches: micro-batches on the device, made as they are asked for; their copies may be in flight.
            n_micro_batches: number of them.
            valid_tokens: number of valid tokens of the global batch.

        Returns:
            This rank's summed cross-entropy divided by `valid_tokens`, a scalar on the device.
        """
        valid = self._device.scalar_tensor(valid_tokens, self._dtype_policy.upcast_dtype)

        def on_micro_batch_end(cross_entropy: Tensor) -> None:
            with torch.no_grad():
                self._loss.add_(cross_entropy.to(self._loss.dtype))
                if self._dtype_policy.compute_dtype != self._dtype_policy.master_dtype:
                    for key, weight in self._weights.items():
                        if weight.parameter.grad is not None:
                            self._gradients[key].add_(weight.parameter.grad.to(self._dtype_policy.master_dtype))
                            weight.parameter.grad = None
            if not self._single_graph:
                self._device.mark_step()

        schedule.forward_backward(micro_batches, n_micro_batches, valid, on_micro_batch_end)
        return self._loss / valid

    @torch.no_grad()
    def optimizer_step(self, loss: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        """Reduce and clip gradients, run the optimizer, zero the gradients.

        Returns:
            Loss of the global batch and its gradient norm before clipping.
        """
        if self._tied_embedding:
            self._all_reduce_tied_gradient(*self._tied_embedding)
        gradients = {key: self._reduce_gradient(key, weight) for key, weight in self._weights.items()}
        loss, norm = self._all_reduce_loss_and_norm(loss, gradients)
        max_norm = self._options.grad_clip
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm > 0 else torch.ones_like(norm)
        self.optimizer.step(
            self.master_weights,
            gradients,
            self._device.scalar_tensor(lr, self._dtype_policy.master_dtype),
            torch.isfinite(loss) & torch.isfinite(norm),
            scale.to(self._dtype_policy.master_dtype),
        )
        for gradient in self._gradients.values():
            gradient.zero_()
        self._loss.zero_()
        self._copy_master_weights()
        return loss, norm

    def _all_reduce_tied_gradient(self, key: str, shape: tuple[int, ...]) -> None:
        """Sum the partial gradients of the tied embedding over all stages."""
        self._device.mark_step()
        gradient = self._gradients.get(key)
        if gradient is None:
            zeros = torch.zeros(shape, dtype=self._dtype_policy.master_dtype, device=self._device.torch_device)
            result = self._collectives.all_reduce_sum(zeros, "pp")
        else:
            result = gradient.copy_(self._collectives.all_reduce_sum(gradient, "pp"))
        self._device.mark_step()
        del result  # kept until here: unreferenced results are dropped from the graph

    def _reduce_gradient(self, key: str, weight: LocalWeight) -> Tensor:
        """Return the gradient of this rank's rows, summed over all ranks with a partial gradient."""
        gradient = self._gradients[key]
        if weight.reduce_grad_over_tp:
            gradient = self._collectives.all_reduce_sum(gradient, "tp")
        if self._is_sharded:
            rows = gradient.shape[0]
            _, _, n_stored = shard_rows(rows, self._grid.dp, self._grid.dp_rank)
            padding = [0, 0] * (gradient.ndim - 1) + [0, n_stored * self._grid.dp - rows]
            gradient = self._collectives.reduce_scatter(F.pad(gradient, padding), "dp")
        else:
            gradient = self._collectives.all_reduce_sum(gradient, "dp")
        return gradient

    def _all_reduce_loss_and_norm(self, loss: Tensor, gradients: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the loss and the gradient norm over all ranks."""
        wide = self._dtype_policy.upcast_dtype
        squares = torch.zeros((), dtype=wide, device=loss.device)
        for key, weight in self._weights.items():
            for begin, end in self._iter_norm_row_ranges(key, weight):
                squares = squares + gradients[key][begin:end].to(wide).square().sum()
        reports_loss = self._grid.tp_rank == 0 and self._grid.is_last_stage
        both = torch.stack((loss.to(wide) if reports_loss else torch.zeros_like(squares), squares))
        for axis in ("dp", "tp", "pp"):
            counted_already = axis == "dp" and not self._is_sharded
            summed = self._collectives.all_reduce_sum(both, axis)
            both = torch.stack((summed[0], both[1])) if counted_already else summed
        return both[0], both[1].sqrt()

    def _iter_norm_row_ranges(self, key: str, weight: LocalWeight) -> Iterator[tuple[int, int]]:
        """Yield the ranges of this rank's rows that it counts in the norm."""
        if not self._is_sharded:
            yield from weight.norm_row_ranges
            return
        start_row, n_rows, _ = shard_rows(weight.parameter.shape[0], self._grid.dp, self._grid.dp_rank)
        for begin, end in weight.norm_row_ranges:
            begin, end = max(begin, start_row), min(end, start_row + n_rows)
            if begin < end:
                yield begin - start_row, end - start_row
