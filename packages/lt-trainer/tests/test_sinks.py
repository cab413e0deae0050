"""What TensorBoard, W&B and Trackio have, read by their own readers; sinks that are missing, refuse, fail, go back."""

import json
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def restart(self, step: int) -> None:
        self.calls.append(("restart", step))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.calls.append(("log", step, dict(values)))

    def close(self) -> None:
        self.calls.append(("close",))


class Broken(Recorder):
    def log(self, step: int, values: Mapping[str, float]) -> None:
        raise ConnectionError("the service is away")


def together(**sinks: Any) -> Sinks:
    return Sinks(sinks)


def test_numbers_are_grouped_and_text_stays_out() -> None:
    assert scalars({**TRAIN, "mfu": 0.5}) == {"train/loss": 2.5, "train/mfu": 0.5, "train/data_s": 0.25}
    assert scalars(VALIDATION) == {"validation/loss": 2.0, "validation/tokens": 7.0, "validation/bits_per_byte": 0.5}
    assert scalars({**VALIDATION, "val_set": "code"})["validation/code/loss"] == 2.0
    assert scalars({"step": 1, "eval_task": "t", "eval_acc": 0.5}) == {"evaluation/t/acc": 0.5}


def test_sinks_hear_where_a_start_begins_and_where_a_rollback_leads() -> None:
    sink = Recorder()
    sinks = together(one=sink)
    for step in (2, 4, 6, 4, 6, 6):  # the last: back to a checkpoint between two logging steps
        sinks.log({"step": step, "loss": float(step)})
        if step == 4:
            sinks.log({"step": step, "val_loss": 1.0, "elapsed_s": 0.0})
    sinks.close()
    words = " ".join(f"{call[0]} {call[1]}" for call in sink.calls[:-1])
    assert words == "restart 2 log 2 log 4 log 4 log 6 restart 4 log 4 log 4 log 6 restart 6 log 6"
    assert sink.calls[1] == ("log", 2, {"train/loss": 2.0})
    assert sink.calls[-1] == ("close",)


def test_a_sink_that_fails_is_told_once_and_the_others_go_on() -> None:
    good, bad = Recorder(), Broken()
    sinks = together(bad=bad, good=good)
    assert sinks.log({"step": 1, "loss": 1.0}) == {"bad": "ConnectionError: the service is away"}
    assert sinks.log({"step": 2, "loss": 1.0}) == {}
    assert sinks.close() == {}
    assert [call[1] for call in good.calls if call[0] == "log"] == [1, 2]
    assert ("close",) not in bad.calls


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


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    sinks = opened(tmp_path, "tensorboard")
    sinks.log(TRAIN, {"node0/cpu_percent": 12.5})
    sinks.log({**VALIDATION, "val_set": "code"})
    found = events(tmp_path)  # before the end: a run that is killed keeps its records
    assert sinks.close() == {}
    assert set(found.Tags()["scalars"]) == {
        *scalars(TRAIN),
        "node0/cpu_percent",
        *scalars({**VALIDATION, "val_set": "code"}),
    }
    (loss,) = found.Scalars("train/loss")
    assert (loss.step, loss.value) == (3, 2.5)
    assert math.isnan(found.Scalars("train/mfu")[0].value)
    (text,) = found.Tensors("recipe/text_summary")
    assert b'"seed": 1' in text.tensor_proto.string_val[0]


def test_tensorboard_forgets_the_steps_that_are_done_again(tmp_path: Path) -> None:
    """A rollback within a start, then a start from an older checkpoint: each step has its newest value, once."""
    first = opened(tmp_path, "tensorboard")
    for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 2.5), (3, 3.5), (4, 4.5)):
        first.log({"step": step, "loss": loss})
    first.close()
    second = opened(tmp_path, "tensorboard")
    for step, loss in ((3, 30.0), (4, 40.0), (5, 50.0)):
        second.log({"step": step, "loss": loss})
    second.close()
    found = [(one.step, one.value) for one in events(tmp_path).Scalars("train/loss")]
    assert found == [(1, 1.0), (2, 2.5), (3, 30.0), (4, 40.0), (5, 50.0)]


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

    def fail(error: Exception) -> None:
        def init(**options: object) -> None:
            raise error

        monkeypatch.setattr(wandb, "init", init)

    fail(UsageError("No API key configured."))
    with pytest.raises(TrainerError, match=r"cannot start wandb: No API key configured.; fix the WANDB_\* variables"):
        opened(tmp_path, "tensorboard", "wandb")
    fail(CommError("timed out"))
    sinks, errors = open_sinks(("wandb", "tensorboard"), tmp_path, RECIPE)
    assert errors == {"wandb": "CommError: timed out"}
    assert sinks.log({"step": 1, "loss": 1.0}) == {}
    sinks.close()
    assert events(tmp_path).Scalars("train/loss")[0].value == 1.0


# ---- Trackio ----

