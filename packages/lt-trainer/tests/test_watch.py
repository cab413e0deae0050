"""What the files of a run show in the terminal: while it goes on, when it is over, after rollbacks."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lt_test_helpers.runs import run
from lt_trainer.config.recipe import load
from lt_trainer.errors import RunDirError
from lt_trainer.observability.watch import RunWatcher, render, watch_run

START = {"time": "2026-01-01T10:20:30.000+00:00", "event": "start", "device": "NVIDIA H200"}


def watcher_of(folder: Path, idle_s: float = 5.0) -> RunWatcher:
    """A watcher that has polled, at some time after the newest write."""
    logs = [folder / "metrics.jsonl", folder / "events.jsonl"]
    newest = max((path.stat().st_mtime for path in logs if path.exists()), default=0.0)
    watcher = RunWatcher(folder, clock=lambda: newest + idle_s)
    watcher.poll()
    return watcher


def text(watcher: RunWatcher, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(watcher))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def record(step: int, **changes: Any) -> dict[str, Any]:
    parts = {"data_s": 1.0, "forward_backward_s": 7.0, "optimizer_s": 1.0, "rest_s": 1.0}
    values = {"step": step, "loss": 10.0 - step / 100, "tokens_per_sec": 32768.0, "mfu": 0.412, "memory_gib": 61.5}
    return values | {"elapsed_s": float(step)} | parts | changes


def append(path: Path, *objects: object) -> None:
    with open(path, "a") as file:
        file.writelines(json.dumps(one) + "\n" for one in objects)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / ".lt-run").write_text("{}")
    (tmp_path / "recipe.json").write_text(json.dumps({"recipe": {"schedule": {"max_steps": 400}}}))
    return tmp_path


def test_what_a_run_wrote_is_neither_markup_nor_an_escape(folder: Path) -> None:
    path = folder / "[red]a \x1b[31m"
    path.mkdir()
    for name in (".lt-run", "recipe.json"):
        (path / name).write_text((folder / name).read_text())
    evil = "[bold]b \x1b]0;t\x07"
    append(path / "events.jsonl", START | {"device": evil}, START | {"event": "note", "text": evil})
    append(path / "metrics.jsonl", record(10), {"step": 10, "val_loss": 9.0, "val_set": evil})
    shown = text(watcher_of(path), width=300)
    assert shown.count(r"[bold]b \x1b]0;t\x07") >= 3
    assert r"[red]a \x1b[31m" in shown
    assert all(line.isprintable() for line in shown.splitlines())


@pytest.mark.parametrize("width", [60, 140])
def test_every_number_is_shown_whole(folder: Path, width: int) -> None:
    append(folder / "metrics.jsonl", record(2), record(3, joules_per_token=0.0123, tokens_per_sec=1234567.0))
    shown = text(watcher_of(folder), width)
    assert max(map(len, shown.splitlines())) <= width
    for words in ("9.9700", "1,234,567", "41.2%", "61.50 GiB", "0.0123 J"):
        assert words in shown, words


def test_the_time_that_remains_is_by_the_speed_of_this_start(folder: Path) -> None:
    """A start that was killed after 20 s; the next took 30 s to its first record and has needed 2 s a step since."""
    first = [record(step, elapsed_s=10.0 * step) for step in (1, 2)]
    second = [record(3, elapsed_s=30.0, rest_s=21.0)]
    quick = {"data_s": 0.0, "forward_backward_s": 1.0, "optimizer_s": 0.5, "rest_s": 0.5}
    second += [record(step, elapsed_s=30.0 + 2 * (step - 3), **quick) for step in (4, 5)]
    append(folder / "metrics.jsonl", *first, *second)
    assert watcher_of(folder).remaining_s == 395 * 2.0


def test_a_run_that_goes_on(folder: Path) -> None:
    append(folder / "events.jsonl", START)
    append(folder / "metrics.jsonl", *(record(step) for step in range(1, 101)))
    append(folder / "metrics.jsonl", {"step": 100, "val_loss": 3.25, "val_bits_per_byte": 1.25})
    append(folder / "metrics.jsonl", {"step": 100, "val_loss": 2.5, "val_set": "code"})
    watcher = watcher_of(folder)
    shown = text(watcher)
    for words in (
        *("running", "NVIDIA H200", "100 of 400, 5 min 0 s left", "9.0000", "32,768", "9.98 to 9"),
        "data 10%, forward + backward 70%, optimizer 10%",
        "loss 3.2500, 1.2500 bits per byte, step 100",
        *("validation code", "loss 2.5000, step 100"),
        "10:20:30",
    ):
        assert words in shown, (words, shown)
    append(folder / "metrics.jsonl", record(101, loss=1.5))
    watcher.poll()
    assert "1.5000" in text(watcher)


def test_a_rollback_and_a_new_start_are_followed(folder: Path) -> None:
    append(folder / "metrics.jsonl", *(record(step) for step in range(1, 31)))
    watcher = watcher_of(folder)
    again = {"loss": 1.0, "forward_backward_s": 0.0}
    append(folder / "metrics.jsonl", *(record(step, elapsed_s=3.0 * (step - 20), **again) for step in range(21, 26)))
    watcher.poll()
    assert [one["step"] for one in watcher.train] == list(range(1, 26))
    assert watcher.train[-1]["loss"] == 1.0
    assert watcher.remaining_s == 3.0 * (400 - 25), "at the speed of the new start"


STOP = START | {"event": "stop", "signal": "SIGTERM"}


@pytest.mark.parametrize(
    ("events", "state", "words"),
    [
        ([], "not started", "not started"),
        ([START], "running", "nothing written for 10 min"),
        ([START, STOP], "stopped by SIGTERM", "stopped by SIGTERM"),
        ([START, STOP, START], "running", "running"),
        ([START, START | {"event": "completed", "step": 9}], "completed", "completed"),
    ],
)
def test_states(folder: Path, events: list[dict[str, Any]], state: str, words: str) -> None:
    append(folder / "events.jsonl", *events)
    watcher = watcher_of(folder, idle_s=600)
    assert watcher.state == state
    assert words in text(watcher)


def test_losses_that_are_not_finite_leave_gaps(folder: Path) -> None:
    append(folder / "metrics.jsonl", *(record(i, loss="nan" if i == 2 else 4.0 - i) for i in range(1, 4)))
    assert "█ ▁" in text(watcher_of(folder))


def test_what_is_no_run_or_damaged_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"is not a run directory \(it has no .lt-run\)"):
        RunWatcher(tmp_path / "none")
    (folder / "metrics.jsonl").write_text('{"step": 1}\nx\n')
    with pytest.raises(RunDirError, match=r"metrics.jsonl:2: not a JSON object"):
        watcher_of(folder)


def test_a_finished_run_is_shown_once_and_nothing_in_it_changes(recipe_base, fake_engine) -> None:
    recipe_base["metrics"]["validation_interval"] = 10
    assert run(load(base=recipe_base, overrides=["run.engine=fake"]), environ={}) == 0
    out = Path(recipe_base["run"]["dir"])
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    console = Console(file=io.StringIO(), width=140)
    watch_run(out, interval_s=3600, once=False, console=console)  # returns, as the run is done
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "20 of 20" in shown
    assert "training completed at step 20" in shown
    assert "bits per byte" in shown
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_the_command(folder: Path) -> None:
    append(folder / "metrics.jsonl", record(7))
    command = [sys.executable, "-m", "lt_trainer", "watch", str(folder), "--once"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "7 of 400" in done.stdout
    missing = subprocess.run([*command[:-2], str(folder / "none"), "--once"], capture_output=True, text=True)
    assert missing.returncode == 64
    assert "is not a run directory" in missing.stderr
