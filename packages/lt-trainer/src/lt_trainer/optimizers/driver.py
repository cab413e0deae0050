"""Optimizer state and step of one rank for every `OptimizerSpec`; imports torch, so for engines only.

A device tensor decides whether a step takes effect: where loss or norm are not finite, `torch.where` keeps the old
values, so nan is never multiplied and the host never waits. The steps that took effect are counted on the device.

Cost: temporaries of one parameter's size at a time; operations per parameter and step as many as the update has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lt_ckpt import Checkpoint, OptimizerRecord
from lt_model.stochastic_rounding import round_stochastically, rounding_key
from lt_trainer.errors import RecipeError
from lt_trainer.optimizers.spec import OptimizerSpec, ParamSlice, Slots, StateSlot, UpdateFn
from lt_trainer.toml import format_value

if TYPE_CHECKING:
    from lt_trainer.config.optimizer_section import OptimizerOptions

Tensors = Mapping[str, Tensor]
"""Tensors by the name of their parameter."""

Transform = Callable[[Tensor], Tensor]
Matrices = Iterator[tuple[str, Tensor]]
MatrixExchange = Callable[[Sequence[str], Callable[[str], Tensor], Transform], Matrices]
"""Slices of matrices to whole ones and back: each name with this rank's slice of its transformed matrix, in any order.

