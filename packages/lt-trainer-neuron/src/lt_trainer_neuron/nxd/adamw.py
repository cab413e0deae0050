"""AdamW in operations that a lazy device keeps in one graph; a tensor on the device can make a step without effect.

    m = b1 m + (1 - b1) g,    v = b2 v + (1 - b2) g^2,    w = w (1 - lr d) - lr m' / (sqrt(v') + eps)

with m' = m / (1 - b1^t), v' = v / (1 - b2^t) and t the steps that had an effect, counted on the device. lr and t are
tensors: torch's own AdamW takes the learning rate as a number, which would be a constant of the graph. 1 - b^t is
-expm1(t log b), since in fp32 the difference of two numbers near 1 has lost most of its digits.

No number near 1 is ever a factor: with `bf16_sr` everything here is bf16 on the device, where 0.999 and 1 - lr d are 1,
so that v would only grow and nothing would decay. So it is m + (1 - b1) (g - m), v likewise, and w - (lr d w + ...),
each with one rounding, which is right on average where it is by chance. t is an integer: bf16 does not count to 257.

Where the step is not to count, what was there is chosen again instead of what was computed: a nan is never multiplied.

Cost: a few temporaries of a parameter's size; state is 2 numbers per parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lt_trainer.sections import OptimizerOptions

__all__ = ["AdamW"]


class AdamW:
    """See the module's text.

    Args:
        weights: what is updated, by name; the moments take their shapes, dtypes and device.
        decays: names of those that decay.
        options: the recipe's `[optimizer]`.

    Attributes:
        exp_avg: first moments by name.
        exp_avg_sq: second moments by name.
        step: steps that had an effect, a scalar on the device.
    """

    def __init__(self, weights: Mapping[str, Tensor], decays: frozenset[str], options: OptimizerOptions) -> None:
        self._options, self._decays = options, decays
        self.exp_avg = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self.exp_avg_sq = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        some = next(iter(weights.values()))
        self._dtype = some.dtype
        self.step = torch.zeros((), dtype=torch.int32, device=some.device)

    @torch.no_grad()
    def update(
        self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], lr: Tensor, finite: Tensor, scale: Tensor
    ) -> None:
        """Update weights in place where `finite` holds, else change nothing.

        Args:
            weights: by name, as they were given first.
            gradients: of the weights' shapes and dtypes.
            lr: learning rate, a scalar on the device.
            finite: a bool on the device.
            scale: what the gradients are multiplied with first, a scalar on the device.
        """
        beta1, beta2, eps = self._options.beta1, self._options.beta2, self._options.eps
        self.step.add_(finite.to(self.step.dtype))
        counted = self.step.clamp(min=1).to(self._dtype)
        first_correction = -torch.expm1(counted * math.log(beta1)) if beta1 > 0 else torch.ones_like(counted)
        second_correction = -torch.expm1(counted * math.log(beta2)) if beta2 > 0 else torch.ones_like(counted)
        rate = lr / first_correction
        for name, weight in weights.items():
            m, v, gradient = self.exp_avg[name], self.exp_avg_sq[name], gradients[name] * scale
            new_m = m + (gradient - m) * (1 - beta1)
            new_v = v + (gradient * gradient - v) * (1 - beta2)
            change = rate * new_m / ((new_v / second_correction).sqrt() + eps)
            if name in self._decays and self._options.weight_decay > 0:
                change = change + lr * self._options.weight_decay * weight
            new_weight = weight - change
            m.copy_(torch.where(finite, new_m, m))
            v.copy_(torch.where(finite, new_v, v))
            weight.copy_(torch.where(finite, new_weight, weight))
