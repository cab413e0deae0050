"""When Python's garbage is collected during training."""

import gc
from collections.abc import Iterator

import pytest

from lt_trainer.training.garbage_collection import YOUNG_GENERATION, GarbageCollection


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Generations in the order in which they were collected; 2 is everything."""
    generations: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: generations.append(generation))
    yield generations
    gc.enable()


def test_garbage_is_collected_at_the_same_steps_on_all_ranks(collected: list[int]) -> None:
    with GarbageCollection(3) as garbage:
        assert not gc.isenabled()
        for step in range(1, 8):
            garbage.on_step_end(step)
        garbage.on_pause()
    assert gc.isenabled()
    assert collected == [2, YOUNG_GENERATION, YOUNG_GENERATION, 2]


def test_an_interval_of_zero_leaves_it_to_python(collected: list[int]) -> None:
    with GarbageCollection(0) as garbage:
        assert gc.isenabled()
        garbage.on_step_end(1)
        garbage.on_pause()
    assert collected == []


def test_a_caller_that_had_disabled_it_keeps_it_so(collected: list[int]) -> None:
    gc.disable()
    with GarbageCollection(1):
        pass
    assert not gc.isenabled()
