"""Master weights and their gradients: the model's own parameters, or copies in a wider dtype.

If a model is sharded by FSDP or computes in the master dtype, its parameters are the weights (`ModelWeights`). An
unsharded model that computes in a narrower dtype (`MixedPrecisionWeights`) is built in that dtype, with separate master
weights: they are rounded into the model once per step, where FSDP on one rank would gather and cast them twice per
pass. Backward produces gradients in the narrow dtype; those of several micro-batches are accumulated in the master
dtype, each as soon as it is ready. Results equal FSDP's, which upcasts the gradients of backward too.

Cost per parameter of `MixedPrecisionWeights` with bf16 and fp32: 2 bytes of weights and 2 of gradients besides the 4 of
the master weights and the moments; with several micro-batches 4 more. One cast per step.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from lt_trainer.torch import local_tensor


class Weights(Protocol):
    """Master weights and gradients of one optimizer step."""

    is_accumulating: bool
    """Whether a step has several backward passes; set before the first."""

    @property
    def master_weights(self) -> Mapping[str, Tensor]:
        """Weights by parameter name; they are updated, saved and restored."""
        ...

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's gradient slices by name, in the master dtype or a narrower one."""
        ...

    def sync_model(self) -> None:
        """Free the gradients, and copy changed master weights into the model."""
        ...


class ModelWeights:
    """Weights that are the model's own parameters; autograd accumulates."""

    is_accumulating = False

    def __init__(self, model_params: Mapping[str, nn.Parameter]) -> None:
        self.master_weights = dict(model_params)

    @torch.no_grad()
    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's gradient slices by name, in the master dtype."""
        gradients = {}
        for name, parameter in self.master_weights.items():
            assert parameter.grad is not None, f"{name} has no gradient"
            gradients[name] = local_tensor(parameter.grad)
        return gradients

    def sync_model(self) -> None:
        """Free the gradients; the model computes with the master weights."""
        for parameter in self.master_weights.values():
            parameter.grad = None


class MixedPrecisionWeights:
    """Master weights separate from a model's parameters in a narrower dtype.

    Args:
        model_params: allocated, in the compute dtype; their values are not read.
        master_dtype: dtype of the master weights, which start uninitialized, and of the sums of gradients.
        keeps_master_weights: False: the model's parameters are the weights, as with stochastic rounding.
    """

    def __init__(
        self, model_params: Mapping[str, nn.Parameter], master_dtype: torch.dtype, *, keeps_master_weights: bool = True
    ) -> None:
        self._model_params, self._master_dtype = dict(model_params), master_dtype
        self.master_weights = {
            name: torch.empty_like(param, dtype=master_dtype).detach() if keeps_master_weights else param.detach()
            for name, param in self._model_params.items()
        }
        self._keeps_master_weights = keeps_master_weights
        self._accumulated_grads: dict[str, Tensor] = {}
        self.is_accumulating = False
        for name, parameter in self._model_params.items():
            parameter.register_post_accumulate_grad_hook(partial(self._accumulate_grad, name))

    def _accumulate_grad(self, name: str, parameter: Tensor) -> None:
        if not self.is_accumulating:
            return
        assert parameter.grad is not None
        if name in self._accumulated_grads:
            self._accumulated_grads[name] += parameter.grad
        else:
            self._accumulated_grads[name] = parameter.grad.to(self._master_dtype)
        parameter.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """Return sums of several passes in the master dtype, or gradients of one in the model's dtype."""
        if self._accumulated_grads:
            return {name: self._accumulated_grads[name] for name in self.master_weights}
        gradients = {}
        for name, parameter in self._model_params.items():
            assert parameter.grad is not None, f"{name} has no gradient"
            gradients[name] = parameter.grad
        return gradients

    @torch.no_grad()
    def sync_model(self) -> None:
        """Free the gradients, and round the master weights into the model."""
        self._accumulated_grads.clear()
        for parameter in self._model_params.values():
            parameter.grad = None
        if self._keeps_master_weights:
            masters = [self.master_weights[name] for name in self._model_params]
            # A few kernels, not one for each.
            torch._foreach_copy_(list(self._model_params.values()), masters)  # pyright: ignore[reportPrivateImportUsage]
