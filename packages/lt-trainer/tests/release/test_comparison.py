"""Comparison of losses and environments: equal bits, a stated tolerance, and where two runs part."""

import math

import pytest

from lt_trainer.release.comparison import compare_environments, compare_losses

RELEASED = [{"step": step, "loss": 4.0 - step / 10, "grad_norm": 1.0} for step in (1, 2, 3, 4)]


def repeated(**changes: float) -> list[dict[str, float]]:
    """The same records with another loss at step 3."""
    return [{**record, **(changes if record["step"] == 3 else {})} for record in RELEASED]


def test_equal_bits_are_equal() -> None:
    result = compare_losses(RELEASED, repeated(), last_step=4, tolerance=0.0)
    assert (result.is_equal, result.is_within_tolerance, result.n_steps) == (True, True, 4)
    both_nan = [{"step": 1, "loss": math.nan, "grad_norm": math.nan}]
    assert compare_losses(both_nan, both_nan, last_step=1, tolerance=0.0).is_equal


def test_the_last_bit_of_one_loss_is_found() -> None:
    loss = math.nextafter(RELEASED[2]["loss"], 5)
    result = compare_losses(RELEASED, repeated(loss=loss), last_step=4, tolerance=1e-4)
    assert (result.is_equal, result.is_within_tolerance, result.first_different) == (False, True, 3)
    assert result.values == (("loss", RELEASED[2]["loss"], loss),)
    assert compare_losses(RELEASED, repeated(loss=loss), last_step=2, tolerance=0.0).is_equal, (
        "beyond the steps asked for"
    )


def test_of_several_steps_that_differ_the_first_is_told() -> None:
    later = [{**record, "loss": record["loss"] + record["step"] * (record["step"] > 1)} for record in RELEASED]
    result = compare_losses(RELEASED, later, last_step=4, tolerance=0.0)
    assert result.first_different == 2
    assert result.values == (("loss", RELEASED[1]["loss"], later[1]["loss"]),)


def test_another_norm_is_a_difference_too() -> None:
    result = compare_losses(RELEASED, repeated(grad_norm=1.5), last_step=4, tolerance=0.0)
    assert (result.is_equal, result.first_different, result.max_relative_difference) == (False, 3, 0.0)


@pytest.mark.parametrize("loss", [3.8, math.nan, math.inf])
def test_a_loss_beyond_the_tolerance_is_different(loss: float) -> None:
    result = compare_losses(RELEASED, repeated(loss=loss), last_step=4, tolerance=1e-4)
    assert (result.is_equal, result.is_within_tolerance) == (False, False)


def test_steps_that_were_not_run_are_no_success() -> None:
    result = compare_losses(RELEASED, repeated()[:2], last_step=4, tolerance=1.0)
    assert (result.is_equal, result.is_within_tolerance, result.missing) == (False, False, (3, 4))
    assert not compare_losses([], [], last_step=4, tolerance=1.0).is_equal


def test_environments_differ_by_name_and_value() -> None:
    released = {
        "hostname": "<host>",
        "python": "3.11.7",
        "packages": {"torch": "2.15.0"},
        "variables": {"X": "<host>", "MASTER_PORT": "1"},
    }
    here = {"hostname": "b", "python": "3.12.1", "packages": {"torch": "2.15.0"}, "variables": {"X": "h"}, "cpu": "c"}
    assert compare_environments(released, here) == [
        "python: 3.11.7 in the release, 3.12.1 here",
        "cpu: absent in the release, c here",
    ]
