"""What the loop logs of a step, whatever the ranks and the rows: with stubs for all around it."""

from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest

from lt_data import StreamState
from lt_test_helpers.layouts import step_batch
from lt_trainer.config.recipe import load
from lt_trainer.config.sections import Recipe
from lt_trainer.engine import HostStopwatch, SoloControl, StepBatch, StepMetrics, Topology
from lt_trainer.resilience.stop_signals import StopSignals
from lt_trainer.training.loop import TrainingLoop

SEQ_LEN, GLOBAL_BATCH = 32, 8


@dataclass
class Engine:
    """One rank of several; its losses count the calls."""

    topology: Topology
    control: SoloControl = field(default_factory=SoloControl)
    stopwatch: HostStopwatch = field(default_factory=HostStopwatch)
    calls: int = 0

    def step(self, batch: StepBatch, lr: float) -> float:
        self.calls += 1
        return float(self.calls)

    def fetch_metrics(self, pendings: list[float]) -> list[StepMetrics]:
        return [StepMetrics(loss=one, grad_norm=1.0) for one in pendings]

    def peak_memory_bytes(self) -> int:
        return 0

    def on_step_begin(self, step: int) -> list[Path]:
        return []


@dataclass
class Batches:
    """This rank's share of each step, in rows of a length."""

    dp_size: int
    length: int
    state: StreamState = field(default_factory=lambda: StreamState(step=0, row=0, seed=0, fingerprint=""))

    def checkpoint_state(self) -> StreamState:
        return self.state

    def next_batch(self) -> StepBatch:
        shape = (2, GLOBAL_BATCH * SEQ_LEN // self.length // self.dp_size // 2, self.length)
        array = np.zeros(shape, np.int32)
        return step_batch(input_ids=array, labels=array, position_ids=array, doc_ids=array, valid_tokens=77)


@pytest.fixture
def recipe() -> Recipe:
    base = {
        "data": {"store": "unused", "seq_len": SEQ_LEN},
        "batch": {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": 1},
        "schedule": {"max_steps": 5, "warmup_steps": 2},
        "metrics": {"log_interval": 2},
    }
    return load(base=base).recipe


@pytest.mark.parametrize("length", [SEQ_LEN, SEQ_LEN // 4])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_rows_are_those_of_the_global_batch(recipe: Recipe, dp_size: int, length: int) -> None:
    """Tensor-parallel peers (twice as many ranks here) read the same rows, which count once."""
    engine = Engine(Topology(rank=0, world_size=2 * dp_size, dp_rank=0, dp_size=dp_size))
    run, log = (
        MagicMock(recipe=recipe, engine=engine, batches=Batches(dp_size, length), stop=StopSignals()),
        MagicMock(),
    )
    run.log, run.data.validation, run.checkpoints.poll.return_value = log, (), False
    loop = TrainingLoop(run)
    assert loop.train(0, 0) == 0
    assert loop.step == 5
    records = [record for call in log.log_steps.call_args_list for record in call.args[0]]
    assert [(r.step, r.rows, r.row_length, r.valid_tokens) for r in records] == [
        (step, GLOBAL_BATCH, length, 77) for step in range(1, 6)
    ]
    assert [r.loss for r in records] == [1.0, 2.0, 3.0, 4.0, 5.0]
