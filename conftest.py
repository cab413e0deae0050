"""What holds for all tests: a full garbage collection looks at the objects of one file of tests, not at those of all.

A run collects everything when it starts and whenever it pauses (`lt_trainer.training.garbage_collection`). After some
hundred files a test process holds millions of objects, mostly modules: without this, each run takes seconds for them.
"""

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def garbage_of_earlier_files() -> None:
    """Collect what earlier files of tests left, and leave the rest out of later collections."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let the interpreter take all objects apart as it always does."""
    gc.unfreeze()
