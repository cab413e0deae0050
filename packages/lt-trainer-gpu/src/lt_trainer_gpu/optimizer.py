"""Optimizer of one rank of the GPU engine: any `OptimizerSpec`, and AdamW by torch's fused kernel.

Other optimizers run their spec's pure update per tensor. The kernel needs weights, gradients and moments of one dtype.
Where all have it, as with float32 gradients and moments, AdamW is one call per group of equal weight decay and learning
rate. Where gradients or moments are in bfloat16, they are upcast in buckets of limited size (large
parameters are split along their rows), and moments are rounded to nearest when they are stored. Weights in bfloat16
(`optimizer.weights_dtype`) are upcast too and rounded stochastically. Tested against the pure update.

The host never reads whether a step takes effect: the kernel takes that as `found_inf`, and the clipping factor as
`grad_scale`, by which it divides. Its `grad_scale` is float32, so float64 gradients are scaled in a pass of their own.

With `engine.gpu.optimizer_offload` the slots are in host memory and come to the device in chunks
(optimizer_offload.py).

Cost: one pass over weights, gradients and moments; temporaries of at most `DEVICE_TEMPORARY_BYTES`, on a CPU
`CPU_TEMPORARY_BYTES`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lt_trainer.optimizers.adamw import ADAMW, FIRST_MOMENT, SECOND_MOMENT
from lt_trainer.optimizers.driver import OptimizerDriver, Tensors

_torch: Any = torch  # its functions on lists of tensors have no types
DEVICE_TEMPORARY_BYTES = 256 * 2**20
"""Temporaries of an update on a GPU: few calls; 2**26 elements a call if only gradients are upcast, to float32."""
FUSED_DEVICE_TYPES = ("cuda", "cpu")
"""Device types with torch's fused kernel, as tested; others take the pure update."""
CPU_TEMPORARY_BYTES = 4 * 2**20
"""Temporaries of an update on a CPU: few enough for its cache."""


@dataclass(frozen=True, kw_only=True)
class ParamUpdate:
    """Arguments of one AdamW step on rows of one parameter's slice.

    Attributes:
        name: the parameter.
        start_row: first of the rows in the slice.
        dtype: dtype of the update; narrower tensors are upcast.
        weight: rows of the weight.
        gradient: rows of the gradient.
        first: rows of the first moment.
        second: rows of the second moment.
    """

    name: str
    start_row: int
    dtype: torch.dtype
    weight: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor

    def upcast_bytes(self) -> int:
        """Return the bytes per element of the temporaries."""
        tensors = (self.weight, self.gradient, self.first, self.second)
        return sum(one.dtype != self.dtype for one in tensors) * self.dtype.itemsize

    def slot_bytes(self) -> int:
        """Return the bytes per element of the moments."""
        return self.first.itemsize + self.second.itemsize

    def rows(self, start: int, end: int) -> ParamUpdate:
        """Return the update of these rows."""
        return replace(
            self,
            start_row=self.start_row + start,
            weight=self.weight[start:end],
            gradient=self.gradient[start:end],
            first=self.first[start:end],
            second=self.second[start:end],
        )


GroupKey = tuple[bool, float]
"""Weight decay or not, and the factor of the learning rate, of updates that share a call."""
Groups = Mapping[GroupKey, list[ParamUpdate]]


