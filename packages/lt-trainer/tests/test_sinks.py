"""What TensorBoard, W&B and Trackio have, read by their own readers; sinks that are missing, refuse, fail, go back."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lt_test_helpers.runs import run
from lt_trainer.config.recipe import load
from lt_trainer.errors import RecipeError, TrainerError
from lt_trainer.observability.sinks import Sinks, open_sinks, scalars
from lt_trainer.run_directory.jsonl import read_jsonl

TRAIN = {"step": 3, "loss": 2.5, "mfu": math.nan, "data_s": 0.25}
VALIDATION = {"step": 3, "val_loss": 2.0, "val_tokens": 7, "elapsed_s": 1.0, "val_bits_per_byte": 0.5}
RECIPE = {"run": {"seed": 1}, "metrics": {"sinks": ["wandb"]}}


def opened(run: Path, *names: str) -> Sinks:
    sinks, errors = open_sinks(names, run, RECIPE)
    assert errors == {}
    return sinks


def test_numbers_are_grouped_and_text_stays_out() -> None:
    assert scalars({**TRAIN, "mfu": 0.5}) == {"train/loss": 2.5, "train/mfu": 0.5, "train/data_s": 0.25}
    assert scalars(VALIDATION) == {"validation/loss": 2.0, "validation/tokens": 7.0, "validation/bits_per_byte": 0.5}
    assert scalars({**VALIDATION, "val_set": "code"})["validation/code/loss"] == 2.0
    assert scalars({"step": 1, "eval_task": "t", "eval_a": [1, 0]}) == {"evaluation/t/a/0": 1, "evaluation/t/a/1": 0}


def test_a_missing_library_is_refused_with_its_extra_before_the_run_directory_is_made(
    recipe_base, fake_engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of that name, as W&B leaves one where it was started, is no library."""
    (tmp_path / "path" / "trackio").mkdir(parents=True)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "path"), *[one for one in sys.path if "site-packages" not in one]])
    for name in ("tensorboard", "trackio"):
        recipe_base["metrics"]["sinks"] = [name]
        with pytest.raises(RecipeError, match=rf"{name} is not installed; pip install 'lt-trainer\[{name}\]'"):
            start(recipe_base)
    assert not Path(recipe_base["run"]["dir"]).exists()


def test_importing_a_run_loads_no_sink() -> None:
    sinks = "{'tensorboard', 'wandb', 'trackio', 'rich'}"
    script = f"import sys, lt_trainer.training.loop; sys.exit(bool({sinks} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", script], check=True)


# ---- TensorBoard ----


def events(run: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def test_tensorboard_reads_what_was_written_and_forgets_the_steps_that_are_done_again(tmp_path: Path) -> None:
    """A rollback within a start, then a start from an older checkpoint: each step has its newest value, once."""
    sinks = opened(tmp_path, "tensorboard")
    sinks.log(TRAIN, {"node0/cpu_percent": 12.5})
    sinks.log({**VALIDATION, "val_set": "code"})
    found = events(tmp_path)  # before the end: a run that is killed keeps its records
    tags = {*scalars(TRAIN), "node0/cpu_percent", *scalars({**VALIDATION, "val_set": "code"})}
    assert set(found.Tags()["scalars"]) == tags
    assert math.isnan(found.Scalars("train/mfu")[0].value)
    assert b'"seed": 1' in found.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0]
    for losses in ({4: 4.0, 5: 5.0}, {4: 4.5, 5: 5.5, 6: 6.5}, {5: 50.0, 6: 60.0}):
        for step, loss in losses.items():
            sinks.log({"step": step, "loss": loss})
        if 6 in losses:
            assert sinks.close() == {}
            sinks = opened(tmp_path, "tensorboard")
    found = [(one.step, one.value) for one in events(tmp_path).Scalars("train/loss")]
    assert found == [(3, 2.5), (4, 4.5), (5, 50.0), (6, 60.0)]


# ---- append-only histories ----

RECORDS: list[dict[str, Any]] = [
    {"step": 1, "loss": 1.5},
    {"step": 2, "loss": 1.25},
    {"step": 2, "val_loss": 2.0, "elapsed_s": 1.0},
    {"step": 1, "loss": 9.0},  # a rollback: the history has these steps already
    {"step": 2, "loss": 9.0},
    {"step": 3, "loss": 1.125},
]
LATER: list[dict[str, Any]] = [{"step": 3, "loss": 9.0}, {"step": 4, "loss": 1.0}]
KEPT = [
    {"step": 1, "train/loss": 1.5, "node0/cpu_percent": 12.5},
    {"step": 2, "train/loss": 1.25},
    {"step": 2, "validation/loss": 2.0},
    {"step": 3, "train/loss": 1.125},
    {"step": 4, "train/loss": 1.0},
]


