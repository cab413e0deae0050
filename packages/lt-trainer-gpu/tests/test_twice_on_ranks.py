"""Whole runs that stop, resume, save and roll back twice on tensor-parallel and pipeline-parallel ranks.

Each start has processes of its own, as under torchrun. The run in one go and the one that is stopped twice have the
same losses and the same weights, bit for bit.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lt_ckpt import Checkpoint, find_latest_valid
from lt_test_helpers.runs import losses, run
from lt_trainer.config.recipe import load
from lt_trainer.run_directory.jsonl import read_jsonl
from lt_trainer_gpu.engine import GpuEngine

LAYOUTS = {
    "tp": (2, ("parallel.tp=2",)),
    "pp": (2, ("parallel.pp=2",)),
    "fsdp": (2, ()),
    "tp x pp": (4, ("parallel.tp=2", "parallel.pp=2", "model.tie_word_embeddings=true")),
}


def ran(folder: str, sets: tuple[str, ...], stop_after_step: int, bad_calls: tuple[int, ...]) -> int:
    """In a rank: one start of a run; its exit code.

    The calls of `step` in `bad_calls`, counted from 1, have no label, so that their loss is not finite.
    """
    base = {
        "run": {"dir": folder},
        "model": {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "n_heads": 4, "n_kv_heads": 2},
        "data": {"synthetic": True, "seq_len": 16},
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
        "schedule": {"max_steps": 8, "warmup_steps": 1},
        "checkpoint": {"interval": 3, "keep_last": 9},
        "metrics": {"log_interval": 1, "monitor_interval_s": 0.0},
        "fault_tolerance": {"max_skipped_steps": 0},
        "engine": {"gpu": {"device": "cpu", "dtype": "float64"}},
    }
    calls, step = 0, GpuEngine.step

    def step_counted(self: GpuEngine, batch: Any, lr: float) -> Any:
        nonlocal calls
        calls += 1
        if calls in bad_calls:
            batch = copy.copy(batch)
            batch._batch = replace(batch._batch, valid_tokens=0)
        return step(self, batch, lr)

    GpuEngine.step = step_counted  # type: ignore[method-assign] - in a process of its own
    resolved = load(base=base, overrides=["model.n_layers=2", *sets])
    return run(resolved, stop_after_step=stop_after_step)


def weights(folder: Path) -> dict[str, np.ndarray]:
    found, _ = find_latest_valid(folder / "checkpoints")
    assert isinstance(found, Checkpoint)
    assert found.step == 8
    return {name: found.read("weights", name) for name in found.names("weights")}


@pytest.mark.parametrize(
    "name", ["pp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tp", "fsdp", "tp x pp"))]
)
def test_two_stops_and_two_rollbacks_have_the_bits_of_a_run_in_one_go(ranks, tmp_path: Path, name: str) -> None:
    """Calls 5 and 9 fail: step 5 goes back to step 3, and the step that is then 7 back to 6."""
    n, sets = LAYOUTS[name]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert ranks.run(ran, str(whole), sets, 0, (5, 9), ranks=n) == [0] * n
    for step, code in ((4, 75), (6, 75), (0, 0)):
        assert ranks.run(ran, str(stopped), sets, step, (), ranks=n) == [code] * n
    assert ranks.run(ran, str(tmp_path / "plain"), sets, 0, (), ranks=n) == [0] * n
    events = [one for one in read_jsonl(whole / "events.jsonl") if one["event"] == "rollback"]
    assert [(one["step"], one["from_step"]) for one in events] == [(3, 5), (6, 7)]
    assert losses({"run": {"dir": stopped}}) == losses({"run": {"dir": tmp_path / "plain"}})
    wanted, found = weights(tmp_path / "plain"), weights(stopped)
    assert wanted.keys() == found.keys()
    assert [key for key in wanted if wanted[key].tobytes() != found[key].tobytes()] == []
