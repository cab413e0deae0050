"""Learning rates, to the last digit where the formula gives one."""

import doctest
import math
from typing import Any

import pytest

from lt_trainer.config import lr_schedule as module
from lt_trainer.config.lr_schedule import learning_rate
from lt_trainer.config.sections import ScheduleOptions


def plan(kind: Any, max_steps: int, warmup: int, floor: float, **decay: Any) -> ScheduleOptions:
    return ScheduleOptions(kind=kind, max_steps=max_steps, warmup_steps=warmup, min_lr=floor, **decay)


def test_the_defaults_of_the_recipe() -> None:
    schedule, peak = ScheduleOptions(), 1.6e-3
    assert learning_rate(0, schedule, peak) == peak / 500
    assert learning_rate(249, schedule, peak) == peak / 2
    assert learning_rate(499, schedule, peak) == peak
    assert learning_rate(500, schedule, peak) < peak
    assert learning_rate(9998, schedule, peak) > 4e-4
    assert learning_rate(9999, schedule, peak) == 4e-4
    assert learning_rate(20000, schedule, peak) == 4e-4
    for step in (500, 501, 3000, 9000, 9998):
        progress = (step + 1 - 500) / (10000 - 500)
        wanted = 4e-4 + (1.6e-3 - 4e-4) * (1 + math.cos(math.pi * progress)) / 2
        assert learning_rate(step, schedule, peak) == wanted


UP = [0.25, 0.5, 0.75, 1.0]
SQRT = [0.2 + 0.8 * (1 - math.sqrt(p)) for p in (0.25, 0.5, 0.75)]


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (plan("linear", 10, 2, 0.5), [0.5, *(1 - k / 16 for k in range(9)), 0.5, 0.5]),
        (plan("constant", 6, 4, 4e-4), [*UP, 1.0, 1.0, 1.0, 1.0]),
        (plan("wsd", 8, 2, 0.0, decay_steps=4, decay_shape="linear"), [0.5, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0, 0]),
        (plan("wsd", 8, 2, 0.2, decay_steps=4), [0.5, 1, 1, 1, *SQRT, 0.2, 0.2]),
        (plan("wsd", 4, 4, 0.0, decay_steps=0), UP),
        (plan("linear", 4, 0, 0.0), [0.75, 0.5, 0.25, 0.0]),  # no warmup starts in the decay
        (plan("cosine", 4, 4, 0.0), UP),
    ],
)
def test_the_rate_of_each_step(schedule: ScheduleOptions, rates: list[float]) -> None:
    assert [learning_rate(step, schedule, 1.0) for step in range(len(rates))] == rates


@pytest.mark.parametrize("floor", [4e-4, 1e-5, 0.1, 0.0])
@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_the_last_step_uses_exactly_min_lr(kind: Any, floor: float) -> None:
    assert learning_rate(6, plan(kind, 7, 3, floor), 0.3) == floor


@pytest.mark.parametrize(("max_steps", "warmup", "decay"), [(1000, 0, 100), (1001, 0, 101), (100, 98, 2)])
def test_wsd_decays_for_a_tenth_unless_told(max_steps: int, warmup: int, decay: int) -> None:
    schedule = ScheduleOptions(kind="wsd", max_steps=max_steps, warmup_steps=warmup)
    assert sum(learning_rate(step, schedule, 1.0) < 1.0 for step in range(warmup, max_steps)) == decay


def test_doctest() -> None:
    result = doctest.testmod(module)
    assert (result.attempted, result.failed) == (2, 0)
