"""Optimizer of one rank of the GPU engine: any `OptimizerSpec`, and AdamW by fused kernels.

Other optimizers run their spec's pure update per tensor. AdamW has two fast paths, tested against the pure one:

- moments in the dtype of the weights: torch's fused kernel;
- moments in bfloat16 (8 instead of 12 bytes of state and weights per parameter): foreach operations that upcast them,
  update and use them in the weights' dtype, and round them to nearest when they are stored.

The host never reads whether a step takes effect: torch's kernel takes it as `found_inf`; on the other path the factors
become 1 and 0.

Cost: with bfloat16 moments temporaries of about `BUCKET_NUMEL` elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lt_trainer.optimizers import ADAMW
from lt_trainer.optimizers.adamw import FIRST_MOMENT, SECOND_MOMENT
from lt_trainer.optimizers.driver import OptimizerDriver

_torch: Any = torch  # its functions on lists of tensors have no types
BUCKET_NUMEL = 1 << 25
"""Elements updated at a time if moments are narrower than the weights."""
CHUNK_NUMEL = 1 << 20
"""Elements updated at a time if only gradients are narrower: few enough for a CPU's cache."""


@dataclass(frozen=True, kw_only=True)
class ParamUpdate:
    """Arguments of one AdamW step on one parameter's slice."""

    weight: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor


class GpuOptimizer(OptimizerDriver):
    """Optimizer state and step of this rank's weight slices."""

    @torch.no_grad()
    def step(
        self,
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        lr: Tensor | float,
        finite: Tensor,
        scale: Tensor | None = None,
    ) -> None:
        """Update weights and slots in place if `finite`, else change nothing.

        Arguments are those of `OptimizerDriver.step`.
        """
        if self.spec is not ADAMW:
            super().step(weights, gradients, lr, finite, scale)
            return
        first, second = self.slots[FIRST_MOMENT], self.slots[SECOND_MOMENT]
        assert weights.keys() == gradients.keys() == first.keys()
        has_bf16_moments = self.options.moments_dtype == "bfloat16"
        update = self._step_bf16_moments if has_bf16_moments else self._step_fused
        step = (self.step_count + 1).to(torch.float32)
        for decay in (True, False):
            rows = [
                ParamUpdate(weight=weight, gradient=gradients[name], first=first[name], second=second[name])
                for name, weight in weights.items()
                if self.params[name].decay is decay
            ]
            if not rows:
                continue
            weight_decay = self.options.weight_decay if decay else 0.0
            upcast = rows[0].gradient.dtype != rows[0].weight.dtype
            if upcast and not has_bf16_moments and rows[0].weight.device.type == "cpu":
                rows = [chunk for row in rows for chunk in _split_chunks(row)]
            buckets = (
                _split_buckets(rows, BUCKET_NUMEL if has_bf16_moments else CHUNK_NUMEL)
                if has_bf16_moments or upcast
                else [rows]
            )
            for bucket in buckets:
                update(_scale_gradients(bucket, scale), lr, weight_decay, finite, step)
        self.step_count.add_(finite.to(self.step_count.dtype))

    def _step_fused(
        self, rows: list[ParamUpdate], lr: Tensor | float, weight_decay: float, finite: Tensor, step: Tensor
    ) -> None:
        _torch._fused_adamw_(
            [row.weight for row in rows],
            [row.gradient for row in rows],
            [row.first for row in rows],
            [row.second for row in rows],
            [],
            [step] * len(rows),
            lr=lr,
            beta1=self.options.beta1,
            beta2=self.options.beta2,
            weight_decay=weight_decay,
            eps=self.options.eps,
            amsgrad=False,
            maximize=False,
            found_inf=(~finite).to(torch.float32),
        )

    def _step_bf16_moments(
        self, rows: list[ParamUpdate], lr: Tensor | float, weight_decay: float, finite: Tensor, step: Tensor
    ) -> None:
        beta1, beta2, wide = self.options.beta1, self.options.beta2, rows[0].weight.dtype
        on, step = finite.to(wide), step.to(wide)
        weights, gradients = [row.weight for row in rows], [row.gradient for row in rows]
        for gradient in gradients:
            gradient.masked_fill_(~finite, 0)  # nan times 0 is nan
        first = [row.first.to(wide) for row in rows]
        second = [row.second.to(wide) for row in rows]
        _torch._foreach_mul_(first, 1 - on * (1 - beta1))
        _torch._foreach_add_(first, _torch._foreach_mul(gradients, on * (1 - beta1)))
        squares = _torch._foreach_mul(gradients, gradients)
        _torch._foreach_mul_(squares, on * (1 - beta2))
        _torch._foreach_mul_(second, 1 - on * (1 - beta2))
        _torch._foreach_add_(second, squares)
        for row, m, v in zip(rows, first, second, strict=True):
            row.first.copy_(m)
            row.second.copy_(v)
        _torch._foreach_mul_(second, 1 / (1 - beta2**step))
        _torch._foreach_sqrt_(second)
        _torch._foreach_add_(second, self.options.eps)
        _torch._foreach_div_(first, second)
        _torch._foreach_mul_(first, on * (-lr / (1 - beta1**step)))
        _torch._foreach_mul_(weights, 1 - on * (lr * weight_decay))
        _torch._foreach_add_(weights, first)


def _scale_gradients(rows: list[ParamUpdate], scale: Tensor | None) -> list[ParamUpdate]:
    """Return the rows with their gradients in the weights' dtype, times `scale`."""
    wide = rows[0].weight.dtype
    rows = [replace(row, gradient=row.gradient.to(wide)) for row in rows]
    if scale is not None:
        _torch._foreach_mul_([row.gradient for row in rows], scale.to(wide))
    return rows


def _split_chunks(row: ParamUpdate) -> Iterator[ParamUpdate]:
    """Yield a large row in chunks of `CHUNK_NUMEL` elements."""
    tensors = (row.weight, row.gradient, row.first, row.second)
    for chunks in zip(*(tensor.view(-1).split(CHUNK_NUMEL) for tensor in tensors), strict=True):
        weight, gradient, first, second = chunks
        yield ParamUpdate(weight=weight, gradient=gradient, first=first, second=second)


def _split_buckets(rows: list[ParamUpdate], size: int) -> Iterator[list[ParamUpdate]]:
    """Yield the rows in groups of about `size` elements."""
    bucket: list[ParamUpdate] = []
    for row in rows:
        bucket.append(row)
        if sum(one.weight.numel() for one in bucket) >= size:
            yield bucket
            bucket = []
    if bucket:
        yield bucket
