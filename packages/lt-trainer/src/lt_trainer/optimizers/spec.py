"""Optimizer specification: state slots per parameter, hyperparameters, a pure update; torch-free.

An optimizer is one file of this folder with its `OptimizerSpec`, and a line in the registry (`OPTIMIZERS`).
Checkpoints, the memory plan and both engines take everything from the spec; no other file names a slot.

A rank updates a slice of each parameter: rows under FSDP and ZeRO-1, rows or columns under tensor parallelism. A slot
has the shape of its parameter and is sharded with it, so that an update, which sees no other rank's elements, never
needs a collective.

An update that needs whole matrices declares a `MatrixTransform`: what comes before it and after it is per slice, and
the engine brings slices together in between. An optimizer may leave some parameters to another one (`others`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from lt_model.params import ParamSpec
    from lt_trainer.config.optimizer_section import OptimizerOptions


DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}

ROLES = {"embedding": "embedding", "head": "head", "norm": "norm", "bias": "norm"}
ROLES |= {"matrix": "matrices", "experts": "matrices", "router": "matrices"}
"""Type of a parameter → field of `[optimizer.lr_scale]`."""

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ParamSlice:
    """One tensor that a rank updates, and the parameters of the model that it is a slice of.

    Attributes:
        specs: the parameters; several where an engine stacks them along the rows (fused projections of NxD).
        offset: start of the slice in the parameter, or in the engine's stack.
        decay: weight decay applies.
        lr_scale: factor of the learning rate.
    """

    specs: tuple[ParamSpec, ...]
    offset: Shape
    decay: bool
    lr_scale: float = 1.0


Slots = Mapping[str, "Tensor"]
"""State tensors of one parameter by the name of the slot."""

UpdateFn = Callable[["ParamSlice", "Tensor", "Tensor", Slots], tuple["Tensor", Slots]]
"""Update of one tensor in one step: (param, weight, gradient, slots) → new weight and new slots.

A pure function that a lazy device can trace into one graph. The weight is in the dtype of the update. The gradient is
clipped, of its shape and dtype; with a `MatrixTransform` it is the slice of its result. Slots may be narrower than the
weight (`StateSlot.dtype`): then the caller rounds the results."""


@dataclass(frozen=True, kw_only=True)
class MatrixTransform:
    """Function of a whole matrix within an update, such as an orthogonalization.

    A step of such a parameter is `direction` on each slice, `transform` on the whole matrix, for which the engine
    exchanges slices, and the update on each slice of the result.

    Attributes:
        direction: (options, clipped gradient, slots) → the slice of the matrix to transform, and new slots.
        transform: (options, matrix) → a matrix of the same shape and dtype.
        dtype: dtype of the transformation by the options: a key of `DTYPE_BYTES`, or "" for that of the master weights.
    """

    direction: Callable[[OptimizerOptions, Tensor, Slots], tuple[Tensor, Slots]]
    transform: Callable[[OptimizerOptions, Tensor], Tensor]
    dtype: Callable[[OptimizerOptions], str]


@dataclass(frozen=True, kw_only=True)
class StateSlot:
    """One state tensor per parameter, of its shape.

    Attributes:
        name: name of the slot, and of its group of tensors in a checkpoint.
        dtype: dtype by the options: a key of `DTYPE_BYTES`, or "" for the dtype of the master weights.
    """

    name: str
    dtype: Callable[[OptimizerOptions], str] = lambda options: ""

    def n_bytes(self, options: OptimizerOptions, shape: Shape, master_bytes: int) -> int:
        """Return the bytes of a parameter's slot; its master weight has `master_bytes` per element."""
        return math.prod(shape) * DTYPE_BYTES.get(self.dtype(options), master_bytes)


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """One optimizer.

    Attributes:
        name: value of `optimizer.name`, also in manifests of checkpoints.
        slots: state per parameter.
        options: fields of `[optimizer]` that this optimizer reads and others may not.
        make_update: (options, lr, step) → the update of a step. `lr` is a number or a scalar tensor; `step` is the
            number of this step from 1, an integer tensor on the device (0 only where the result is discarded).
        check: refuse options that do not work together (RecipeError).
        transform: what the update needs of whole matrices.
        applies_to: whether it updates a parameter.
        others: the optimizer of the parameters that it does not update.
    """

    name: str
    slots: tuple[StateSlot, ...]
    options: frozenset[str]
    make_update: Callable[[OptimizerOptions, Tensor | float, Tensor], UpdateFn]
    check: Callable[[OptimizerOptions], None] = lambda options: None
    transform: MatrixTransform | None = None
    applies_to: Callable[[ParamSpec], bool] = lambda spec: True
    others: OptimizerSpec | None = None

    @property
    def all_slots(self) -> tuple[StateSlot, ...]:
        """Slots of this optimizer and of `others`; a parameter has those of the one that updates it."""
        return self.slots + (self.others.all_slots if self.others else ())

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Names of all slots."""
        return tuple(slot.name for slot in self.all_slots)

    def for_params(self, specs: Iterable[ParamSpec]) -> OptimizerSpec:
        """Return the optimizer that updates a tensor of these parameters: this one or one of `others`."""
        if self.others is None or all(self.applies_to(spec) for spec in specs):
            return self
        return self.others.for_params(specs)

    def state_bytes(self, options: OptimizerOptions, shapes: Iterable[Shape], master_bytes: int) -> int:
        """Return the bytes of its slots, for parameters of these shapes that it updates."""
        return sum(slot.n_bytes(options, shape, master_bytes) for shape in shapes for slot in self.slots)


def lr_scale(spec: ParamSpec, options: OptimizerOptions) -> float:
    """Return the factor of a parameter's learning rate, by its type."""
    return getattr(options.lr_scale, ROLES[spec.type])
