"""Linear layers in float8: matrix products of operands scaled and rounded to 8 bits just before.

Of a layer y = x W^T with the upstream gradient g:

    product     "tensorwise"                   "rowwise"
    y  = x W^T  e4m3 x e4m3                    e4m3 x e4m3
    dx = g W    e5m2 x e4m3                    e4m3 x e4m3
    dW = g^T x  e5m2 x e4m3                    compute dtype

An operand is multiplied by a power of two that brings its largest magnitude to at most the format's largest number: one
for the whole operand, or one for each of its rows, as the product sees them. A power of two adds no rounding, so only
the 8-bit rounding (relative error at most 2^-4 in e4m3, 2^-3 in e5m2, of numbers in range) remains. Values are clamped
before the cast, which does not saturate; inf and nan become nan and reach the loss, so that the step is skipped.
Products accumulate in float32. Rowwise is the more accurate and slower choice: a row with an outlier costs only itself,
and weight gradients are those of the compute dtype. Scales follow from the operands themselves: there is no state.

Modules change their class to one that differs only in `forward`, as under tensor parallelism: parameters stay plain
tensors of the same names and dtypes, so FSDP gathers, optimizers and checkpoints notice nothing. This is why it is not
torchao's `convert_to_float8_training`, which replaces modules and wraps their weights: under a tensor parallelism on
plain tensors there would be two kinds of model. What is here is torchao's dynamic scaling, and is compared with its
emulation in a slow test where torchao is installed.

Embedding, head and the blocks at both ends keep the compute dtype; so do norms and attention. Under tensor parallelism
each rank scales its own shard of a weight, and ranks with different rows scale their own activations, so layouts agree
to the rounding error of float8 rather than to that of the compute dtype.

Cost: activations are saved in the compute dtype, as without fp8 (three layers share one input). Casting reads an
operand twice, which a compiler fuses with what makes it; in eager mode the casts cost more than the products gain.

Shapes: M tokens, K inputs and N outputs of a layer.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lt_model import ModelConfig, flops_per_token
from lt_model.decoder import Decoder
from lt_trainer_gpu.checks import fp8_products, parse_torch_version
from lt_trainer_gpu.module_class import exchange_class
from lt_trainer_gpu.tensor_parallel import RowParallelLinear, row_parallel_bias

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST_AMAX = 1e-12
"""Magnitude below which an operand counts as zero; its scale stays finite."""
EXPONENT_BITS = 0x7F800000
"""Exponent of a float32; the number with these bits alone is the next lower power of two."""
CPU_TAKES_ROW_SCALES = parse_torch_version(torch.__version__) >= (2, 12)
"""Whether `torch._scaled_mm` takes scales by row on a CPU; torch 2.11 takes them on GPUs only."""

Scaling = Literal["tensorwise", "rowwise"]


class Scaled(NamedTuple):
    """Operand [rows, contracted] in float8, row-major.

    Attributes:
        values: the operand times its scale.
        inverse_scale: fp32 scalar, or [rows, 1].
    """

    values: Tensor
    inverse_scale: Tensor

    def transposed(self) -> Scaled:
        """Return the transposed operand, row-major; of one scale only."""
        return Scaled(self.values.T.contiguous(), self.inverse_scale)


def quantize(x: Tensor, dtype: torch.dtype, scaling: Scaling) -> Scaled:
    """Return a matrix in `dtype`, scaled as a whole or by row."""
    largest = torch.finfo(dtype).max
    amax = (x.abs().amax() if scaling == "tensorwise" else x.abs().amax(dim=1, keepdim=True)).to(torch.float32)
    scale = largest / amax.clamp(min=SMALLEST_AMAX)
    scale = (scale.view(torch.int32) & EXPONENT_BITS).view(torch.float32)
    return Scaled((x.to(torch.float32) * scale).clamp(-largest, largest).to(dtype), scale.reciprocal())


def scaled_product(a: Scaled, b: Scaled, out_dtype: torch.dtype, *, fast: bool) -> Tensor:
    """Return a @ b^T.

    Args:
        a: [m, k].
        b: [n, k].
        out_dtype: dtype of the result.
        fast: let the tensor cores accumulate in less than fp32, as is usual in forward passes.
    """
    if a.inverse_scale.ndim and a.values.device.type == "cpu" and not CPU_TAKES_ROW_SCALES:
        one = torch.ones(())
        product = scaled_product(Scaled(a.values, one), Scaled(b.values, one), torch.float32, fast=fast)
        return (product * (a.inverse_scale * b.inverse_scale.T)).to(out_dtype)  # powers of two: nothing is rounded
    scale_b = b.inverse_scale if b.inverse_scale.ndim == 0 else b.inverse_scale.T
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage] - as in torchao
        a.values,
        b.values.T,
        scale_a=a.inverse_scale,
        scale_b=scale_b.contiguous(),
        out_dtype=out_dtype,
        use_fast_accum=fast,
    )


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor, scaling: Scaling) -> Tensor:
        ctx.save_for_backward(x_MK, weight_NK)
        ctx.scaling = scaling
        return scaled_product(quantize(x_MK, E4M3, scaling), quantize(weight_NK, E4M3, scaling), x_MK.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, upstream_MN: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_MK, weight_NK = ctx.saved_tensors
        upstream_MN = upstream_MN.contiguous()
        if ctx.scaling == "rowwise":
            grad_x = scaled_product(
                quantize(upstream_MN, E4M3, "rowwise"),
                quantize(weight_NK.T.contiguous(), E4M3, "rowwise"),
                x_MK.dtype,
                fast=False,
            )
            return grad_x, upstream_MN.T @ x_MK, None
        upstream, weight = quantize(upstream_MN, E5M2, "tensorwise"), quantize(weight_NK, E4M3, "tensorwise")
        x = quantize(x_MK, E4M3, "tensorwise")
        grad_x = scaled_product(upstream, weight.transposed(), x_MK.dtype, fast=False)
        grad_weight = scaled_product(upstream.transposed(), x.transposed(), weight_NK.dtype, fast=False)
        return grad_x, grad_weight, None


class TensorwiseLinear(nn.Linear):
    """Linear layer whose operands have one scale each; a bias is added in the compute dtype."""

    scaling: Scaling = "tensorwise"

    def forward(self, input: Tensor) -> Tensor:
        """Return input @ weight^T + bias."""
        product = _Fp8Linear.apply(input.flatten(0, -2), self.weight, self.scaling).unflatten(0, input.shape[:-1])
        bias = row_parallel_bias(self)
        return product if bias is None else product + bias


class RowwiseLinear(TensorwiseLinear):
    """Linear layer whose operands have a scale by row; a bias is added in the compute dtype."""

    scaling: Scaling = "rowwise"


class TensorwiseRowParallelLinear(TensorwiseLinear, RowParallelLinear):
    """The same on tensor-parallel ranks, whose outputs are summed."""


class RowwiseRowParallelLinear(RowwiseLinear, RowParallelLinear):
    """The same on tensor-parallel ranks, whose outputs are summed."""


LINEAR_CLASSES: dict[str, type[TensorwiseLinear]] = {"tensorwise": TensorwiseLinear, "rowwise": RowwiseLinear}
ROW_PARALLEL_CLASSES: dict[str, type[TensorwiseLinear]] = {
    "tensorwise": TensorwiseRowParallelLinear,
    "rowwise": RowwiseRowParallelLinear,
}


def fp8_flops_share(config: ModelConfig, seq_len: int, scaling: Scaling, skipped_blocks: int) -> float:
    """Return the share of a training step's FLOPs ("full" convention) that are in float8."""
    passes = 3 if scaling == "tensorwise" else 2  # rowwise computes weight gradients in the compute dtype
    products = sum(spec.numel for spec in fp8_products(config, skipped_blocks))
    return 2 * passes * products / flops_per_token(config, seq_len)


def apply_fp8(model: Decoder, scaling: Scaling, skipped_blocks: int) -> int:
    """Change the matrix products of blocks (by the parameter table) to float8, in place; return their number.

    Args:
        model: the model, or a stage of it with the blocks' numbers in their names.
        scaling: "tensorwise" or "rowwise".
        skipped_blocks: blocks that keep the compute dtype, at either end of the whole model.
    """
    products = {spec.name for spec in fp8_products(model.config, skipped_blocks)}
    count = 0
    for name, module in model.named_modules():
        if f"{name}.weight" in products and isinstance(module, nn.Linear):
            classes = ROW_PARALLEL_CLASSES if isinstance(module, RowParallelLinear) else LINEAR_CLASSES
            exchange_class(module, classes[scaling])
            count += 1
    return count
