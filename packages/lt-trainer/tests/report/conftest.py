"""Run directories as runs leave them: records, events, recipe; made line by line, so that tests know every number."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lt_trainer.config.recipe import load, to_dict, to_toml

Make = Callable[..., Path]


def record(step: int, **changes: Any) -> dict[str, Any]:
    """A training record of a run whose loss falls."""
    rng = random.Random(step)
    return {
        "step": step,
        "loss": 2.5 + 7 * math.exp(-step / 60) + rng.gauss(0, 0.08),
        "learning_rate": 1e-3 * min(step / 30, 0.55 + 0.45 * math.cos(min(step, 400) * math.pi / 400)),
        "grad_norm": 0.3 + 3 * math.exp(-step / 40) + abs(rng.gauss(0, 0.05)),
        "batches_per_sec": 1.0,
        "samples_per_sec": 8.0,
        "tokens_per_sec": 32768.0 + rng.gauss(0, 300),
        "flops_per_sec": 4e14,
        "mfu": 0.412 + rng.gauss(0, 0.004),
        "memory_gib": 61.5,
        "valid_tokens": 4000,
        "elapsed_s": step * 2.0,
        "data_s": 0.05,
        "forward_backward_s": 1.7,
        "optimizer_s": 0.15,
        "checkpoint_s": 0.6 if step % 100 == 0 else 0.0,
        "validation_s": 0.4 if step % 50 == 0 else 0.0,
        "rest_s": 0.1,
    } | changes


def event(kind: str, minute: int = 0, **values: Any) -> dict[str, Any]:
    return {"time": f"2026-01-02T10:{minute % 60:02}:30.000+00:00", "event": kind, **values}


START = {
    "pid": 7,
    "world": 8,
    "device": "NVIDIA H200",
    "peak_flops": 9.89e14,
    "peak_source": "datasheet, dense bfloat16",
}
DATA = {"global_batch_size": 64, "dp_size": 8, "seed": 1, "fingerprint": "store:ab pack:bfd-2048:cd", "skipped": []}


def lines(path: Path, *objects: dict[str, Any]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(one) + "\n" for one in objects)


@pytest.fixture
def make_run(tmp_path: Path) -> Make:
    """Makes the run directory of a name: `make(name, records=[...], events=[...], overrides=[...])`."""

    def make(name: str = "first", *, records: Any = None, events: Any = None, overrides: Any = ()) -> Path:
        folder = tmp_path / name
        (folder / "checkpoints").mkdir(parents=True)
        (folder / ".lt-run").write_text('{"format": "lt-run", "version": 1}')
        resolved = load(
            base={
                "model": {"preset": "tiny-2m", "vocab_size": 32000},
                "data": {"store": "no/such/store", "seq_len": 2048},
                "batch": {"global_batch_size": 64, "micro_batch_size": 1},
                "schedule": {"max_steps": 400, "warmup_steps": 30},
                "run": {"dir": "first"},
            },
            overrides=list(overrides),
        )
        table = {"recipe": to_dict(resolved.recipe), "origins": dict(resolved.origins), "unchecked": []}
        (folder / "recipe.json").write_text(json.dumps(table))
        (folder / "recipe.toml").write_text(to_toml(resolved.recipe, resolved.origins))
        (folder / "environment.json").write_text(json.dumps({"python": "3.11.7", "packages": {"torch": "2.15.0"}}))
        lines(folder / "metrics.jsonl", *(records if records is not None else [record(s) for s in range(1, 401)]))
        lines(folder / "events.jsonl", *(events if events is not None else [event("start", **START)]))
        return folder

    return make


@pytest.fixture
def eventful(make_run: Make) -> Path:
    """A run that was stopped, went on, skipped steps, went back and is done, with two validation sets."""
    validation = [
        {
            "step": step,
            "val_loss": 2.6 + 7 * math.exp(-step / 60) + shift,
            "val_tokens": 9000,
            "elapsed_s": step * 2.0,
            "val_perplexity": 20.0,
            "val_bits_per_byte": 1.1,
            "val_set": name,
        }
        for step in range(50, 401, 50)
        for name, shift in (("web", 0.0), ("code", -0.5))
    ]
    way_left = [record(step, loss=99.0) for step in range(301, 311)]
    records: list[dict[str, Any]] = []
    for step in range(1, 401):
        records += [record(step)] + [one for one in validation if one["step"] == step]
        if step == 300:
            records += way_left
    events = [
        event("start", 0, **START),
        event("data", 0, step=0, row=0, **DATA),
        *(event("checkpoint", step // 10, step=step, path=f"checkpoints/step-{step:08}") for step in (100, 200)),
        event("stop", 20, step=200, signal="SIGTERM"),
        event("start", 21, **START),
        event("data", 21, step=200, row=12800, **DATA),
        event("resume", 21, step=200, path="checkpoints/step-00000200"),
        event("checkpoint", 30, step=300, path="checkpoints/step-00000300"),
        *(event("step_skipped", 31, step=step, loss="nan", grad_norm="inf") for step in (308, 309, 310)),
        event("data", 31, step=300, row=19840, **(DATA | {"skipped": [[19200, 19840]]})),
        event("rollback", 31, step=300, from_step=310, rows=[19200, 19840]),
        event("note", 32, text="<script>alert('a note')</script>"),
        event("checkpoint", 40, step=400, path="checkpoints/step-00000400"),
        event("completed", 40, step=400),
    ]
    return make_run("runs/eventful", records=records, events=events)