def write_records(run: Path) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))


def test_wandb_goes_on_in_the_same_run_and_has_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    runs, rows = [], []

    def init(**options: Any) -> Any:
        runs.append(options)
        return SimpleNamespace(log=rows.append, define_metric=lambda *_, **__: None, finish=lambda: None)

    monkeypatch.setattr(wandb, "init", init)
    for records in (RECORDS, LATER):
        sinks = opened(tmp_path, "wandb")
        for record in records:
            assert sinks.log(record, {"node0/cpu_percent": 12.5} if record == RECORDS[0] else None) == {}
        assert sinks.close() == {}
        write_records(tmp_path)
    assert rows == KEPT
    name = json.loads((tmp_path / "sinks.json").read_text())["name"]
    assert [(one["id"], one["resume"], one["name"]) for one in runs] == [(name, "allow", tmp_path.name)] * 2
    assert runs[0]["config"] == RECIPE


def test_wandb_without_a_network_writes_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MODE": "offline", "API_KEY": "k" * 40, "ERROR_REPORTING": "false", "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    sinks = opened(tmp_path, "wandb")
    assert sinks.log(RECORDS[0]) == {}
    assert sinks.close() == {}
    import wandb

    wandb.teardown()  # as at the end of a process: its core program writes what it still holds
    (log,) = (tmp_path / "wandb").glob("*/run-*.wandb")
    assert b"train/loss" in log.read_bytes()
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"k" * 40 not in path.read_bytes(), path


def test_wandb_that_refuses_ends_the_start_and_one_that_is_away_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb
    from wandb.errors import CommError, UsageError

    def fail(error: Exception, **options: object) -> None:
        raise error

    monkeypatch.setattr(wandb, "init", partial(fail, UsageError("No API key configured.")))
    with pytest.raises(TrainerError, match=r"cannot start wandb: No API key configured.; fix the WANDB_\* variables"):
        opened(tmp_path, "tensorboard", "wandb")
    monkeypatch.setattr(wandb, "init", partial(fail, CommError("timed out")))
    sinks, errors = open_sinks(("wandb", "tensorboard"), tmp_path, RECIPE)
    assert errors == {"wandb": "CommError: timed out"}
    assert sinks.log({"step": 1, "loss": 1.0}) == {}
    sinks.close()
    assert events(tmp_path).Scalars("train/loss")[0].value == 1.0


# ---- Trackio ----

SCRIPT = """
import json, sys
from pathlib import Path
from lt_trainer.observability.sinks import open_sinks
sinks, lost = open_sinks(("trackio",), Path(sys.argv[1]), {"run": {"seed": 1}})
lost |= sinks.log({"step": 1, "loss": 1.5}) | sinks.close()
from trackio.sqlite_storage import SQLiteStorage
(run,) = SQLiteStorage.get_runs("lt")
(log,) = SQLiteStorage.get_logs("lt", run)
print(json.dumps([lost, run, SQLiteStorage.get_run_config("lt", run)["run"], log["step"], log["train/loss"]]))
"""
"""In a process of its own, as runs are: Trackio takes its folder from the environment when it is imported."""


def test_trackio_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="NO TRACKIO: its sink is not tried; install lt-trainer[trackio]")
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRACKIO_")}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env | {"HF_HUB_OFFLINE": "1"})
    name = json.loads((tmp_path / "sinks.json").read_text())["name"]
    assert json.loads(done.stdout) == [{}, name, {"seed": 1}, 1, 1.5], "standard output is the run's"
    assert list((tmp_path / "trackio").iterdir())


# ---- in a run ----


def start(base: Any, *overrides: str, **options: Any) -> int:
    return run(load(base=base, overrides=["run.engine=fake", *overrides]), environ={}, **options)


def test_a_sink_that_fails_in_a_run_is_noted_and_the_run_goes_on(recipe_base, fake_engine, capsys, monkeypatch) -> None:
    def fail(step: int, values: Mapping[str, float]) -> None:
        raise ConnectionError("the service is away")

    sinks = Sinks({"tensorboard": cast(Any, SimpleNamespace(restart=lambda step: None, log=fail))})
    monkeypatch.setattr("lt_trainer.training.run.open_sinks", lambda *_: (sinks, {}))
    recipe_base["metrics"]["sinks"] = ["tensorboard"]
    assert start(recipe_base) == 0
    assert capsys.readouterr().out.count("sink tensorboard failed") == 1
    out = Path(recipe_base["run"]["dir"])
    failed = [event for event in read_jsonl(out / "events.jsonl") if event["event"] == "sink_failed"]
    assert [event["error"] for event in failed] == ["ConnectionError: the service is away"]
    assert sum("loss" in record for record in read_jsonl(out / "metrics.jsonl")) == 20
