"""What TensorBoard, W&B and Trackio have, read by their own readers; sinks that are missing, refuse, fail, go back."""

import json
import math
import os
import struct
import subprocess
import sys
import textwrap
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from lt_test_helpers.runs import run
from lt_trainer.config.recipe import load
from lt_trainer.errors import RecipeError, RunDirError, TrainerError
from lt_trainer.observability.sinks import Sinks, check_sinks_installed, open_sinks, scalars
from lt_trainer.run_directory.jsonl import read_jsonl
from lt_trainer.run_directory.records import MetricsRecord

TRAIN = {"step": 3, "loss": 2.5, "learning_rate": 0.1, "mfu": math.nan, "data_s": 0.25, "energy_kwh": 1.5}
VALIDATION = {"step": 3, "val_loss": 2.0, "val_tokens": 7, "elapsed_s": 1.0, "val_bits_per_byte": 0.5}
RECIPE = {"run": {"seed": 1}, "metrics": {"sinks": ["wandb"]}}


def opened(run: Path, *names: str, step: int = 0) -> Sinks:
    sinks, errors = open_sinks(names, run, recipe=RECIPE, step=step)
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
    assert scalars({**TRAIN, "mfu": 0.5}) == {
        "train/loss": 2.5,
        "train/learning_rate": 0.1,
        "speed/mfu": 0.5,
        "time/data_s": 0.25,
        "energy/energy_kwh": 1.5,
    }
    assert scalars(VALIDATION) == {"validation/loss": 2.0, "validation/tokens": 7.0, "validation/bits_per_byte": 0.5}
    assert scalars({**VALIDATION, "val_set": "code"})["validation/code/loss"] == 2.0
    record = {field.name: 1.0 for field in fields(MetricsRecord)}
    assert len(scalars(record)) == len(record) - 1, "all but the step"


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
    recipe_base, fake_engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    recipe_base["metrics"]["sinks"] = ["tensorboard"]
    with pytest.raises(RecipeError, match=r"tensorboard is not installed; pip install 'lt-trainer\[tensorboard\]'"):
        start(recipe_base)
    assert not Path(recipe_base["run"]["dir"]).exists()


def test_a_folder_of_that_name_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trackio").mkdir()  # as W&B leaves one where it was started
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(RecipeError, match="the library of trackio is not installed"):
        check_sinks_installed(("trackio",))


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
    assert math.isnan(found.Scalars("speed/mfu")[0].value)
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


