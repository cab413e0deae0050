"""The weights that the optimizer updates, and their gradients, whether or not the model computes with the same ones.

Sharded by FSDP, or computing in the master dtype, a model's parameters are the weights (`OwnWeights`). A model that no
other rank shares and that computes in a narrower dtype (`NarrowWeights`) is made in that dtype, and the weights stand
beside it: they are rounded into the model once a step, after the update, where FSDP of one rank would gather and cast
them twice a pass. Its gradients are what backward makes, in the narrow dtype; with several passes they are added up in
the master dtype, each as soon as it is there. The numbers are those of FSDP: it too widens what backward makes.

Cost per parameter of `NarrowWeights` with bf16 and fp32: 2 bytes of weights and 2 of gradients beside the 4 of the
masters and the moments; with several passes 4 more. One cast a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from lt_trainer.torch import local_part


class Weights(Protocol):
    """What the engine's step needs of weights."""

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """By the parameter's name; what is updated, saved and restored."""
        ...

    def before_backward(self, *, passes: int) -> None:
        """Call before each backward pass of a step of `passes` passes."""
        ...

    def gradients(self) -> dict[str, Tensor]:
        """This rank's slices of the step's gradients by name, in the masters' dtype or a narrower one."""
        ...

    def forget_gradients(self) -> None:
        """Call after the update."""
        ...

    def updated(self) -> None:
        """Call when masters have changed; the model computes with them from now on."""
        ...


class OwnWeights:
    """The parameters of the model itself."""

    def __init__(self, model: nn.Module) -> None:
        self.masters = dict(model.named_parameters())

    def before_backward(self, *, passes: int) -> None:
        """Nothing is to be done: backward adds up by itself."""

    @torch.no_grad()
    def gradients(self) -> dict[str, Tensor]:
        """This rank's slices, in the masters' dtype."""
        found = {}
        for name, parameter in self.masters.items():
            assert parameter.grad is not None, f"{name} has no gradient"
            found[name] = local_part(parameter.grad)[0]
        return found

    def forget_gradients(self) -> None:
        """Let go of them."""
        for parameter in self.masters.values():
            parameter.grad = None

    def updated(self) -> None:
        """Nothing is to be done: these are the weights that the model computes with."""


class NarrowWeights:
    """Masters beside the parameters of a model in a narrower dtype.

    Args:
        model: with memory, in its own dtype; its values are not read.
        master: dtype of the masters, which start without values.
    """

    def __init__(self, model: nn.Module, master: torch.dtype) -> None:
        self._narrow = dict(model.named_parameters())
        self.masters = {name: torch.empty_like(one, dtype=master).detach() for name, one in self._narrow.items()}
        self._sums: dict[str, Tensor] = {}
        self._adding = False
        for name, parameter in self._narrow.items():
            parameter.register_post_accumulate_grad_hook(partial(self._add, name))

    def before_backward(self, *, passes: int) -> None:
        """Gradients of one pass stay as they are; those of several are added up."""
        self._adding = passes > 1

    def _add(self, name: str, parameter: Tensor) -> None:
        if not self._adding:
            return
        assert parameter.grad is not None
        if name in self._sums:
            self._sums[name] += parameter.grad
        else:
            self._sums[name] = parameter.grad.to(self.masters[name].dtype)
        parameter.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """Sums of several passes in the masters' dtype, or the gradients of one in the model's."""
        if self._sums:
            return {name: self._sums[name] for name in self.masters}
        found = {}
        for name, parameter in self._narrow.items():
            assert parameter.grad is not None, f"{name} has no gradient"
            found[name] = parameter.grad
        return found

    def forget_gradients(self) -> None:
        """Let go of them."""
        self._sums.clear()
        for parameter in self._narrow.values():
            parameter.grad = None

    @torch.no_grad()
    def updated(self) -> None:
        """Round the masters into the model."""
        for name, parameter in self._narrow.items():
            parameter.copy_(self.masters[name])
