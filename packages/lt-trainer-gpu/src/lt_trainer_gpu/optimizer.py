"""AdamW on this rank's slices of the weights, which a tensor on the device can make a step without effect.

Moments in the weights' own dtype go through torch's fused kernel. Moments in bfloat16 halve what the optimizer holds
(fp32 weights: 8 instead of 12 bytes per parameter); they are widened, updated and used in the weights' dtype, and
rounded to nearest when they are put back. A moment that decays by less than half the distance between two bfloat16
numbers would never fall, so the recipe refuses such betas.

    m = b1 m + (1 - b1) g,    v = b2 v + (1 - b2) g^2,    w = w (1 - lr d) - lr m' / (sqrt(v') + eps)

with m' = m / (1 - b1^t), v' = v / (1 - b2^t) and t the steps that had an effect. What says "no effect" is never read
by the host: torch's kernel takes it as `found_inf`, and here the same comes of factors that are 1 and 0.

Cost: with bfloat16, temporaries of some `BUCKET` numbers; state is 2 numbers per parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from lt_trainer.sections import OptimizerOptions

_torch: Any = torch  # its functions on lists of tensors have no types
MOMENTS = ("exp_avg", "exp_avg_sq")
BUCKET = 1 << 25
"""Numbers that are updated at a time when moments are narrower than the weights."""
WIDENED = 1 << 20
"""Numbers that are updated at a time when only gradients are: little enough for a CPU's cache."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """What the optimizer keeps of one parameter's slice."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    decay: bool


@dataclass(frozen=True, kw_only=True)
class Row:
    """One parameter's slice in a step."""

    weight: Tensor
    gradient: Tensor
    slot: Slot


