"""Learning rate as a pure function of the step.

`step` counts the updates already done, so update number t = step + 1 uses `lr(step, ...)`. With W warm-up steps, N
steps in all, D of them in which it falls, peak learning rate `peak` and final learning rate `min_lr`:

    t <= W:          peak * t / W                                   (the first update uses peak / W, update W the peak)
    W < t <= N - D:  peak                                           (wsd: D = decay_steps; cosine, linear: D = N - W)
    t > N - D:       p = min(1, (t - (N - D)) / D), then
                     cosine:        min_lr + (peak - min_lr) * (1 + cos(pi * p)) / 2
                     linear:        min_lr + (peak - min_lr) * (1 - p)
                     wsd, 1-sqrt:   min_lr + (peak - min_lr) * (1 - sqrt(p))
                     wsd, linear:   as linear
    constant:        peak, always after the warm-up

so the last update, t = N, uses exactly min_lr (but for constant), and any update after it too. Nothing is kept between
calls: a resumed run asks for the same numbers.

Warm-up, stable, decay (wsd) is of Hu and others, "MiniCPM", https://arxiv.org/abs/2404.06395, where the rate falls in
a tenth of the steps; the shape 1 - sqrt of Hagele and others, "Scaling Laws and Compute-Optimal Training Beyond Fixed
Training Durations", https://arxiv.org/abs/2405.18392. Since nothing before the decay depends on N, a run can be made
longer from a checkpoint of its stable part, or decayed from there more than once.
"""

import math
from collections.abc import Callable

from lt_trainer.sections import ScheduleOptions

__all__ = ["DECAYS", "lr"]


def _cosine(progress: float, peak: float, floor: float) -> float:
    return floor + (peak - floor) * (1.0 + math.cos(math.pi * progress)) / 2.0


def _linear(progress: float, peak: float, floor: float) -> float:
    return floor + (peak - floor) * (1.0 - progress)


def _one_minus_sqrt(progress: float, peak: float, floor: float) -> float:
    return floor + (peak - floor) * (1.0 - math.sqrt(progress))


DECAYS: dict[str, Callable[[float, float, float], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "1-sqrt": _one_minus_sqrt,
}
"""By kind, and for wsd by shape."""


def lr(step: int, schedule: ScheduleOptions, peak: float) -> float:
    """The learning rate of the update that follows `step` finished updates.

    Args:
        step: Updates already done, from 0.
        schedule: Kind, warm-up steps, steps in all and final learning rate.
        peak: The highest learning rate, `optimizer.lr`.

    Returns:
        The learning rate of update number `step + 1`.

    Example:
        >>> schedule = ScheduleOptions(kind="cosine", max_steps=10, warmup_steps=4, min_lr=0.1)
        >>> [round(lr(step, schedule, 1.0), 3) for step in range(10)]
        [0.25, 0.5, 0.75, 1.0, 0.94, 0.775, 0.55, 0.325, 0.16, 0.1]
    """
    assert step >= 0, step
    update = step + 1
    if update <= schedule.warmup_steps:
        return peak * update / schedule.warmup_steps
    decay_steps = schedule.decay
    begun = update - (schedule.max_steps - decay_steps)
    if schedule.kind == "constant" or begun <= 0:
        return peak
    progress = min(1.0, begun / decay_steps) if decay_steps else 1.0
    return DECAYS[schedule.decay_shape if schedule.kind == "wsd" else schedule.kind](progress, peak, schedule.min_lr)
