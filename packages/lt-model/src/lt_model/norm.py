"""Norms in fp32 (or float64): RMSNorm, x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467), and LayerNorm.

CUDA has a fused kernel behind `torch.nn.functional.rms_norm`. On the CPU that function is a chain of small operations
whose backward pass reads and writes the activations about fifteen times, so there we use the closed form: with r =
1/sqrt(mean(x^2) + eps), n = x r and upstream gradient g,

    dx = r (g w - n mean(g w n)),    dw = sum over tokens of g n

Gemma's weight is 1 + w, which would round w away in bfloat16. So the product is n + n w with the kernel's n elsewhere,
and on the CPU the sum is formed in fp32.

Compiled code uses torch's function everywhere: a compiler fuses the chain by itself, and torch 2.11 silently compiles
the closed form, which writes into its own intermediates, to wrong gradients.

Cost on the CPU: 3 passes over x forward and 8 backward; 2.6 times faster than the chain (forward and backward, fp32).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize the last dimension of `x` and scale it by `weight`; same shape and dtype as `x`."""
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        return _RMSNorm.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def rms_norm_plus_one(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize the last dimension of `x` and scale it by 1 + `weight`; same shape and dtype as `x`."""
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        return _RMSNorm.apply(x, 1 + weight.to(torch.promote_types(x.dtype, torch.float32)), eps)
    normed = F.rms_norm(x, weight.shape, None, eps)
    return torch.addcmul(normed, normed, weight)


class RMSNorm(nn.Module):
    """RMSNorm layer; its weight starts as ones, or as zeros where 1 is added to it."""

    def __init__(self, width: int, eps: float, *, plus_one: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if plus_one else torch.ones(width))
        self.eps = eps
        self.normalize = rms_norm_plus_one if plus_one else rms_norm

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized x, same shape and dtype."""
        return self.normalize(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        """Return the text that `print(model)` shows."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


def make_norm(kind: str, width: int, eps: float) -> RMSNorm | nn.LayerNorm:
    """Return a norm layer of a kind of `ModelConfig.norm`."""
    return nn.LayerNorm(width, eps) if kind == "layer" else RMSNorm(width, eps, plus_one=kind == "rms_plus_one")


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (once_differentiable hides the names)
        ctx: Any, upstream: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x.to(scale.dtype) * scale
        grad = upstream.to(scale.dtype)
        scratch = grad * normed
        grad_weight = scratch.flatten(0, -2).sum(dim=0)
        wide_weight = weight.to(scale.dtype)
        mean = (scratch @ wide_weight).unsqueeze(-1).div_(x.shape[-1])
        grad_x = torch.mul(grad, wide_weight, out=scratch).sub_(normed.mul_(mean)).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None