Its arguments are the parameters, the same on all ranks that share them; this rank's slice of a matrix by name, called
once for each; and the function of a whole matrix, whose result has its shape and dtype."""


def exchange_nothing(names: Sequence[str], direction: Callable[[str], Tensor], transform: Transform) -> Matrices:
    """Return each name with its transformed matrix: a `MatrixExchange` of ranks that have whole matrices."""
    return ((name, transform(direction(name))) for name in names)


class OptimizerDriver:
    """State and step of the tensors that one rank updates.

    Args:
        spec: the optimizer.
        options: the recipe's `[optimizer]`.
        params: the tensors by name: their place in the model.
        weights: the tensors, in the master dtype; only shapes, dtypes and the device are read.
        seed: seed of stochastic rounding (`optimizer.weights_dtype`).
        exchange: how slices become whole matrices, for a spec with a `MatrixTransform`.

    Attributes:
        specs: name → the optimizer that updates it: `spec` or one of its `others`.
        slots: slot → name → state tensor.
        device_type: type of the weights' device.
        update_dtype: dtype of the update; narrower tensors are upcast.
        step_count: steps that took effect, an integer scalar on the device.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        options: OptimizerOptions,
        params: Mapping[str, ParamSlice],
        weights: Tensors,
        *,
        seed: int = 0,
        exchange: MatrixExchange = exchange_nothing,
    ) -> None:
        self.spec, self.options, self.params = spec, options, params
        self.specs = {name: spec.for_params(params[name].specs) for name in weights}
        like = next(iter(weights.values()))
        self.rounds_stochastically = options.weights_dtype == "bfloat16"
        self.update_dtype = torch.float32 if self.rounds_stochastically else like.dtype
        self.device_type, self._seed, self._exchange = like.device.type, seed, exchange
        self.slots: dict[str, dict[str, Tensor]] = {slot: {} for slot in spec.slot_names}
        for name, weight in weights.items():
            for slot in self.specs[name].slots:
                self.slots[slot.name][name] = self.allocate_slot(weight, self.slot_dtype(slot))
        self.step_count = torch.zeros((), dtype=torch.int32, device=like.device)

    def allocate_slot(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return zeros for a slot of a weight; a subclass may keep them elsewhere than on the weight's device."""
        return weight.new_zeros(weight.shape, dtype=dtype)

    def slot_dtype(self, slot: StateSlot) -> torch.dtype:
        """Return the dtype of a slot."""
        name = slot.dtype(self.options)
        return getattr(torch, name) if name else self.update_dtype

    def store_weight(self, name: str, weight: Tensor, values: Tensor, start_row: int = 0) -> None:
        """Round the new values of some rows of a weight into it, `start_row` being the first."""
        if self.rounds_stochastically:
            (spec,), (row, *columns) = self.params[name].specs, self.params[name].offset
            key, offset = rounding_key(self._seed, spec), (row + start_row, *columns)
            round_stochastically(weight, values, spec, key=key, step=self.step_count, offset=offset)
        else:
            weight.copy_(values)

    @torch.no_grad()
    def step(
        self, weights: Tensors, gradients: Tensors, lr: Tensor | float, finite: Tensor, scale: Tensor | None = None
    ) -> None:
        """Update weights and slots in place where `finite` holds, else change nothing.

        Args:
            weights: all tensors by name.
            gradients: of the weights' shapes, in their dtype or a narrower one; may be overwritten.
            lr: learning rate; a scalar tensor on a lazy device, where a number would be a constant of the graph.
            finite: a bool on the device.
            scale: factor of the gradients (clipping), a scalar on the device; None: 1.
        """
        self.step_count.add_(finite.to(self.step_count.dtype))
        self.update(weights, gradients, lr, finite, scale)

    def update(
        self, weights: Tensors, gradients: Tensors, lr: Tensor | float, finite: Tensor, scale: Tensor | None
    ) -> None:
        """Run the pure update of some tensors, as `step` does for all; the step is counted already."""

        @cache
        def update_of(spec: OptimizerSpec, lr_scale: float) -> UpdateFn:
            return spec.make_update(self.options, lr if lr_scale == 1.0 else lr * lr_scale, self.step_count)

        def clipped(name: str) -> Tensor:
            gradient = gradients[name].to(self.update_dtype)
            return gradient if scale is None else gradient * scale.to(gradient.dtype)

        def apply(name: str, gradient: Tensor, slots: Slots) -> Slots:
            param, weight = self.params[name], weights[name].to(self.update_dtype)
            update_fn = update_of(self.specs[name], param.lr_scale)
            new_weight, new_slots = update_fn(param, weight, gradient, slots)
            self.store_weight(name, weights[name], torch.where(finite, new_weight, weight))
            return new_slots

        def store_slots(name: str, slots: Slots, new_slots: Slots) -> None:
            for slot, old in slots.items():
                new = torch.where(finite, new_slots[slot].to(old.dtype), old)
                self.slots[slot][name].copy_(new, non_blocking=True)

        for name in weights:
            if self.specs[name].transform is None:
                slots = self.slots_of(name)
                store_slots(name, slots, apply(name, clipped(name), slots))
        matrices = [name for name in weights if self.specs[name].transform is not None]
        if not matrices:
            return
        transform = self.specs[matrices[0]].transform  # one optimizer has one
        assert transform is not None
        dtype = transform.dtype(self.options)

        def direction(name: str) -> Tensor:
            slots = self.slots_of(name)
            value, new_slots = transform.direction(self.options, clipped(name), slots)
            store_slots(name, slots, new_slots)
            return value.to(getattr(torch, dtype)) if dtype else value

        for name, value in self._exchange(matrices, direction, partial(transform.transform, self.options)):
            apply(name, value, self.slots_of(name))

    def slots_of(self, name: str) -> dict[str, Tensor]:
        """Return the slots of a parameter, on its device; they are only read."""
        return {slot.name: self.slots[slot.name][name] for slot in self.specs[name].slots}


def optimizer_record(spec: OptimizerSpec) -> OptimizerRecord:
    """Return what the manifest of a checkpoint says of the optimizer."""
    return OptimizerRecord(name=spec.name, slots=spec.slot_names)


def check_optimizer(checkpoint: Checkpoint, spec: OptimizerSpec) -> None:
    """Refuse a checkpoint that holds another optimizer's state, or none.

    Raises:
        RecipeError: with both names.
    """
    saved = checkpoint.manifest.optimizer
    if saved != optimizer_record(spec):
        held = f"the state of {saved.name!r} ({', '.join(saved.slots)})" if saved else "no optimizer state"
        problem = f"{checkpoint.path} holds {held}, but {spec.name!r} needs its own ({', '.join(spec.slot_names)})"
        remedy = f"start a new run from its weights alone with model.init_from = {format_value(str(checkpoint.path))}"
        raise RecipeError(problem, values={"optimizer.name": spec.name}, remedy=remedy)
