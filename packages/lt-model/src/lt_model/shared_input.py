"""Linear layers with the same input: queries, keys and values, or gate and up.

Under autograd each layer makes a gradient of the input, and these are added in passes of their own, rounded every time.
Here each product adds to the gradient of those before it: one pass over the input less for each, and one rounding. What
a compiler sees stays as it is: it fuses the sums with what follows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def apply_to_shared_input(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """Return the outputs of linear layers, which may be of any class, for one input [..., D].

    Where gradients are recorded, hooks of the layers do not run.
    """
    is_plain = torch.is_grad_enabled() and all(type(one) is nn.Linear and one.bias is None for one in layers)
    if torch.compiler.is_compiling() or x.device.type not in ("cpu", "cuda") or not is_plain:
        return tuple(layer(x) for layer in layers)
    return _SharedInput.apply(x, *(layer.weight for layer in layers))


class _SharedInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (once_differentiable hides the names)
        ctx: Any, *upstream: Tensor
    ) -> tuple[Tensor, ...]:
        x, *weights = ctx.saved_tensors
        grads = [grad.flatten(0, -2) for grad in upstream]
        grad_x = grads[0] @ weights[0]
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            torch.addmm(grad_x, grad, weight, out=grad_x)
        return grad_x.view_as(x), *(grad.T @ x.flatten(0, -2) for grad in grads)
