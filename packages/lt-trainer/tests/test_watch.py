"""What the files of a run show in the terminal: while it goes on, when it is over, after rollbacks."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lt_test_helpers.runs import run
from lt_trainer.config.recipe import load
from lt_trainer.errors import RunDirError
from lt_trainer.observability.run_history import RunHistory
from lt_trainer.observability.watch import render, watch_run

START = {"time": "2026-01-01T10:20:30.000+00:00", "event": "start", "device": "NVIDIA H200"}


def text(history: RunHistory, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(render(history))
    return console.export_text()


def record(step: int, **changes: Any) -> dict[str, Any]:
    values = {"step": step, "loss": 10.0 - step / 100, "tokens_per_sec": 32768.0, "mfu": 0.412, "memory_gib": 61.5}
    return values | {"data_s": 0.25, "forward_backward_s": 0.75} | changes


def append(path: Path, *objects: object) -> None:
    with open(path, "a") as file:
        file.writelines(json.dumps(one) + "\n" for one in objects)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / ".lt-run").write_text("{}")
    (tmp_path / "recipe.json").write_text(json.dumps({"recipe": {"schedule": {"max_steps": 400}}}))
    return tmp_path


def test_what_a_run_wrote_is_neither_markup_nor_an_escape(folder: Path) -> None:
    path = folder.rename(folder.with_name("[red]a \x1b[31m"))
    evil = "[bold]b \x1b]0;t\x07"
    append(path / "events.jsonl", START | {"device": evil}, START | {"event": "note", "text": evil})
    append(path / "metrics.jsonl", record(10), {"step": 10, "val_loss": 9.0, "val_set": evil})
    shown = text(RunHistory(path), width=300)
    assert shown.count(r"[bold]b \x1b]0;t\x07") >= 3
    assert r"[red]a \x1b[31m" in shown
    assert all(line.isprintable() for line in shown.splitlines())


def test_a_run_that_goes_on_is_rolled_back_and_starts_again(folder: Path) -> None:
    append(folder / "events.jsonl", START)
    append(folder / "metrics.jsonl", *(record(step) for step in range(1, 101)))
    validated = {"step": 100, "val_loss": 3.25, "val_bits_per_byte": 1.25}
    append(folder / "metrics.jsonl", validated, {"step": 100, "val_loss": 2.5, "val_set": "code"})
    history = RunHistory(folder)
    for width in (80, 140):
        for words in (
            *("running or killed", "NVIDIA H200", "100 of 400, 0:05:00 left", "9.0000", "32,768", "9.98 to 9"),
            *("loss 3.2500, 1.2500 bits per byte, step 100", "validation code", "loss 2.5000, step 100", "10:20:30"),
        ):
            assert words in text(history, width), words
    append(folder / "metrics.jsonl", *(record(step, loss=1.0, forward_backward_s=2.75) for step in range(51, 76)))
    history.poll()
    assert [one["step"] for one in history.train] == list(range(1, 76))
    assert history.train[-1]["loss"] == 1.0
    assert history.seconds_left == 3.0 * (400 - 75), "at the speed of the newest records"
    assert history.seconds == 100 * 1.0 + 25 * 3.0
    append(folder / "metrics.jsonl", record(76, loss="nan"))
    history.poll()
    assert "█" in text(history), "losses that are not finite leave gaps"
    for kind, state in (("stop", "stopped by SIGTERM"), ("start", "running or killed"), ("completed", "completed")):
        append(folder / "events.jsonl", START | {"event": kind, "signal": "SIGTERM"})
        history.poll()
        assert history.state == state


def test_a_finished_run_is_shown_once_and_nothing_in_it_changes(recipe_base, fake_engine) -> None:
    recipe_base["metrics"]["validation_interval"] = 10
    assert run(load(base=recipe_base, overrides=["run.engine=fake"]), environ={}) == 0
    out = Path(recipe_base["run"]["dir"])
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    console = Console(file=io.StringIO(), width=140, record=True)
    watch_run(out, interval_s=3600, once=False, console=console)  # returns, as the run is done
    shown = console.export_text()
    assert ("left" in shown, shown[-1]) == (False, "\n")
    assert [words for words in ("20 of 20", "completed at step 20", "bits per byte") if words not in shown] == []
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_what_is_no_run_is_told(folder: Path) -> None:
    append(folder / "metrics.jsonl", [1])
    for path, told in ((folder / "none", "is not a run directory"), (folder, "metrics.jsonl:1: not a JSON object")):
        with pytest.raises(RunDirError, match=told):
            RunHistory(path)
