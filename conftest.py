"""What holds for all tests: how garbage is collected, and that no example of a property has a deadline.

A full garbage collection looks at the objects of one file of tests, not at those of all. A run collects everything when
it starts and whenever it pauses (`lt_trainer.training.garbage_collection`). After some hundred files a test process
holds millions of objects, mostly modules: without this, each run takes seconds for them.

Hypothesis fails an example of more than 200 ms, and examples that are slow to draw; on a busy machine any may be.
"""

import gc
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
HELPERS = str(Path(__file__).parent / "tests" / "helpers")
"""Ranks and other processes that tests start import `lt_test_helpers` too."""
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (HELPERS, os.environ.get("PYTHONPATH"))))
settings.load_profile("no clock")  # --hypothesis-profile comes later


@pytest.fixture(autouse=True, scope="module")
def garbage_of_earlier_files() -> None:
    """Collect what earlier files of tests left, and leave the rest out of later collections."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let the interpreter take all objects apart as it always does."""
    gc.unfreeze()