class GpuOptimizer(OptimizerDriver):
    """Optimizer state and step of this rank's weight slices, all of it on the device."""

    def wait_for_slots(self) -> None:
        """Wait until the slots can be read on the host; those on the device are in the order of its stream."""

    def iter_on_device(self, groups: Groups) -> Iterable[tuple[GroupKey, list[ParamUpdate]]]:
        """Return the groups; a subclass may yield parts of them, and go on when a part has been updated."""
        return groups.items()

    @torch.no_grad()
    def step(
        self, weights: Tensors, gradients: Tensors, lr: Tensor | float, finite: Tensor, scale: Tensor | None = None
    ) -> None:
        """Update what AdamW updates by the fused kernel, the rest by its pure update; see `OptimizerDriver.step`."""
        assert weights.keys() == gradients.keys()
        self.step_count.add_(finite)
        has_kernel = self.device_type in FUSED_DEVICE_TYPES
        others = {name: weights[name] for name, spec in self.specs.items() if spec is not ADAMW or not has_kernel}
        if others:
            self.update(others, gradients, lr, finite, scale)
        groups: dict[GroupKey, list[ParamUpdate]] = defaultdict(list)
        for name in [name for name in weights if name not in others]:
            update = ParamUpdate(
                name=name,
                start_row=0,
                dtype=self.update_dtype,
                weight=weights[name],
                gradient=gradients[name],
                first=self.slots[FIRST_MOMENT][name],
                second=self.slots[SECOND_MOMENT][name],
            )
            groups[self.params[name].decay, self.params[name].lr_scale].append(update)
        # Once for all buckets: each is a kernel.
        count = self.step_count.to(torch.float32)
        scalars = {
            "found_inf": torch.logical_not(finite, out=torch.empty_like(count)),
            "grad_scale": None if scale is None else torch.reciprocal(scale, out=torch.empty_like(count)),
        }
        max_bytes = CPU_TEMPORARY_BYTES if self.device_type == "cpu" else DEVICE_TEMPORARY_BYTES
        for (decay, lr_scale), updates in self.iter_on_device(groups):
            weight_decay = self.options.weight_decay if decay else 0.0
            for bucket in split_buckets(updates, max_bytes, ParamUpdate.upcast_bytes):
                self._step_fused(
                    bucket,
                    count,
                    scale,
                    lr=lr if lr_scale == 1 else lr * lr_scale,
                    weight_decay=weight_decay,
                    **scalars,
                )

    def _step_fused(self, rows: list[ParamUpdate], count: Tensor, scale: Tensor | None, **scalars: Any) -> None:
        wide = rows[0].dtype
        weights, gradients = upcast([row.weight for row in rows], wide), upcast([row.gradient for row in rows], wide)
        first, second = upcast([row.first for row in rows], wide), upcast([row.second for row in rows], wide)
        if scale is not None and wide != torch.float32:
            _torch._foreach_mul_(gradients, scale.to(wide))
            scalars["grad_scale"] = None
        _torch._fused_adamw_(
            weights,
            gradients,
            first,
            second,
            [],
            [count] * len(rows),
            beta1=self.options.beta1,
            beta2=self.options.beta2,
            eps=self.options.eps,
            amsgrad=False,
            maximize=False,
            **scalars,
        )
        for row, weight, m, v in zip(rows, weights, first, second, strict=True):
            if weight is not row.weight:
                self.store_weight(row.name, row.weight, weight, row.start_row)
            if m is not row.first:
                row.first.copy_(m)
                row.second.copy_(v)


def upcast(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the tensors, those of another dtype copied to this one by as few kernels as they fit in."""
    narrow = [tensor for tensor in tensors if tensor.dtype != dtype]
    wide = [torch.empty_like(tensor, dtype=dtype) for tensor in narrow]
    if narrow:
        _torch._foreach_copy_(wide, narrow)
    copies = iter(wide)
    return [tensor if tensor.dtype == dtype else next(copies) for tensor in tensors]


def split_buckets(
    rows: Iterable[ParamUpdate], max_bytes: int, element_bytes: Callable[[ParamUpdate], int]
) -> Iterator[list[ParamUpdate]]:
    """Yield the updates in buckets of at most `max_bytes`, but at least one row.

    What has no such bytes is one bucket. Vectors are not split: what does not fill the registers of a CPU is rounded
    differently.

    Args:
        rows: the updates.
        max_bytes: most bytes of a bucket.
        element_bytes: bytes that an element of an update has, such as those of its temporaries.
    """
    bucket: list[ParamUpdate] = []
    room = max_bytes
    for update in rows:
        n_rows = update.weight.shape[0]
        row_bytes = element_bytes(update) * update.weight.numel() // max(1, n_rows)
        start = 0
        while start < n_rows:
            n_taken = min(n_rows - start, room // row_bytes) if row_bytes else n_rows
            fewest = n_rows if update.weight.ndim == 1 else 1
            if n_taken < fewest and bucket:
                yield bucket
                bucket, room = [], max_bytes
                continue
            n_taken = max(fewest, n_taken)
            bucket.append(update if n_taken == n_rows else update.rows(start, start + n_taken))
            start += n_taken
            room -= n_taken * row_bytes
    if bucket:
        yield bucket
