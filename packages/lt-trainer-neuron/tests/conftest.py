"""Ranks with the engine loaded."""

import pytest

from lt_test_helpers.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    """Up to eight ranks; their server starts when a test first asks for some."""
    modules = ("lt_trainer_neuron.engine", "lt_trainer_neuron.nxd.backend", "lt_test_helpers.layouts", "pytest")
    return RankPool(8, preload=modules)
