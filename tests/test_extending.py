"""CONTRIBUTING's table of where to change what: its paths exist, its rows are short, and three patches keep to it.

A patch of `tests/extending` adds one thing and touches only the files of its row. It is applied to a copy of the
sources, which then trains a toy model with it in a process of its own.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PATCHES = Path(__file__).resolve().parent / "extending"
THREE, SIX = 3, 6
MOST_FILES = {
    "an optimizer": THREE,
    "a metric": THREE,
    "a learning-rate schedule": THREE,
    "a data source": THREE,
    "a guard": THREE,
    "a checkpoint format": SIX,
    "a parallel axis": SIX,
    "a launch target": SIX,
    "an attention backend": SIX,
    "a recipe field": SIX,
}
RECIPE = """
[run]
dir = "runs/toy"
[model]
hidden_size = 32
intermediate_size = 64
n_heads = 2
n_kv_heads = 2
n_layers = 2
vocab_size = 64
[data]
synthetic = true
seq_len = 16
[batch]
global_batch_size = 4
micro_batch_size = 4
[schedule]
max_steps = 4
warmup_steps = 1
min_lr = 1e-4
[metrics]
log_interval = 1
"""


def rows() -> dict[str, list[str]]:
    """Return what can be added → the files that change, from the table of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.split("## Where to change what", 1)[1].split("\n## ", 1)[0]
    cells = re.findall(r"^\| (an? [^|]+?) \| ([^|]+) \|", table, re.M)
    return {name: re.findall(r"`([^`]+)`", files) for name, files in cells}


def test_each_of_the_ten_changes_has_a_row_of_files_that_exist() -> None:
    found = rows()
    assert set(found) == set(MOST_FILES)
    for name, files in found.items():
        assert files, name
        assert [path for path in files if "NAME" not in path and not (ROOT / path).is_file()] == [], name
        assert [path for path in files if not (ROOT / path.split("NAME")[0]).exists()] == [], name
        assert len(files) <= MOST_FILES[name], name


def patched_sources(name: str, folder: Path) -> dict[str, str]:
    """Copy the sources, apply a patch to them, and return the environment in which Python imports the copy."""
    for source in ROOT.glob("packages/*/src"):
        shutil.copytree(source, folder / source.relative_to(ROOT), ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", "--verbose", PATCHES / f"{name}.patch"], cwd=folder, check=True)
    sources = os.pathsep.join(str(path) for path in sorted(folder.glob("packages/*/src")))
    return os.environ | {"PYTHONPATH": sources, "OMP_NUM_THREADS": "1"}


def touched_files(name: str) -> set[str]:
    text = (PATCHES / f"{name}.patch").read_text(encoding="utf-8")
    return set(re.findall(r"^\+\+\+ b/(\S+)", text, re.M))


def train(environ: dict[str, str], folder: Path, *overrides: str) -> list[dict[str, float]]:
    (folder / "run.toml").write_text(RECIPE, encoding="utf-8")
    sets = [word for override in overrides for word in ("--set", override)]
    command = [sys.executable, "-m", "lt_trainer", "run", "run.toml", *sets]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / "runs" / "toy" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


@pytest.mark.parametrize(
    ("name", "row"),
    [("optimizer", "an optimizer"), ("metric", "a metric"), ("schedule", "a learning-rate schedule")],
)
def test_a_patch_touches_only_the_files_of_its_row(name: str, row: str) -> None:
    allowed = [re.escape(path).replace("NAME", r"\w+") for path in rows()[row]]
    assert [path for path in touched_files(name) if not any(re.fullmatch(one, path) for one in allowed)] == []


@pytest.mark.slow
def test_an_optimizer_is_added(tmp_path: Path) -> None:
    """Lion (arXiv:2302.06675), with one slot: it trains, is saved under its slot's name, and so is nothing else."""
    environ = patched_sources("optimizer", tmp_path)
    records = train(environ, tmp_path, "optimizer.name=lion", "optimizer.lr=1e-3")
    assert len(records) == 4
    assert records[-1]["loss"] < records[0]["loss"]
    manifests = sorted(tmp_path.glob("runs/toy/checkpoints/step-*/manifest.json"))
    assert '"momentum"' in manifests[-1].read_text(encoding="utf-8")
    assert "exp_avg_sq" not in manifests[-1].read_text(encoding="utf-8")


def test_a_metric_is_added(tmp_path: Path) -> None:
    records = train(patched_sources("metric", tmp_path), tmp_path)
    assert [record["perplexity"] for record in records] == [math.exp(record["loss"]) for record in records]


def test_a_schedule_is_added(tmp_path: Path) -> None:
    environ = patched_sources("schedule", tmp_path)
    rates = [record["learning_rate"] for record in train(environ, tmp_path, "schedule.kind=inverse_sqrt")]
    peak = rates[0]
    assert rates == pytest.approx([peak, peak / 2**0.5, peak / 3**0.5, peak / 4**0.5], rel=1e-5)
