"""When Python's garbage is collected during training."""

import gc

import pytest

from lt_test_helpers.runs import start
from lt_trainer.training.garbage_collection import YOUNG_GENERATION


@pytest.mark.parametrize(("interval", "expected"), [(3, [2, YOUNG_GENERATION, YOUNG_GENERATION, 2, 2]), (0, [])])
def test_garbage_is_collected_at_the_same_steps_on_all_ranks(
    recipe_base, fake_engine, monkeypatch: pytest.MonkeyPatch, interval: int, expected: list[int]
) -> None:
    """After every third step the young objects, and everything at the start and in the pauses after steps 6 and 8."""
    generations: list[int] = []  # 2 is everything
    monkeypatch.setattr(gc, "collect", lambda generation=2: generations.append(generation))
    recipe_base["schedule"] |= {"max_steps": 8}
    assert start(recipe_base, f"run.gc_interval={interval}") == 0
    assert generations == expected
    assert gc.isenabled()
