"""When Python's garbage is collected during training."""

import gc
from collections.abc import Iterator

import pytest

from lt_test_helpers.runs import run
from lt_trainer.config.recipe import load
from lt_trainer.training.garbage_collection import YOUNG_GENERATION


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Generations in the order in which they were collected; 2 is everything."""
    generations: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: generations.append(generation))
    yield generations
    gc.enable()


def test_garbage_is_collected_at_the_same_steps_on_all_ranks(recipe_base, fake_engine, collected: list[int]) -> None:
    """After every third step the young objects, and everything at the start and in the pauses after steps 6 and 8."""
    recipe_base["schedule"] |= {"max_steps": 8}
    assert run(load(base=recipe_base, overrides=["run.engine=fake", "run.gc_interval=3"]), environ={}) == 0
    assert collected == [2, YOUNG_GENERATION, YOUNG_GENERATION, 2, 2]
    assert gc.isenabled()


def test_an_interval_of_zero_leaves_it_to_python(recipe_base, fake_engine, collected: list[int]) -> None:
    assert run(load(base=recipe_base, overrides=["run.engine=fake", "run.gc_interval=0"]), environ={}) == 0
    assert collected == []