WRITE = """
    import json, sys
    from pathlib import Path
    from lt_trainer.observability.sinks import open_sinks
    run, records = Path(sys.argv[1]), json.loads(sys.argv[2])
    sinks, lost = open_sinks(("trackio",), run, {"run": {"seed": 1}})
    assert lost == {}, lost
    for record in records:
        sinks.log(record, {"node0/cpu_percent": 12.5} if record["step"] == 1 else None)
    assert sinks.close() == {}
"""
READ = """
    import json, sys
    from trackio.sqlite_storage import SQLiteStorage
    (run,) = SQLiteStorage.get_runs("lt")
    logs = [{k: v for k, v in log.items() if k != "timestamp"} for log in SQLiteStorage.get_logs("lt", run)]
    print(json.dumps({"run": run, "config": SQLiteStorage.get_run_config("lt", run), "logs": logs}))
"""
"""Each in a process of its own, as runs are: Trackio takes its folder from the environment when it is imported."""


def in_process(script: str, *arguments: str, **variables: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRACKIO_")}
    env |= {"HF_HUB_OFFLINE": "1"} | variables
    words = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout


@pytest.fixture
def trackio() -> None:
    pytest.importorskip("trackio", reason="NO TRACKIO: its sink is not tried; install lt-trainer[trackio]")


def test_trackio_reads_what_was_written_and_goes_on_in_the_same_run(tmp_path: Path, trackio: None) -> None:
    run = tmp_path / "first"
    run.mkdir()
    assert in_process(WRITE, str(run), json.dumps(RECORDS)) == "", "standard output is the run's"
    write_records(run)
    assert in_process(WRITE, str(run), json.dumps(LATER)) == ""
    found = json.loads(in_process(READ, TRACKIO_DIR=str(run / "trackio")))
    assert found["run"] == json.loads((run / "sinks.json").read_text())["name"]
    assert found["run"].startswith("first-")
    assert found["config"]["run"] == {"seed": 1}
    assert found["logs"] == KEPT


def test_trackio_goes_where_the_environment_says(tmp_path: Path, trackio: None) -> None:
    place = str(tmp_path / "shared")
    for name in ("a/run", "b/run"):
        (tmp_path / name).mkdir(parents=True)
        in_process(WRITE, str(tmp_path / name), json.dumps([{"step": 1, "loss": 1.5}]), TRACKIO_DIR=place)
        assert not (tmp_path / name / "trackio").exists()
    names = in_process(
        "from trackio.sqlite_storage import SQLiteStorage; print(*SQLiteStorage.get_runs('lt'))", TRACKIO_DIR=place
    ).split()
    assert len(names) == 2, "two runs whose folders have one name stay apart"


def test_trackio_that_refuses_is_refused_with_a_remedy(
    tmp_path: Path, trackio: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("TRACKIO_SERVER_URL", "https://127.0.0.1:9")
    monkeypatch.delenv("TRACKIO_WRITE_TOKEN", raising=False)
    with pytest.raises(TrainerError, match=r"cannot start trackio: .*requires a write token.*, or remove it from"):
        opened(tmp_path, "trackio")


# ---- in a run ----


def start(base: Any, *overrides: str, **options: Any) -> int:
    return run(load(base=base, overrides=["run.engine=fake", *overrides]), environ={}, **options)


def test_a_stopped_and_resumed_run_has_every_step_once(recipe_base, fake_engine, capsys) -> None:
    recipe_base["metrics"] |= {"sinks": ["tensorboard"], "validation_interval": 5}
    assert start(recipe_base, stop_after_step=9) == 75
    assert start(recipe_base) == 0
    assert "the recipe has changed" not in capsys.readouterr().out
    out = Path(recipe_base["run"]["dir"])
    records = read_jsonl(out / "metrics.jsonl")
    found = events(out)
    for tag, field in (("train/loss", "loss"), ("validation/loss", "val_loss"), ("train/rest_s", "rest_s")):
        wanted = [(record["step"], record[field]) for record in records if field in record]
        assert [one.step for one in found.Scalars(tag)] == [step for step, _ in wanted]
        assert [one.value for one in found.Scalars(tag)] == pytest.approx([value for _, value in wanted])
    assert '"metrics"' in found.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0].decode()


def test_a_sink_that_fails_in_a_run_is_noted_and_the_run_goes_on(recipe_base, fake_engine, capsys, monkeypatch) -> None:
    monkeypatch.setattr("lt_trainer.training.run.open_sinks", lambda *_: (together(tensorboard=Broken()), {}))
    recipe_base["metrics"]["sinks"] = ["tensorboard"]
    assert start(recipe_base) == 0
    assert capsys.readouterr().out.count("sink tensorboard failed") == 1
    out = Path(recipe_base["run"]["dir"])
    failed = [event for event in read_jsonl(out / "events.jsonl") if event["event"] == "sink_failed"]
    assert [(event["sink"], event["error"]) for event in failed] == [
        ("tensorboard", "ConnectionError: the service is away")
    ]
    assert sum("loss" in record for record in read_jsonl(out / "metrics.jsonl")) == 20
