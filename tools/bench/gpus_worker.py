"""Rank of gpus.py under torchrun: trains one layout and writes its state, or measures its speed.

    torchrun ... gpus_worker.py FOLDER        # reads spec.json; rank 0 writes result.json

A compared layout runs `steps` steps on rows of several documents with uneven labels, then validates; every rank writes
its slices of weights and optimizer state, before training, after the first and after the last step.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lt_ckpt import Shard
from lt_trainer.config.recipe import llama_config, load
from lt_trainer.engine import StepMetrics, World
from lt_trainer.training.benchmark import resolve_bench_recipe, run_benchmark
from lt_trainer_gpu.spec import SPEC

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))
from lt_test_helpers import layouts
from lt_test_helpers.layouts import StateSlice

BEFORE, AFTER_FIRST, AFTER_LAST = range(3)
"""Moments whose state ranks write: before training, after the first and after the last step."""
LEARNING_RATE = 1e-4
"""Small, since AdamW moves a weight by it whatever the gradient's size: rounding must not become a different model."""


def train_layout(spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train this rank's part of a layout; write its slices."""
    world = World.from_env(os.environ)
    recipe = load(base=spec["base"], overrides=spec["sets"], base_name="benchmark").recipe
    SPEC.check(recipe, world)
    os.environ.update(SPEC.env(recipe))
    engine = SPEC.open(recipe, llama_config(recipe, spec["vocab_size"]), world)
    shape = {"rows": spec["rows"], "seq_len": recipe.data.seq_len, "vocab": spec["vocab_size"]}
    batches = layouts.global_batches(spec["steps"], **shape)
    (rest,) = layouts.global_batches(1, **shape, seed=9)
    micro_batch_size = recipe.batch.micro_batch_size
    metrics: list[StepMetrics] = []
    write_slices(folder, BEFORE, world.rank, engine.state().shards)
    for batch in batches:
        own = layouts.rank_batch(batch, engine, micro_batch_size)
        metrics += engine.fetch_metrics([engine.step(own, LEARNING_RATE)])
        if len(metrics) == 1:
            write_slices(folder, AFTER_FIRST, world.rank, engine.state().shards)
    write_slices(folder, AFTER_LAST, world.rank, engine.state().shards)
    own = layouts.rank_batch(rest, engine, micro_batch_size)
    loss_sum, tokens = engine.validate([replace(own, valid_tokens=int((own.labels != -100).sum()))])
    resolved = dict(engine.device.resolved)
    engine.close()
    return {
        "status": "ok",
        "losses": [one.loss for one in metrics],
        "grad_norms": [one.grad_norm for one in metrics],
        "validation_loss": loss_sum / tokens,
        "validation_tokens": tokens,
        "resolved": resolved,
    }


def measure_speed(spec: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """Run `lt train bench` of a preset as this rank; return its report on rank 0."""
    resolved = resolve_bench_recipe(None, spec["preset"], overrides=spec["sets"], hyperparameters=None)
    report = run_benchmark(resolved, steps=spec["steps"], warmup=spec["warmup"])
    return None if report is None else {"status": "ok"} | report


def write_slices(folder: Path, moment: int, rank: int, shards: Iterable[Shard]) -> None:
    """Write a rank's slices of a moment: one file describes them, one has their numbers."""
    slices, fields = layouts.copy_slices(shards), ("group", "name", "dtype", "shape", "offset")
    path = folder / f"state{moment}-rank{rank}"
    path.with_suffix(".json").write_text(json.dumps([{name: getattr(one, name) for name in fields} for one in slices]))
    np.savez(path.with_suffix(".npz"), *[one.values for one in slices])


def read_slices(folder: Path, moment: int, rank: int) -> list[StateSlice]:
    """Read what `write_slices` has written."""
    path = folder / f"state{moment}-rank{rank}"
    described = json.loads(path.with_suffix(".json").read_text())
    with np.load(path.with_suffix(".npz")) as arrays:
        return [
            StateSlice(one["group"], one["name"], one["dtype"], tuple(one["shape"]), tuple(one["offset"]), values)
            for one, values in zip(described, (arrays[f"arr_{i}"] for i in range(len(described))), strict=True)
        ]


KINDS = {"layout": train_layout, "speed": measure_speed}


def run_rank(folder: Path) -> None:
    """Run this rank's part of spec.json."""
    spec = json.loads((folder / "spec.json").read_text())
    result = KINDS[spec["kind"]](spec, folder)
    if int(os.environ["RANK"]) == 0:
        (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
