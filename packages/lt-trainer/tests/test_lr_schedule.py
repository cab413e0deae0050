"""Learning rates, to the last digit where the formula gives one."""

import doctest
import math
from typing import Any

import pytest

from lt_trainer.config import lr_schedule as module
from lt_trainer.config.lr_schedule import learning_rate
from lt_trainer.config.sections import ScheduleOptions


def plan(
    kind: Any = "cosine", max_steps: int = 10000, warmup_steps: int = 500, min_lr: float = 4e-4
) -> ScheduleOptions:
    return ScheduleOptions(kind=kind, max_steps=max_steps, warmup_steps=warmup_steps, min_lr=min_lr)


def test_the_defaults_of_the_recipe() -> None:
    schedule, peak = ScheduleOptions(), 1.6e-3
    assert learning_rate(0, schedule, peak) == peak / 500
    assert learning_rate(249, schedule, peak) == peak / 2
    assert learning_rate(499, schedule, peak) == peak
    assert learning_rate(500, schedule, peak) < peak
    assert learning_rate(500 + 4750 - 1, schedule, peak) == pytest.approx((peak + 4e-4) / 2, rel=1e-15)
    assert learning_rate(9998, schedule, peak) > 4e-4
    assert learning_rate(9999, schedule, peak) == 4e-4
    assert learning_rate(20000, schedule, peak) == 4e-4


def test_cosine_is_the_stated_formula() -> None:
    for step in (500, 501, 3000, 9000, 9998):
        progress = (step + 1 - 500) / (10000 - 500)
        wanted = 4e-4 + (1.6e-3 - 4e-4) * (1 + math.cos(math.pi * progress)) / 2
        assert learning_rate(step, plan(), 1.6e-3) == wanted


def test_linear_falls_by_equal_steps_to_min_lr() -> None:
    schedule = plan("linear", max_steps=10, warmup_steps=2, min_lr=0.25)
    got = [learning_rate(step, schedule, 1.25) for step in range(12)]
    assert got == [0.625, 1.25, 1.125, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.25, 0.25]


@pytest.mark.parametrize("floor", [4e-4, 1e-5, 0.1, 0.0])
@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_the_last_step_uses_exactly_min_lr(kind: Any, floor: float) -> None:
    assert learning_rate(6, plan(kind, max_steps=7, warmup_steps=3, min_lr=floor), 0.3) == floor


def test_constant_stays_at_the_peak() -> None:
    schedule = plan("constant", max_steps=6, warmup_steps=4)
    assert [learning_rate(step, schedule, 1.0) for step in range(8)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]


def wsd(max_steps: int, warmup: int, decay: int, shape: Any = "linear", floor: float = 0.0) -> ScheduleOptions:
    return ScheduleOptions(
        kind="wsd", max_steps=max_steps, warmup_steps=warmup, min_lr=floor, decay_steps=decay, decay_shape=shape
    )


def test_wsd_warms_up_stays_and_falls_at_the_end() -> None:
    rates = [learning_rate(step, wsd(8, 2, 4), 1.0) for step in range(10)]
    assert rates == [0.5, *[1.0] * 3, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0]
    got = [learning_rate(step, wsd(8, 2, 4, "1-sqrt", 0.2), 1.0) for step in range(9)]
    fall = [0.2 + 0.8 * (1 - math.sqrt(p)) for p in (0.25, 0.5, 0.75)]
    assert got == [0.5, 1.0, 1.0, 1.0, *fall, 0.2, 0.2]


def decay_steps(schedule: ScheduleOptions) -> int:
    """The steps at the end whose rate is below the peak."""
    return sum(learning_rate(step, schedule, 1.0) < 1.0 for step in range(schedule.warmup_steps, schedule.max_steps))


def test_wsd_decays_for_a_tenth_unless_told() -> None:
    assert decay_steps(ScheduleOptions(kind="wsd", max_steps=1000, warmup_steps=0)) == 100
    assert decay_steps(ScheduleOptions(kind="wsd", max_steps=1001, warmup_steps=0)) == 101
    assert decay_steps(ScheduleOptions(kind="wsd", max_steps=100, warmup_steps=98)) == 2
    only_warmup = wsd(4, 4, 0)
    assert [learning_rate(step, only_warmup, 1.0) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_the_stable_part_of_wsd_does_not_depend_on_the_length_of_the_run() -> None:
    assert [learning_rate(s, wsd(100, 5, 10), 1.0) for s in range(90)] == [
        learning_rate(s, wsd(1000, 5, 10), 1.0) for s in range(90)
    ]


def test_no_warmup_starts_in_the_decay_and_only_warmup_ends_at_the_peak() -> None:
    assert [learning_rate(step, plan("linear", 4, 0, 0.0), 1.0) for step in range(4)] == [0.75, 0.5, 0.25, 0.0]
    assert [learning_rate(step, plan("cosine", 4, 4, 0.0), 1.0) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_doctest() -> None:
    result = doctest.testmod(module)
    assert (result.attempted, result.failed) == (2, 0)
