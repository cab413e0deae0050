"""ZeRO-1 optimizer as in NxD: each data-parallel rank updates a range of rows of every tensor.

A tensor is padded with rows of zeros to a multiple of the data-parallel degree and split along its rows
(`lt_ckpt.nxd.zero1.shard_rows`). Per step, in this order:

1. partial gradients are summed: norms over tensor-parallel ranks under sequence parallelism, replicated key/value
   heads over the ranks that hold them, a tied embedding over the first and the last stage;
2. gradients are summed over data-parallel ranks, and each rank keeps its rows;
3. the norm is computed over all ranks, each model element counted once (or, as in NxD, each replica of a head), and
   gradients are clipped;
4. the optimizer's update of the fp32 (float64) master weights;
5. the rows of the master weights are gathered and rounded into the layers' weights.

If the loss or the norm is not finite, 4 changes nothing.

Cost: fp32 gradients, master weights and slots besides the weights, the last two divided by the data-parallel degree.
The sum over data-parallel ranks is an all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lt_ckpt.nxd.zero1 import shard_rows
from lt_model import LlamaConfig, param_specs
from lt_trainer.config.optimizer_section import OptimizerOptions
from lt_trainer.optimizers import optimizer_spec
from lt_trainer.optimizers.driver import OptimizerDriver
from lt_trainer.optimizers.spec import ParamSlice
from lt_trainer_neuron.compute_backend import MASTER_WEIGHTS, RowSlice
from lt_trainer_neuron.cpu.collectives import all_gather, all_reduce_sum
from lt_trainer_neuron.cpu.process_groups import ProcessGroups
from lt_trainer_neuron.grid import Grid
from lt_trainer_neuron.tensor_slices import EMBED, HEAD, TensorSlice, intersect_rows


@dataclass(frozen=True, kw_only=True)
class RowRange:
    """Rows of a tensor that this rank updates, without padding."""

    start: int
    n_rows: int


class Zero1Optimizer:
    """ZeRO-1 optimizer of one rank.

    Args:
        config: model configuration.
        weights: layer weights by NxD's key.
        tensor_slices: slices of model tensors in each weight.
        decay_params: names of the model tensors with weight decay.
        options: the recipe's `[optimizer]`.
        grid: this rank's coordinates.
        groups: process groups of this rank.
        zero1: split the rows over data-parallel ranks; else each rank updates all rows.
        sequence_parallel: norm gradients cover only this rank's positions.
        count_replicas: count each replica of a key/value head in the gradient norm.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: Mapping[str, Tensor],
        tensor_slices: Mapping[str, tuple[TensorSlice, ...]],
        decay_params: set[str],
        options: OptimizerOptions,
        *,
        grid: Grid,
        groups: ProcessGroups,
        zero1: bool,
        sequence_parallel: bool,
        count_replicas: bool,
    ) -> None:
        self._options, self._grid, self._groups = options, grid, groups
        self._zero1, self._sequence_parallel, self._count_replicas = zero1, sequence_parallel, count_replicas
        # A tied head on the only stage is the embedding: one tensor, one slot.
        self._weights = {
            key: weight for key, weight in weights.items() if key != HEAD or weight is not weights.get(EMBED)
        }
        self._tensor_slices = tensor_slices
        self._gradients: dict[str, Tensor] = {}
        self._rows: dict[str, RowRange] = {}
        self.master_weights: dict[str, Tensor] = {}
        params: dict[str, ParamSlice] = {}
        specs = {spec.name: spec for spec in param_specs(config)}
        for key, weight in self._weights.items():
            start, n_rows, n_stored = shard_rows(weight.shape[0], *((grid.dp, grid.dp_rank) if zero1 else (1, 0)))
            self._rows[key] = RowRange(start=start, n_rows=n_rows)
            self.master_weights[key] = torch.zeros(
                (n_stored, *weight.shape[1:]), dtype=torch.promote_types(weight.dtype, torch.float32)
            )
            slices = tensor_slices[key]
            params[key] = ParamSlice(
                specs=tuple(specs[tensor_slice.name] for tensor_slice in slices),
                offset=(start, *(0,) * (weight.ndim - 1)),
                decay=slices[0].name in decay_params,
            )
        self._driver = OptimizerDriver(optimizer_spec(options.name), options, params, self.master_weights)
        self.step_count = self._driver.step_count

    @property
    def state_groups(self) -> dict[str, dict[str, RowSlice]]:
        """Master weights and slots, as `ComputeBackend.optimizer_state`."""
        return {
            group: {
                key: RowSlice(stored=tensor, n_rows=self._rows[key].n_rows, start_row=self._rows[key].start)
                for key, tensor in tensors.items()
            }
            for group, tensors in {MASTER_WEIGHTS: self.master_weights, **self._driver.slots}.items()
        }

    @torch.no_grad()
    def accumulate_gradients(self) -> None:
        """Accumulate the weights' gradients in fp32 or wider, and reset them."""
        for key, weight in self._weights.items():
            assert weight.grad is not None, f"{key} has no gradient"
            if key in self._gradients:
                self._gradients[key] += weight.grad
            else:
                self._gradients[key] = weight.grad.to(self.master_weights[key].dtype)
            weight.grad = None

    @torch.no_grad()
    def step(self, loss: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        """Run the optimizer step; `loss` is this rank's share of the global loss.

        Returns:
            Loss of the global batch and its gradient norm before clipping.
        """
        gradients = {key: self._reduce_gradient(key, gradient) for key, gradient in self._gradients.items()}
        self._gradients.clear()
        both = all_reduce_sum(torch.stack((loss, self._local_squared_norm(gradients))), self._groups.world)
        loss, norm = both[0], both[1].sqrt()
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        max_norm = self._options.grad_clip
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm > 0 else None
        self._driver.step(self.master_weights, gradients, lr, finite, scale)
        self.sync_model_params()
        return loss, norm

    def _reduce_gradient(self, key: str, gradient: Tensor) -> Tensor:
        """Return this rank's rows of the global batch's gradient, with padding."""
        slices = self._tensor_slices[key]
        if self._sequence_parallel and gradient.ndim == 1:
            gradient = all_reduce_sum(gradient, self._groups.tp)
        for tensor_slice in slices:
            if _is_replicated_kv_head(tensor_slice):
                rows = slice(tensor_slice.start_row, tensor_slice.start_row + tensor_slice.shape[0])
                gradient[rows] = all_reduce_sum(gradient[rows], self._groups.kv_heads)
        if len({stage for stage, _ in slices[0].replicas}) > 1:
            gradient = all_reduce_sum(gradient, self._groups.embedding)
        gradient = all_reduce_sum(gradient, self._groups.dp)
        rows = self._rows[key]
        padded = torch.zeros_like(self.master_weights[key])
        padded[: rows.n_rows] = gradient[rows.start : rows.start + rows.n_rows]
        return padded

    def _local_squared_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the sum of squares of the gradient elements this rank counts, float64."""
        squares = torch.zeros((), dtype=torch.float64)
        if not self._zero1 and self._grid.dp_rank:
            return squares
        for key, gradient in gradients.items():
            rows = self._rows[key]
            for tensor_slice in self._tensor_slices[key]:
                count_replica = self._count_replicas and _is_replicated_kv_head(tensor_slice)
                counted = (
                    intersect_rows(tensor_slice, rows.start, rows.n_rows)
                    if count_replica or tensor_slice.replica_index(self._grid) == 0
                    else None
                )
                if counted is not None:
                    part = gradient[counted.start_row : counted.start_row + counted.shape[0]]
                    squares += part.to(torch.float64).square().sum()
        return squares

    @torch.no_grad()
    def sync_model_params(self) -> None:
        """Gather the master weights and round them into the layers' weights."""
        for key, weight in self._weights.items():
            rows = self.master_weights[key].to(weight.dtype)
            gathered = all_gather(rows, self._groups.dp, dim=0) if self._zero1 else rows
            weight.copy_(gathered[: weight.shape[0]])


def _is_replicated_kv_head(tensor_slice: TensorSlice) -> bool:
    return len(tensor_slice.replicas) > 1 and tensor_slice.name.endswith(("k_proj.weight", "v_proj.weight"))
