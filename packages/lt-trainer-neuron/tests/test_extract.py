"""The steps that `lt train precompile` traces have the shapes of the run's."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from lt_trainer.bench import bench_recipe
from lt_trainer.control import SoloControl
from lt_trainer.engine import StepBatch, Topology
from lt_trainer.run import Plan
from lt_trainer_neuron.extract import extract

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
global_batch = 6
micro_batch = 2
[engine.neuron]
backend = "cpu"
num_neuroncores = 1
"""


class ToldEngine:
    """Notes the shapes that it is given."""

    topology = Topology(rank=0, world=1, dp_rank=0, dp_size=1)
    control = SoloControl()

    def __init__(self) -> None:
        self.told: list[object] = []

    def step(self, batch: StepBatch, lr: float) -> None:
        self.told.append(("step", batch.input_ids.shape))

    def read(self, pendings: list[None]) -> None:
        self.told.append("read")

    def evaluate(self, batches: Iterable[StepBatch]) -> None:
        for batch in batches:
            arrays = (batch.input_ids, batch.labels, batch.position_ids, batch.doc_ids)
            self.told += [("evaluate", shape) for shape in {array.shape for array in arrays}]

    def close(self) -> None:
        self.told.append("closed")


@pytest.mark.parametrize("evaluate", [False, True])
def test_a_step_has_all_its_micro_batches_and_validation_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluate: bool
) -> None:
    (tmp_path / "run.toml").write_text(RECIPE)
    engine = ToldEngine()
    monkeypatch.setattr(Plan, "open_engine", lambda _: engine)
    resolved = bench_recipe(str(tmp_path / "run.toml"), "", sets=[], hyperparameters=None)
    assert extract(resolved, steps=2, evaluate=evaluate) == 2 + evaluate
    steps = [("step", (3, 2, 16)), "read"] * 2
    assert engine.told == [*steps, *([("evaluate", (1, 2, 16))] if evaluate else []), "closed"]
