"""AdamW (arXiv:1711.05101) with bias correction.

    m = b1 m + (1 - b1) g,    v = b2 v + (1 - b2) g^2,    w = w - lr m' / (sqrt(v') + eps) - lr d w

with m' = m / (1 - b1^t), v' = v / (1 - b2^t) and t the number of the step.

Numerics. No number near 1 is a factor: where the device computes in bf16 with stochastic rounding (`bf16_sr` of the
neuron engine), 0.999 and 1 - lr d round to 1, so v would only grow and nothing would decay. Hence m + (1 - b1) (g - m),
v likewise, and w - (... + lr d w), each with one rounding, which is unbiased where rounding is stochastic. 1 - b^t is
-expm1(t log b), since the difference of two numbers near 1 has lost most of its digits in fp32.

Cost: a few temporaries of a parameter's size; 2 state elements per element.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

from lt_trainer.errors import RecipeError
from lt_trainer.optimizers.spec import OptimizerSpec, ParamSlice, Slots, StateSlot, UpdateFn

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lt_trainer.config.optimizer_section import OptimizerOptions


FIRST_MOMENT, SECOND_MOMENT = "exp_avg", "exp_avg_sq"

MAX_BETA_BF16 = 1 - 2**-8
"""Largest decay factor that moves a bfloat16 value: half its spacing below 1 is 2**-8, and less is rounded away."""


def _make_update(options: OptimizerOptions, lr: Tensor | float, step: Tensor) -> UpdateFn:
    beta1, beta2, eps = options.beta1, options.beta2, options.eps

    @cache
    def bias_corrections(dtype: torch.dtype) -> list[Tensor]:
        count = step.clamp(min=1).to(dtype)
        return [-(count * math.log(beta)).expm1() if beta > 0 else count * 0 + 1 for beta in (beta1, beta2)]

    def update(param: ParamSlice, weight: Tensor, gradient: Tensor, slots: Slots) -> tuple[Tensor, Slots]:
        first_correction, second_correction = bias_corrections(weight.dtype)
        m, v = slots[FIRST_MOMENT].to(weight.dtype), slots[SECOND_MOMENT].to(weight.dtype)
        m = m + (gradient - m) * (1 - beta1)
        v = v + (gradient * gradient - v) * (1 - beta2)
        change = lr / first_correction * m / ((v / second_correction).sqrt() + eps)
        if param.decay and options.weight_decay > 0:
            change = change + lr * options.weight_decay * weight
        return weight - change, {FIRST_MOMENT: m, SECOND_MOMENT: v}

    return update


def moments_dtype(options: OptimizerOptions) -> str:
    """Return the dtype of slots that follow `optimizer.moments_dtype`."""
    return "bfloat16" if options.moments_dtype == "bfloat16" else ""


def check_bf16_decay(options: OptimizerOptions, *names: str) -> None:
    """Refuse decay factors so near 1 that a moment in bfloat16 would never decrease.

    Raises:
        RecipeError: naming the field.
    """
    for name in names:
        if options.moments_dtype == "bfloat16" and getattr(options, name) > MAX_BETA_BF16:
            problem = "a moment in bfloat16 that decays so slowly is rounded back to what it was"
            values = {f"optimizer.{name}": getattr(options, name), "optimizer.moments_dtype": options.moments_dtype}
            raise RecipeError(problem, values=values, remedy=f"set optimizer.{name} to at most {MAX_BETA_BF16}")


ADAMW = OptimizerSpec(
    name="adamw",
    slots=(StateSlot(name=FIRST_MOMENT, dtype=moments_dtype), StateSlot(name=SECOND_MOMENT, dtype=moments_dtype)),
    options=frozenset({"beta1", "beta2", "eps", "moments_dtype"}),
    make_update=_make_update,
    check=lambda options: check_bf16_decay(options, "beta1", "beta2"),
)
