"""A step in parts: the same micro-batches as in one, few of them held at a time, and what is said before."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lt_data import Stream
from lt_test_helpers.layouts import whole_batch
from lt_test_helpers.runs import check, losses, start
from lt_trainer.config.recipe import load
from lt_trainer.data import step_parts
from lt_trainer.data.step_parts import StreamStep
from lt_trainer.data.synthetic import SyntheticRows
from lt_trainer.data.training_data import open_data, open_stream
from lt_trainer.engine import Topology

ONE = Topology(rank=0, world_size=1, dp_rank=0, dp_size=1)


@pytest.mark.parametrize("read_ahead", [False, True])
def test_the_parts_are_the_step_each_time(recipe_base, monkeypatch, read_ahead: bool) -> None:
    recipe_base["batch"] = {"global_batch_size": 14, "micro_batch_size": 2}
    recipe = load(base=recipe_base).recipe
    stream = open_stream(recipe, open_data(recipe), ONE, None)
    for _ in range(3):
        batch = stream.take()
        whole = StreamStep(batch, 2, read_ahead=read_ahead)
        with monkeypatch.context() as patch:
            patch.setattr(step_parts, "PART_POSITIONS", 200)  # 3 micro-batches of 2 rows
            parts = StreamStep(batch, 2, read_ahead=read_ahead)
        for _ in range(2):
            assert [part.n_micro_batches for part in parts.parts()] == [3, 3, 1]
            expected = vars(whole_batch(whole))
            assert all(np.array_equal(array, expected[name]) for name, array in vars(whole_batch(parts)).items())
        assert (parts.n_micro_batches, parts.valid_tokens) == (7, whole.valid_tokens)
        assert parts.document_length == whole.document_length


def test_a_large_step_is_never_held_whole(monkeypatch) -> None:
    """Its 2^16 rows of 64 positions take 64 MiB as arrays."""
    monkeypatch.setattr(step_parts, "PART_POSITIONS", 2**16)
    rows = SyntheticRows(vocab_size=300, seq_len=64, seed=0)
    stream = Stream(rows, global_batch_size=2**16, micro_batch_size=2**8)
    tracemalloc.start()
    n_rows = sum(part.input_ids.size // 64 for part in StreamStep(stream.take(), 2**8, read_ahead=True).parts())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert n_rows == 2**16
    assert peak < 12 * 2**20


def test_a_run_in_parts_trains_alike_and_a_check_says_what_it_holds(
    recipe_base: Any, fake_engine, monkeypatch, capsys, tmp_path: Path
) -> None:
    assert start(recipe_base) == 0
    whole = losses(recipe_base)
    monkeypatch.setattr(step_parts, "PART_POSITIONS", 1)
    recipe_base["run"]["dir"] = str(tmp_path / "parts")
    assert start(recipe_base) == 0
    assert losses(recipe_base) == whole
    check(load(base=recipe_base, overrides=["run.engine=fake", "schedule.max_steps=30"]), environ={})
    told = "check: 8 rows of 32 positions a step and rank, made as they are needed: up to 1.19e-05 GiB of host memory"
    assert told in capsys.readouterr().out
