"""Learning-rate schedule as a pure function of the step.

`step` is the number of completed steps, so step number t = step + 1 uses `learning_rate(step, ...)`. With W warmup
steps, N steps in total, D decay steps, peak learning rate `peak` and final learning rate `min_lr`:

    t <= W:          peak * t / W                                   (the first step uses peak / W, step W the peak)
    W < t <= N - D:  peak                                           (wsd: D = decay_steps; cosine, linear: D = N - W)
    t > N - D:       p = min(1, (t - (N - D)) / D), then
                     cosine:        min_lr + (peak - min_lr) * (1 + cos(pi * p)) / 2
                     linear:        min_lr + (peak - min_lr) * (1 - p)
                     wsd, 1-sqrt:   min_lr + (peak - min_lr) * (1 - sqrt(p))
                     wsd, linear:   as linear
    constant:        peak, always after the warmup

So the last step, t = N, and all later ones use exactly min_lr (except constant). No state is kept: a resumed run
computes the same numbers.

Warmup, stable, decay (wsd) is by Hu and others, "MiniCPM", https://arxiv.org/abs/2404.06395, with a decay over a tenth
of the steps; the shape 1 - sqrt is by Hagele and others, "Scaling Laws and Compute-Optimal Training Beyond Fixed
Training Durations", https://arxiv.org/abs/2405.18392. Since nothing before the decay depends on N (where
the recipe gives W), a run can be extended from a checkpoint of its stable part, or decayed from there several times.
"""

import math
from collections.abc import Callable

from lt_trainer.config.sections import ScheduleOptions

DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: (1.0 + math.cos(math.pi * progress)) / 2.0,
    "linear": lambda progress: 1.0 - progress,
    "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""Part of the way from the peak to min_lr that is left, by schedule kind, for wsd by shape."""


def learning_rate(step: int, schedule: ScheduleOptions, peak: float) -> float:
    """Return the learning rate of step number `step + 1`.

    Args:
        step: Number of completed steps.
        schedule: Kind, warmup, decay and total steps, final learning rate.
        peak: Peak learning rate, `optimizer.lr`.

    Example:
        >>> schedule = ScheduleOptions(kind="cosine", max_steps=10, warmup_steps=4, min_lr=0.1)
        >>> [round(learning_rate(step, schedule, 1.0), 3) for step in range(10)]
        [0.25, 0.5, 0.75, 1.0, 0.94, 0.775, 0.55, 0.325, 0.16, 0.1]
    """
    assert step >= 0, step
    number = step + 1
    if number <= schedule.warmup_steps:
        return peak * number / schedule.warmup_steps
    decay_steps = after_warmup = schedule.max_steps - schedule.warmup_steps
    if schedule.kind == "wsd":
        decay_steps = schedule.decay_steps or min(after_warmup, -(-schedule.max_steps // 10))
    decayed_steps = number - (schedule.max_steps - decay_steps)
    if schedule.kind == "constant" or decayed_steps <= 0:
        return peak
    progress = min(1.0, decayed_steps / max(1, decay_steps))
    left = DECAYS[schedule.decay_shape if schedule.kind == "wsd" else schedule.kind](progress)
    return schedule.min_lr + (peak - schedule.min_lr) * left
