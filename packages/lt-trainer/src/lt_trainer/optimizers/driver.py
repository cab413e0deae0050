"""Optimizer state and step of one rank for every `OptimizerSpec`; imports torch, so for engines only.

A device tensor decides whether a step takes effect: where loss or norm are not finite, `torch.where` keeps the old
values, so nan is never multiplied and the host never waits. The steps that took effect are counted on the device.

Cost: temporaries of one parameter's size at a time; operations per parameter and step as many as the update has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lt_ckpt import OptimizerRecord
from lt_trainer.errors import RecipeError
from lt_trainer.optimizers.matrices import WholeMatrices

if TYPE_CHECKING:
    from lt_ckpt import Checkpoint
    from lt_trainer.config.sections.optimizer import OptimizerOptions
    from lt_trainer.optimizers.matrices import MatrixExchange
    from lt_trainer.optimizers.spec import OptimizerSpec, ParamSlice, StateSlot, UpdateFn
    from lt_trainer.torch import LocalShard


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
        step_count: steps that took effect, an integer scalar on the device.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        options: OptimizerOptions,
        params: Mapping[str, ParamSlice],
        weights: Mapping[str, Tensor],
        *,
        seed: int = 0,
        exchange: MatrixExchange | None = None,
    ) -> None:
        self.rounds_stochastically = options.weights_dtype == "bfloat16"
        self._rounding_keys: dict[str, int] = {}
        if self.rounds_stochastically:
            from lt_model.stochastic_rounding import rounding_key

            self._rounding_keys = {name: rounding_key(seed, param.specs[0]) for name, param in params.items()}
        self.spec, self.options, self.params = spec, options, params
        self.specs = {name: spec.for_params(params[name].specs) for name in weights}
        self.slots: dict[str, dict[str, Tensor]] = {slot: {} for slot in spec.slot_names}
        for name, weight in weights.items():
            for slot in self.specs[name].slots:
                shape, dtype = slot.shape(tuple(weight.shape)), self.slot_dtype(slot, weight.dtype)
                self.slots[slot.name][name] = self.allocate_slot(weight, shape, dtype)
        self._exchange = exchange or WholeMatrices()
        device = next(iter(weights.values())).device
        self.device_type = device.type
        self.step_count = torch.zeros((), dtype=torch.int32, device=device)

    def allocate_slot(self, weight: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return zeros for a slot of a weight; a subclass may keep them elsewhere than on the weight's device."""
        return weight.new_zeros(shape, dtype=dtype)

    def slot_dtype(self, slot: StateSlot, weight_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of a slot of weights in `weight_dtype`."""
        name = slot.dtype(self.options)
        return getattr(torch, name) if name else self.update_dtype(weight_dtype)

    def update_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which weights of `weight_dtype` are updated."""
        return torch.float32 if self.rounds_stochastically else weight_dtype

    def store_weight(self, name: str, weight: Tensor, values: Tensor, start_row: int = 0) -> None:
        """Round the new values of some rows of a weight into it, `start_row` being the first."""
        if not self.rounds_stochastically:
            weight.copy_(values)
            return
        from lt_model.stochastic_rounding import round_stochastically

        param = self.params[name]
        (spec,) = param.specs
        round_stochastically(
            weight,
            values,
            spec,
            key=self._rounding_keys[name],
            step=self.step_count,
            offset=(param.offset[0] + start_row, *param.offset[1:]),
        )

    @torch.no_grad()
    def step(
        self,
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        lr: Tensor | float,
        finite: Tensor,
        scale: Tensor | None = None,
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
        self.step_by_spec(weights, gradients, lr, finite, scale)

    def step_by_spec(
        self,
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        lr: Tensor | float,
        finite: Tensor,
        scale: Tensor | None,
    ) -> None:
        """Run the pure update of some tensors, as `step` does for all; the step is counted already."""

        @cache
        def update_of(spec: OptimizerSpec, lr_scale: float) -> UpdateFn:
            return spec.make_update(self.options, lr if lr_scale == 1.0 else lr * lr_scale, self.step_count)

        def clipped(name: str) -> Tensor:
            gradient = gradients[name].to(self.update_dtype(weights[name].dtype))
            return gradient if scale is None else gradient * scale.to(gradient.dtype)

        def update(name: str, gradient: Tensor, slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
            param, weight = self.params[name], weights[name].to(self.update_dtype(weights[name].dtype))
            update_fn = update_of(self.specs[name], param.lr_scale)
            new_weight, new_slots = update_fn(param, weight, gradient, slots)
            self.store_weight(name, weights[name], torch.where(finite, new_weight, weight))
            return new_slots

        for name in weights:
            if self.specs[name].transform is None:
                slots = self.slots_of(name)
                self._store_slots(name, slots, update(name, clipped(name), slots), finite)
        matrices = [name for name in weights if self.specs[name].transform is not None]
        if not matrices:
            return
        (transform,) = {self.specs[name].transform for name in matrices}
        assert transform is not None
        make_direction = transform.make_direction(self.options)
        dtype = transform.dtype(self.options)

        def direction(name: str) -> Tensor:
            slots = self.slots_of(name)
            value, new_slots = make_direction(clipped(name), slots)
            self._store_slots(name, slots, new_slots, finite)
            return value.to(getattr(torch, dtype)) if dtype else value

        for name, value in self._exchange.transform(matrices, direction, transform.make_transform(self.options)):
            update(name, value, self.slots_of(name))

    def slots_of(self, name: str) -> dict[str, Tensor]:
        """Return the slots of a parameter, on its device; they are only read."""
        return {slot.name: self.slots[slot.name][name] for slot in self.specs[name].slots}

    def _store_slots(
        self, name: str, slots: Mapping[str, Tensor], new_slots: Mapping[str, Tensor], finite: Tensor
    ) -> None:
        for slot, old in slots.items():
            new = torch.where(finite, new_slots[slot].to(old.dtype), old)
            self.slots[slot][name].copy_(new, non_blocking=True)


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
        held = "no optimizer state" if saved is None else f"the state of {saved.name!r} ({', '.join(saved.slots)})"
        matching = "" if saved is None or saved.name == spec.name else f"set optimizer.name to {saved.name!r}, or "
        raise RecipeError(
            f"{checkpoint.path} holds {held}, but {spec.name!r} needs its own ({', '.join(spec.slot_names)})",
            values={"optimizer.name": spec.name},
            remedy=f"{matching}start a new run from its weights alone with model.init_from = {str(checkpoint.path)!r}",
        )


def slot_shard(slot: StateSlot, name: str, weight: LocalShard, local: Tensor) -> LocalShard:
    """Return a rank's slice of a slot as a part of the whole slot.

    Args:
        slot: the slot.
        name: the parameter, for the error.
        weight: the rank's slice of the parameter.
        local: its state tensor.

    Raises:
        RecipeError: the slot is reduced along a dimension of which the rank has a part only.
    """
    offset, shape = slot.local_slice(name, weight.shape, weight.offset, tuple(weight.local.shape))
    assert tuple(local.shape) == shape, (name, slot.name, local.shape, shape)
    return replace(weight, local=local, shape=slot.shape(weight.shape), offset=offset)
