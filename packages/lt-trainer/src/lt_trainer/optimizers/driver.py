"""Optimizer state and step of one rank for every `OptimizerSpec`; imports torch, so for engines only.

A device tensor decides whether a step takes effect: where loss or norm are not finite, `torch.where` keeps the old
values, so nan is never multiplied and the host never waits. The steps that took effect are counted on the device.

Cost: temporaries of one parameter's size at a time; operations per parameter and step as many as the update has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lt_ckpt import OptimizerRecord
from lt_trainer.errors import RecipeError

if TYPE_CHECKING:
    from lt_ckpt import Checkpoint
    from lt_trainer.config import OptimizerOptions
    from lt_trainer.optimizers.spec import OptimizerSpec, ParamSlice, StateSlot
    from lt_trainer.torch import LocalShard

__all__ = ["OptimizerDriver", "check_optimizer", "optimizer_record", "slot_shard"]


class OptimizerDriver:
    """State and step of the tensors that one rank updates.

    Args:
        spec: the optimizer.
        options: the recipe's `[optimizer]`.
        params: the tensors by name: their place in the model.
        weights: the tensors, in the master dtype; only shapes, dtypes and the device are read.

    Attributes:
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
    ) -> None:
        self.spec, self.options, self.params = spec, options, params
        self.slots: dict[str, dict[str, Tensor]] = {}
        for slot in spec.slots:
            name = slot.dtype(options)
            self.slots[slot.name] = {
                key: weight.new_zeros(
                    slot.shape(tuple(weight.shape)), dtype=getattr(torch, name) if name else weight.dtype
                )
                for key, weight in weights.items()
            }
        device = next(iter(weights.values())).device
        self.device_type = device.type
        self.step_count = torch.zeros((), dtype=torch.int32, device=device)

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
        update = self.spec.make_update(self.options, lr, self.step_count)
        for name, weight in weights.items():
            gradient = gradients[name].to(weight.dtype)
            if scale is not None:
                gradient = gradient * scale.to(weight.dtype)
            slots = {slot: tensors[name] for slot, tensors in self.slots.items()}
            new_weight, new_slots = update(self.params[name], weight, gradient, slots)
            for slot, old in slots.items():
                old.copy_(torch.where(finite, new_slots[slot].to(old.dtype), old))
            weight.copy_(torch.where(finite, new_weight, weight))


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
