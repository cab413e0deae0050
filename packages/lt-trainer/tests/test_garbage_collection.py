"""When Python's garbage is collected during training."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from lt_trainer.training.garbage_collection import YOUNG_GENERATION, GarbageCollection


class Cyclic:
    """An object that only the garbage collector frees."""

    def __init__(self) -> None:
        self.me = self


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


def test_what_was_there_before_is_left_alone_at_pauses_and_given_back_at_the_end() -> None:
    gc.unfreeze()
    with GarbageCollection(1) as garbage:
        assert gc.get_freeze_count() > len(gc.get_objects())
        alive = weakref.finalize(Cyclic(), lambda: None)
        garbage.on_pause()
        assert not alive.alive
    assert gc.get_freeze_count() < len(gc.get_objects())


def test_a_caller_that_had_frozen_objects_keeps_them_so(collected: list[int]) -> None:
    gc.freeze()
    with GarbageCollection(1):
        pass
    assert gc.get_freeze_count() > len(gc.get_objects())
