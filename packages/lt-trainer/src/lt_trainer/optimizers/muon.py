"""Muon for the matrices of the blocks, AdamW for embedding, head, routers, norms and biases.

    m = mu m + (1 - mu) g,    u = mu m + (1 - mu) g (Nesterov; else u = m),    w = w - lr s O(u) - lr d w

O(u) is u with singular values near 1 (the semi-orthogonal matrix closest to it), by `newton_schulz_steps` steps of a
quintic Newton-Schulz iteration: X = u / |u|, then X = a X + (b A + c A^2) X with A = X X^T and a, b, c = 3.4445,
-4.7750, 2.0315 (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/). These coefficients leave singular
values between about 0.7 and 1.2 after 5 steps.

The scale s, for a matrix of R rows and C columns, is `optimizer.adjust_lr`:

- "match_rms_adamw": 0.2 sqrt(max(R, C)), so that an update has the root mean square 0.2 of AdamW's, and learning rate
  and weight decay of AdamW can be used as they are (Moonlight, arXiv:2502.16982);
- "original": sqrt(max(1, R / C)) (Jordan et al.), with a learning rate of its own, as 0.02.

Query, key and value projections are parameters of their own and need no splitting; of stacked experts each has its own
O(u). O needs whole matrices: the rest is per slice. The results do not depend on the mesh, as O is computed by one rank
that has all of u.

Cost: 1 state element per element of a matrix; 2 R C R + R^3 multiplications and as many additions per step of the
iteration, R <= C, and temporaries of 2 R C + 3 R^2 elements.

Shapes: R rows and C columns, R <= C.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lt_trainer.optimizers.adamw import ADAMW, check_bf16_decay, moments_dtype
from lt_trainer.optimizers.spec import MatrixTransform, OptimizerSpec, ParamSlice, Slots, StateSlot, UpdateFn

if TYPE_CHECKING:
    from torch import Tensor

    from lt_trainer.config.optimizer_section import OptimizerOptions


MOMENTUM = "momentum"
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MIN_NORM = 1e-7
"""Smaller norms are not divided by: the update of a zero gradient is zero."""
ADAMW_RMS = 0.2
"""Root mean square of AdamW's update, by measurements of Moonlight."""


def lr_factor(options: OptimizerOptions, shape: tuple[int, ...]) -> float:
    """Return the factor s of a matrix of this shape."""
    rows, columns = shape[-2:]
    if options.adjust_lr == "original":
        return max(1.0, rows / columns) ** 0.5
    return ADAMW_RMS * max(rows, columns) ** 0.5


def _direction(options: OptimizerOptions, gradient: Tensor, slots: Slots) -> tuple[Tensor, Slots]:
    momentum = slots[MOMENTUM].to(gradient.dtype)
    momentum = momentum + (gradient - momentum) * (1 - options.momentum)
    value = gradient + (momentum - gradient) * options.momentum if options.nesterov else momentum
    return value, {MOMENTUM: momentum}


def _orthogonalize(options: OptimizerOptions, matrix: Tensor) -> Tensor:
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x_RC = matrix.mT if is_tall else matrix
    x_RC = x_RC / x_RC.norm(dim=(-2, -1), keepdim=True).clamp(min=MIN_NORM)
    for _ in range(options.newton_schulz_steps):
        gram_RR = x_RC @ x_RC.mT
        factor_RR = _add_product(gram_RR, gram_RR, gram_RR, b, c)
        x_RC = _add_product(x_RC, factor_RR, x_RC, a, 1.0)
    return x_RC.mT if is_tall else x_RC


def _add_product(x: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> Tensor:
    """Return beta x + alpha left @ right, of a matrix or of each of a stack."""
    return (x.baddbmm if x.ndim == 3 else x.addmm)(left, right, beta=beta, alpha=alpha)


def _make_update(options: OptimizerOptions, lr: Tensor | float, step: Tensor) -> UpdateFn:
    def update(param: ParamSlice, weight: Tensor, gradient: Tensor, slots: Slots) -> tuple[Tensor, Slots]:
        (spec,) = param.specs
        change = lr * lr_factor(options, spec.shape) * gradient.to(weight.dtype)
        if param.decay and options.weight_decay > 0:
            change = change + lr * options.weight_decay * weight
        return weight - change, {MOMENTUM: slots[MOMENTUM]}

    return update


MUON = OptimizerSpec(
    name="muon",
    slots=(StateSlot(name=MOMENTUM, dtype=moments_dtype),),
    options=ADAMW.options | {"momentum", "nesterov", "adjust_lr", "newton_schulz_steps", "newton_schulz_dtype"},
    make_update=_make_update,
    check=lambda options: check_bf16_decay(options, "beta1", "beta2", "momentum"),
    transform=MatrixTransform(
        direction=_direction,
        transform=_orthogonalize,
        dtype=lambda options: "bfloat16" if options.newton_schulz_dtype == "bfloat16" else "",
    ),
    applies_to=lambda spec: spec.type in ("matrix", "experts"),
    others=ADAMW,
)
