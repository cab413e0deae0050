"""Nothing is compiled after `lt train precompile`, on torch-xla's CPU device (one rank).

A run, its validation, its evaluation, its saves, a resume and a start from a model's weights have no graph that is not
in the set of graph extraction. Graphs between ranks (ZeRO-1's collectives, pipeline stages) are those of a step; states
move between host and device without a graph, also with ZeRO-1's padding.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lt_test_helpers.xla_processes import run_worker

pytestmark = pytest.mark.skipif(find_spec("torch_xla") is None, reason="torch-xla is not installed (extra xla-cpu)")

WORKER = Path(__file__).parent / "xla_graphs" / "worker.py"
RECIPES = [
    {"name": "micro-batch", "sets": []},
    {"name": "step-tied", "sets": ["engine.neuron.graph_scope=step", "model.tie_word_embeddings=true"]},
    {"name": "masters", "sets": ["engine.neuron.precision=fp32_master_weights"]},
    {"name": "downcast", "sets": ["engine.neuron.precision=downcast", "engine.neuron.save_xser=false"]},
]
NAMES = [recipe["name"] for recipe in RECIPES]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Exit code and compiled graphs of each part, by recipe."""
    return run_worker(WORKER, tmp_path_factory.mktemp("graphs"), RECIPES)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_compiles_nothing_that_precompile_has_not(counted: dict[str, Any], name: str) -> None:
    found = counted[name]
    n_calls, n_graphs = found.pop("precompile")
    assert n_calls == 5
    assert n_graphs >= 4
    assert found == {"run": [75, 0], "resume": [0, 0], "init_from": [0, 0], "padding": [0, 0]}