def test_tensorboard_on_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.raises(RunDirError, match=r"cannot write .*tensorboard: .*; free space or fix"):
        opened(tmp_path, "tensorboard")


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


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """W&B without a network, as a person sets it, with a key that must not turn up anywhere."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    import wandb

    wandb.teardown()


def wandb_records(run: Path) -> list[Any]:
    """The records of all W&B transaction logs below a run directory, in the order of their files' names.

    The format is LevelDB's log, whose reader W&B has in its core program only: blocks of 32 KiB, and in them chunks
    with a checksum of type and data, a length and a type (1 whole, 2 first, 3 middle, 4 last).
    """
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted((run / "wandb").glob("*/run-*.wandb")):
        data = path.read_bytes()
        assert data[:4] == b":W&B"
        at, parts = 7, b""
        while at + 7 <= len(data):
            left = 32768 - at % 32768
            if left < 7:
                at += left
                continue
            checksum, length, kind = struct.unpack_from("<IHB", data, at)
            chunk = data[at + 7 : at + 7 + length]
            assert checksum == zlib.crc32(chunk, zlib.crc32(bytes([kind]))), path
            parts = parts + chunk if kind in (3, 4) else chunk
            at += 7 + length
            if kind in (1, 4):
                record = Record()
                record.ParseFromString(parts)
                found.append(record)
    return found


def history(run: Path) -> list[dict[str, Any]]:
    rows = []
    for record in wandb_records(run):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append({name: value for name, value in items.items() if not name.startswith("_")})
    return rows


def test_wandb_reads_what_was_written_and_goes_on_in_the_same_run(tmp_path: Path, offline: None) -> None:
    first = opened(tmp_path, "wandb")
    for record in RECORDS:
        first.log(record, {"node0/cpu_percent": 12.5} if record == RECORDS[0] else None)
    assert first.close() == {}
    begun = int(time.time())
    while int(time.time()) == begun:  # W&B names the folder of a start by the second
        time.sleep(0.05)
    second = opened(tmp_path, "wandb", step=3)
    for record in LATER:
        second.log(record)
    assert second.close() == {}
    import wandb

    wandb.teardown()  # as at the end of a process: its core program writes what it still holds

    assert history(tmp_path) == KEPT
    name = json.loads((tmp_path / "sinks.json").read_text())["name"]
    runs = [record.run for record in wandb_records(tmp_path) if record.WhichOneof("record_type") == "run"]
    assert {one.run_id for one in runs} == {name}
    assert {one.display_name for one in runs} == {tmp_path.name}
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["run"] == {"seed": 1}
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
    with pytest.raises(TrainerError, match=r"No API key configured.; set WANDB_API_KEY or WANDB_MODE=offline"):
        opened(tmp_path, "tensorboard", "wandb")
    fail(CommError("timed out"))
    sinks, errors = open_sinks(("wandb", "tensorboard"), tmp_path, recipe=RECIPE, step=0)
    assert errors == {"wandb": "CommError: timed out"}
    assert sinks.log({"step": 1, "loss": 1.0}) == {}
    sinks.close()
    assert events(tmp_path).Scalars("train/loss")[0].value == 1.0


def test_a_damaged_name_is_refused_by_its_file(tmp_path: Path, offline: None) -> None:
    (tmp_path / "sinks.json").write_text("{")
    with pytest.raises(RunDirError, match=r"sinks.json: .*; remove it to start a new W&B or Trackio run"):
        opened(tmp_path, "wandb")


# ---- Trackio ----

WRITE = """
    import json, sys
    from pathlib import Path
    from lt_trainer.observability.sinks import open_sinks
    run, step, records = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    sinks, lost = open_sinks(("trackio",), run, recipe={"run": {"seed": 1}}, step=step)
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
    assert in_process(WRITE, str(run), "0", json.dumps(RECORDS)) == "", "standard output is the run's"
    assert in_process(WRITE, str(run), "3", json.dumps(LATER)) == ""
    found = json.loads(in_process(READ, TRACKIO_DIR=str(run / "trackio")))
    assert found["run"] == json.loads((run / "sinks.json").read_text())["name"]
    assert found["run"].startswith("first-")
    assert found["config"]["run"] == {"seed": 1}
    assert found["logs"] == KEPT


def test_trackio_goes_where_the_environment_says(tmp_path: Path, trackio: None) -> None:
    place = str(tmp_path / "shared")
    for name in ("a/run", "b/run"):
        (tmp_path / name).mkdir(parents=True)
        in_process(WRITE, str(tmp_path / name), "0", json.dumps([{"step": 1, "loss": 1.5}]), TRACKIO_DIR=place)
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
    with pytest.raises(TrainerError, match=r"requires a write token.*remove trackio from metrics.sinks"):
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
    for tag, field in (("train/loss", "loss"), ("validation/loss", "val_loss"), ("time/rest_s", "rest_s")):
        wanted = [(record["step"], record[field]) for record in records if field in record]
        assert [one.step for one in found.Scalars(tag)] == [step for step, _ in wanted]
        assert [one.value for one in found.Scalars(tag)] == pytest.approx([value for _, value in wanted])
    assert '"metrics"' in found.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0].decode()


def test_a_sink_that_fails_in_a_run_is_noted_and_the_run_goes_on(recipe_base, fake_engine, capsys, monkeypatch) -> None:
    from lt_trainer.observability import setup

    monkeypatch.setattr(setup, "open_sinks", lambda *_, **__: (together(tensorboard=Broken()), {}))
    recipe_base["metrics"]["sinks"] = ["tensorboard"]
    assert start(recipe_base) == 0
    assert capsys.readouterr().out.count("sink tensorboard failed") == 1
    out = Path(recipe_base["run"]["dir"])
    failed = [event for event in read_jsonl(out / "events.jsonl") if event["event"] == "sink_failed"]
    assert [(event["sink"], event["error"]) for event in failed] == [
        ("tensorboard", "ConnectionError: the service is away")
    ]
    assert sum("loss" in record for record in read_jsonl(out / "metrics.jsonl")) == 20
