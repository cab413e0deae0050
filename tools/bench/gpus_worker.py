"""Rank of gpus.py under torchrun: trains one layout and writes its state, or measures its speed.

    torchrun ... gpus_worker.py FOLDER        # reads spec.json; rank 0 writes result.json

A compared layout runs `STEPS` steps on rows of several documents with uneven labels, then validates; every rank writes
its slices of weights and optimizer state, before training, after the first and after the last step.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lt_trainer.config.recipe import load, model_config
from lt_trainer.engine import StepMetrics, World
from lt_trainer.training.benchmark import resolve_bench_recipe, run_benchmark
from lt_trainer_gpu.spec import SPEC

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))
from lt_test_helpers import layouts

ROWS, STEPS = 16, 3
LEARNING_RATE = 1e-4
"""Small, since AdamW moves a weight by it whatever the gradient's size: rounding must not become a different model."""


def train_layout(spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train this rank's part of a layout; write its slices of each moment."""
    world = World.from_env(os.environ)
    recipe = load(base=spec["base"], overrides=spec["sets"], base_name="benchmark").recipe
    SPEC.check(recipe, world)
    os.environ.update(SPEC.env(recipe))
    engine = SPEC.open(recipe, model_config(recipe, spec["vocab_size"]), world)
    shape = {"rows": ROWS, "seq_len": recipe.data.seq_len, "vocab": spec["vocab_size"]}
    micro_batch_size = recipe.batch.micro_batch_size
    metrics: list[StepMetrics] = []
    moments = [layouts.copy_slices(engine.state().shards)]
    for batch in layouts.global_batches(STEPS, **shape):
        own = layouts.rank_batch(batch, engine, micro_batch_size)
        metrics += engine.fetch_metrics([engine.step(own, LEARNING_RATE)])
        if len(metrics) in (1, STEPS):
            moments.append(layouts.copy_slices(engine.state().shards))
    slices = {
        json.dumps([i, one.group, one.name, one.dtype, one.shape, one.offset]): one.values
        for i, moment in enumerate(moments)
        for one in moment
    }
    np.savez(folder / f"rank{world.rank}.npz", allow_pickle=False, **slices)
    own = layouts.rank_batch(layouts.global_batches(1, **shape, seed=9)[0], engine, micro_batch_size)
    loss_sum, tokens = engine.validate([replace(own, valid_tokens=int((own.labels != -100).sum()))])
    resolved = dict(engine.device.resolved)
    engine.close()
    return {
        "status": "ok",
        "losses": [one.loss for one in metrics] + [loss_sum / tokens],
        "grad_norms": [one.grad_norm for one in metrics],
        "validation_tokens": tokens,
        "resolved": resolved,
    }


def measure_speed(spec: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """Run `lt train bench` of a preset as this rank; return its report on rank 0."""
    resolved = resolve_bench_recipe(None, spec["preset"], overrides=spec["sets"], hyperparameters=None)
    report = run_benchmark(resolved, steps=spec["steps"], warmup=spec["warmup"])
    return None if report is None else {"status": "ok"} | report


def run_rank(folder: Path) -> None:
    """Run this rank's part of spec.json."""
    spec = json.loads((folder / "spec.json").read_text())
    result = (measure_speed if "preset" in spec else train_layout)(spec, folder)
    if int(os.environ["RANK"]) == 0:
        (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