class AdamW:
    """See the module's text.

    Args:
        weights: slices by name; only their shapes, dtypes and devices matter.
        decays: names of those that decay.
        options: the recipe's `[optimizer]`.
    """

    def __init__(self, weights: Mapping[str, Tensor], decays: set[str], options: OptimizerOptions) -> None:
        self._options = options
        self._narrow = options.moments == "bfloat16"
        self._slots = {
            name: Slot(
                exp_avg=torch.zeros_like(weight, dtype=torch.bfloat16 if self._narrow else weight.dtype),
                exp_avg_sq=torch.zeros_like(weight, dtype=torch.bfloat16 if self._narrow else weight.dtype),
                step=torch.zeros((), dtype=torch.float32, device=weight.device),
                decay=name in decays,
            )
            for name, weight in weights.items()
        }

    @property
    def slots(self) -> Mapping[str, Slot]:
        """The state, by the parameter's name."""
        return self._slots

    @property
    def steps(self) -> int:
        """Steps that had an effect; waits for the device."""
        return int(next(iter(self._slots.values())).step.item())

    @steps.setter
    def steps(self, value: int) -> None:
        for slot in self._slots.values():
            slot.step.fill_(value)

    @torch.no_grad()
    def step(
        self,
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        lr: float,
        finite: Tensor,
        scale: Tensor | None = None,
    ) -> None:
        """Update the weights in place where `finite` holds, else change nothing.

        Args:
            weights: this rank's slices by name.
            gradients: of the shape of the weights, in their dtype or a narrower one; may be changed.
            lr: learning rate.
            finite: a bool on the device.
            scale: what the gradients are multiplied with first, on the device; 1 when absent.
        """
        assert weights.keys() == gradients.keys() == self._slots.keys()
        for decay in (True, False):
            rows = [
                Row(weight=weights[name], gradient=gradients[name], slot=slot)
                for name, slot in self._slots.items()
                if slot.decay is decay
            ]
            weight_decay = self._options.weight_decay if decay else 0.0
            if not rows:
                continue
            update = self._step_narrow if self._narrow else self._step_fused
            widen = rows[0].gradient.dtype != rows[0].weight.dtype
            if widen and not self._narrow and rows[0].weight.device.type == "cpu":
                rows = [slab for row in rows for slab in _slabs(row)]
            for some in _buckets(rows, BUCKET if self._narrow else WIDENED) if self._narrow or widen else [rows]:
                update(_scaled(some, scale), lr, weight_decay, finite)

    def _step_fused(self, rows: list[Row], lr: float, weight_decay: float, finite: Tensor) -> None:
        slots = [row.slot for row in rows]
        adamw(
            [row.weight for row in rows],
            [row.gradient for row in rows],
            [slot.exp_avg for slot in slots],
            [slot.exp_avg_sq for slot in slots],
            [],
            [slot.step for slot in slots],
            fused=True,
            found_inf=(~finite).to(torch.float32),
            amsgrad=False,
            beta1=self._options.beta1,
            beta2=self._options.beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=self._options.eps,
            maximize=False,
        )

    def _step_narrow(self, rows: list[Row], lr: float, weight_decay: float, finite: Tensor) -> None:
        beta1, beta2, wide = self._options.beta1, self._options.beta2, rows[0].weight.dtype
        on = finite.to(wide)
        weights, gradients = [row.weight for row in rows], [row.gradient for row in rows]
        for row in rows:
            row.slot.step.add_(on.to(torch.float32))
            row.gradient.masked_fill_(~finite, 0)  # a nan times 0 would still be one
        step = rows[0].slot.step.to(wide).clamp(min=1)
        first = [row.slot.exp_avg.to(wide) for row in rows]
        second = [row.slot.exp_avg_sq.to(wide) for row in rows]
        _torch._foreach_mul_(first, 1 - on * (1 - beta1))
        _torch._foreach_add_(first, _torch._foreach_mul(gradients, on * (1 - beta1)))
        squares = _torch._foreach_mul(gradients, gradients)
        _torch._foreach_mul_(squares, on * (1 - beta2))
        _torch._foreach_mul_(second, 1 - on * (1 - beta2))
        _torch._foreach_add_(second, squares)
        for row, m, v in zip(rows, first, second, strict=True):
            row.slot.exp_avg.copy_(m)
            row.slot.exp_avg_sq.copy_(v)
        _torch._foreach_mul_(second, 1 / (1 - beta2**step))
        _torch._foreach_sqrt_(second)
        _torch._foreach_add_(second, self._options.eps)
        _torch._foreach_div_(first, second)
        _torch._foreach_mul_(first, on * (-lr / (1 - beta1**step)))
        _torch._foreach_mul_(weights, 1 - on * (lr * weight_decay))
        _torch._foreach_add_(weights, first)


def _scaled(rows: list[Row], scale: Tensor | None) -> list[Row]:
    """The rows with their gradients in the weights' dtype, times `scale`."""
    wide = rows[0].weight.dtype
    rows = [replace(row, gradient=row.gradient.to(wide)) for row in rows]
    if scale is not None:
        _torch._foreach_mul_([row.gradient for row in rows], scale.to(wide))
    return rows


def _slabs(row: Row) -> Iterator[Row]:
    """A large row in parts of `WIDENED` numbers, the last of which counts the step."""
    slot = row.slot
    tensors = (row.weight, row.gradient, slot.exp_avg, slot.exp_avg_sq)
    *others, last = zip(*(tensor.view(-1).split(WIDENED) for tensor in tensors), strict=True)
    for weight, gradient, first, second in others:
        part = replace(slot, exp_avg=first, exp_avg_sq=second, step=slot.step.clone())
        yield Row(weight=weight, gradient=gradient, slot=part)
    weight, gradient, first, second = last
    yield Row(weight=weight, gradient=gradient, slot=replace(slot, exp_avg=first, exp_avg_sq=second))


def _buckets(rows: list[Row], size: int) -> Iterator[list[Row]]:
    """The rows in groups of about `size` numbers."""
    some: list[Row] = []
    for row in rows:
        some.append(row)
        if sum(one.weight.numel() for one in some) >= size:
            yield some
            some = []
    if some:
        yield some
