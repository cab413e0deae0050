"""The steps that `lt train precompile` traces have the shapes of the run's."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from lt_test_helpers.layouts import whole_batch
from lt_trainer.control import Control
from lt_trainer.engine import StepBatch, StepParts, Topology
from lt_trainer.training.benchmark import resolve_bench_recipe
from lt_trainer.training.run import Inputs
from lt_trainer_neuron.graph_extraction import extract_graphs

RECIPE = """
[run]
engine = "neuron"
[model]
hidden_size = 32
intermediate_size = 48
n_heads = 4
n_kv_heads = 2
n_layers = 2
vocab_size = 64
[data]
synthetic = true
seq_len = 16
[batch]
global_batch_size = 6
micro_batch_size = 2
[engine.neuron]
backend = "cpu"
num_neuroncores = 1
"""


class RecordingEngine:
    """Notes the shapes that it is given."""

    topology = Topology(rank=0, world_size=1, dp_rank=0, dp_size=1)
    control = Control()

    def __init__(self) -> None:
        self.calls: list[object] = []

    def step(self, batch: StepParts, lr: float) -> None:
        self.calls.append(("step", whole_batch(batch).input_ids.shape))

    def fetch_metrics(self, pendings: list[None]) -> None:
        self.calls.append("read")

    def validate(self, batches: Iterable[StepBatch]) -> None:
        for batch in batches:
            arrays = (batch.input_ids, batch.labels, batch.position_ids, batch.doc_ids)
            self.calls += [("validate", shape) for shape in {array.shape for array in arrays}]

    def score(self, batch: StepBatch) -> None:
        self.calls.append(("score", batch.labels.shape))

    def close(self) -> None:
        self.calls.append("closed")


@pytest.mark.parametrize(("validate", "evaluate"), [(False, False), (True, False), (True, True)])
def test_a_step_has_all_its_micro_batches_and_validation_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validate: bool, evaluate: bool
) -> None:
    (tmp_path / "run.toml").write_text(RECIPE)
    engine = RecordingEngine()
    monkeypatch.setattr(Inputs, "open_engine", lambda *_: engine)
    resolved = resolve_bench_recipe(str(tmp_path / "run.toml"), "", overrides=[], hyperparameters=None)
    assert extract_graphs(resolved, steps=2, validate=validate, evaluate=evaluate) == 2 + validate + evaluate
    steps = [("step", (3, 2, 16)), "read"] * 2
    traced = [("validate", (1, 2, 16))] * validate + [("score", (1, 2, 16))] * evaluate
    assert engine.calls == [*steps, *traced, "closed"]


def test_the_command_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RECIPE)
    program = [sys.executable, "-m", "lt_trainer_neuron.graph_extraction", "run.toml", "--steps", "2", "--validate"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]
