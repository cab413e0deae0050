"""What the loop tells the journal of a step, whatever the ranks and the rows: with stubs for all around it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lt_data import StreamState
from lt_test_helpers.layouts import step_batch
from lt_trainer.config.recipe import load
from lt_trainer.config.sections import Recipe
from lt_trainer.control import SoloControl
from lt_trainer.engine import StepBatch, StepMetrics, Topology
from lt_trainer.resilience.stop_signals import StopSignals
from lt_trainer.run_directory.records import StepRecord
from lt_trainer.timing import HostStopwatch
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


@dataclass
class RecordingStubs:
    """A journal, a watch and a way to save that keep what they hear."""

    records: list[StepRecord] = field(default_factory=list)

    def log_steps(self, records: list[StepRecord], memory_bytes: int, times: Any) -> None:
        self.records += records

    def mark(self, stage: str, step: int) -> None:
        pass

    def save(self, position: StreamState, *, wait: bool) -> None:
        pass

    def has_failed(self) -> bool:
        return False

    pause = unpause = lambda self: None


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
    told, engine = RecordingStubs(), Engine(Topology(rank=0, world_size=2 * dp_size, dp_rank=0, dp_size=dp_size))
    loop = TrainingLoop(
        recipe=recipe,
        engine=engine,  # pyright: ignore[reportArgumentType] - what this loop asks of one
        batches=Batches(dp_size, length),  # pyright: ignore[reportArgumentType]
        logger=told,  # pyright: ignore[reportArgumentType]
        stop=StopSignals(),
        watchdog=told,
        checkpointer=told,  # pyright: ignore[reportArgumentType]
        rollback=lambda batches: None,
    )
    assert loop.run().step == 5
    assert [(r.step, r.rows, r.row_length, r.valid_tokens) for r in told.records] == [
        (step, GLOBAL_BATCH, length, 77) for step in range(1, 6)
    ]
    assert [r.loss for r in told.records] == [1.0, 2.0, 3.0, 4.0, 5.0]
