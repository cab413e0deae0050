"""What the files of a run show in the terminal: while it goes on, when it is over, after ways back."""

import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lt_trainer.config.recipe import load
from lt_trainer.errors import RunDirError
from lt_trainer.observability.watch.follower import JsonlFollower, RunView, RunWatcher
from lt_trainer.observability.watch.terminal import _duration, render, watch_run
from lt_trainer.run_directory.jsonl import read_jsonl
from lt_trainer.training.runner import run


def text(view: RunView, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(view))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def record(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 10.0 - step / 100,
        "learning_rate": 1e-3,
        "grad_norm": 0.5,
        "tokens_per_sec": 32768.0,
        "mfu": 0.412,
        "hfu": 0.5,
        "memory_gib": 61.5,
        "elapsed_s": float(step),
        "data_s": 1.0,
        "forward_backward_s": 7.0,
        "optimizer_s": 1.0,
        "checkpoint_s": 0.0,
        "validation_s": 0.0,
        "rest_s": 1.0,
    } | changes


def append(path: Path, *objects: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.writelines(json.dumps(one) + "\n" for one in objects)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / ".lt-run").write_text("{}")
    (tmp_path / "recipe.json").write_text(json.dumps({"recipe": {"schedule": {"max_steps": 400}}}))
    return tmp_path


def test_a_line_nested_without_end(folder: Path) -> None:
    append(folder / "metrics.jsonl", record(10))
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("[" * 100_000 + "\n")
    assert [one["step"] for one in JsonlFollower(folder / "metrics.jsonl").read()] == [10]
    with pytest.raises(RunDirError, match=r"metrics\.jsonl:2: not a JSON object .*; remove the line"):
        read_jsonl(folder / "metrics.jsonl")


def test_what_a_run_wrote_is_neither_markup_nor_an_escape(folder: Path) -> None:
    path = folder / "[red]a \x1b[31m"
    path.mkdir()
    for name in (".lt-run", "recipe.json"):
        (path / name).write_text((folder / name).read_text())
    evil = "[bold]b \x1b]0;t\x07"
    append(path / "events.jsonl", {"event": "start", "world": 2, "device": evil, "time": "2026-01-01", "step": 0})
    append(path / "events.jsonl", {"event": "note", "text": evil, "step": 1})
    append(path / "metrics.jsonl", record(10), {"step": 10, "val_loss": 9.0, "set": evil})
    shown = text(RunWatcher(path).poll(), width=300)
    assert shown.count(r"[bold]b \x1b]0;t\x07") >= 3
    assert r"[red]a \x1b[31m" in shown
    assert all(line.isprintable() for line in shown.splitlines())


def test_a_follower_reads_each_line_once_and_torn_ones_later(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    follower = JsonlFollower(path)
    assert follower.read() == []
    path.write_text('{"a": 1}\n{"a": "nan"}\n[3]\n{"a":')
    first, second = follower.read()
    assert first == {"a": 1}
    assert math.isnan(second["a"])
    assert follower.read() == []
    with open(path, "a") as file:
        file.write(" 4}\n")
    assert follower.read() == [{"a": 4}]
    path.write_text('{"a": 1}\n')  # a new start has cut what was torn
    assert follower.read() == []
    append(path, {"a": 5})
    assert follower.read() == [{"a": 5}]


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_every_number_is_shown_whole_at_any_width(folder: Path, width: int) -> None:
    last = record(3, joules_per_token=0.0123, energy_kwh=41.5, tokens_per_sec=1234567.0)
    append(folder / "metrics.jsonl", record(2), last)
    node = {
        "host": "machine-a",
        "cpu_percent": 93.0,
        "memory_available_gib": 1021.5,
        "disk_write_mib_s": 1.5,
    }
    node |= {"disk_free_gib": 999.0, "gpus": [{"utilization_percent": 99, "power_w": 700.0, "temperature_c": 71}] * 8}
    for name in ("0", "1"):
        append(
            folder / "monitor" / f"node{name}.jsonl", {"time": "2026-01-01T00:00:00.000+00:00", "node": name, **node}
        )
    shown = text(RunWatcher(folder).poll(), width)
    assert "…" not in shown
    lines = shown.splitlines()
    assert max(map(len, lines)) <= width
    for title, number in (
        *(("loss", "9.9700"), ("tokens/s per device", "1,234,567"), ("MFU", "41.2%"), ("HFU", "50.0%")),
        *(("memory GiB", "61.50"), ("J/token", "0.0123"), ("kWh", "41.5")),
    ):
        (row,) = [
            i for i, line in enumerate(lines) if f" {title} " in line and "%" not in line and "to" not in line.split()
        ]
        column = lines[row].index(f" {title} ")
        assert lines[row + 1][column:].split()[0] == number, shown
    assert shown.count("5600 W") == 2
    assert shown.count("machine-a") % 2 == 0


def test_the_time_that_remains_is_by_the_speed_of_this_start(folder: Path) -> None:
    """A start that was killed after 20 s; the next took 30 s to its first record and has needed 2 s a step since."""
    first = [record(step, elapsed_s=10.0 * step) for step in (1, 2)]
    second = [record(3, elapsed_s=30.0, rest_s=21.0), *(record(s, elapsed_s=30.0 + 2 * (s - 3)) for s in (4, 5))]
    for one in second[1:]:
        one |= {"data_s": 0.0, "forward_backward_s": 1.0, "optimizer_s": 0.5, "rest_s": 0.5}
    append(folder / "metrics.jsonl", *first, *second)
    assert RunWatcher(folder).poll().remaining_s == 395 * 2.0


def test_a_run_that_goes_on(folder: Path) -> None:
    watcher = RunWatcher(folder, clock=lambda: (folder / "metrics.jsonl").stat().st_mtime + 5)
    append(
        folder / "events.jsonl", {"time": "2026-01-01T10:20:30.000+00:00", "event": "start", "device": "NVIDIA H200"}
    )
    append(folder / "metrics.jsonl", *(record(step) for step in range(1, 101)))
    append(folder / "metrics.jsonl", {"step": 100, "val_loss": 3.25, "val_perplexity": 25.8, "val_bits_per_byte": 1.25})
    append(folder / "metrics.jsonl", {"step": 100, "val_loss": 2.5, "val_perplexity": 12.2, "val_set": "code"})
    append(
        folder / "monitor" / "node00000.jsonl",
        {"node": 0, "cpu_percent": 1.0},
        {
            "node": 0,
            "host": "gpu-7",
            "cpu_percent": 37.0,
            "memory_available_gib": 900.5,
            "disk_free_gib": 4000.0,
            "disk_write_mib_s": 120.25,
            "ranks": {"0": {"rss_gib": 4.25}, "1": {"rss_gib": 4.5}},
            "gpus": [
                {"gpu": 0, "utilization_percent": 97, "power_w": 640.0, "temperature_c": 61},
                {"gpu": 1, "utilization_percent": 98, "power_w": 610.0, "temperature_c": 64},
            ],
        },
    )
    view = watcher.poll()
    assert (view.state, view.step, view.max_steps, view.idle_s) == ("running", 100, 400, 5.0)
    assert view.remaining_s == 300.0
    shown = text(view)
    for words in (
        "running",
        "step 100 of 400",
        "5 min left",
        "NVIDIA H200",
        "9.0000",
        "32,768",
        "41.2%",
        "61.50",
        "data 10%, forward + backward 70%, optimizer 10%",
        "9.985 to 9.005",
        "1.2500",
        "code",
        "2.5000",
        "node00000 gpu-7",
        "37 %",
        "900.5 GiB free",
        "8.75 GiB",
        "120.2 MiB/s",
        "97% 98%",
        "1250 W",
        "64 C",
        "10:20:30  start device=NVIDIA H200",
    ):
        assert words in shown, (words, shown)
    append(folder / "metrics.jsonl", record(101, loss=1.5))
    assert "1.5000" in text(watcher.poll())


def test_a_way_back_and_a_new_start_are_followed(folder: Path) -> None:
    watcher = RunWatcher(folder)
    append(folder / "metrics.jsonl", *(record(step) for step in range(1, 31)))
    watcher.poll()
    again = {"loss": 1.0, "forward_backward_s": 0.0}
    append(folder / "metrics.jsonl", *(record(step, elapsed_s=3.0 * (step - 20), **again) for step in range(21, 26)))
    view = watcher.poll()
    assert [one["step"] for one in view.train] == list(range(1, 26))
    assert view.train[-1]["loss"] == 1.0
    assert view.remaining_s == 3.0 * (400 - 25)  # at the speed of the new start


@pytest.mark.parametrize(
    ("events", "state", "words"),
    [
        ([], "not started", "not started"),
        ([{"event": "start"}], "running", "nothing written for 10 min"),
        ([{"event": "start"}, {"event": "stop", "signal": "SIGTERM"}], "stopped by SIGTERM", "stopped by SIGTERM"),
        ([{"event": "start"}, {"event": "stop", "signal": "SIGTERM"}, {"event": "start"}], "running", "running"),
        ([{"event": "start"}, {"event": "completed", "step": 9}], "completed", "completed"),
    ],
)
def test_states(folder: Path, events: list[dict[str, Any]], state: str, words: str) -> None:
    append(folder / "events.jsonl", *events)
    watcher = RunWatcher(folder, clock=lambda: (folder / "events.jsonl").stat().st_mtime + 600)
    view = watcher.poll()
    assert view.state == state
    assert words in text(view)


def test_losses_that_are_not_finite_leave_gaps(folder: Path) -> None:
    append(folder / "metrics.jsonl", *(record(i, loss="nan" if i == 2 else 4.0 - i) for i in range(1, 4)))
    assert "█ ▁" in text(RunWatcher(folder).poll())
    append(folder / "metrics.jsonl", record(4, loss="inf"))
    assert "inf" in text(RunWatcher(folder).poll())


def test_a_narrow_terminal_is_no_error(folder: Path) -> None:
    append(folder / "metrics.jsonl", record(1))
    assert max(len(line) for line in text(RunWatcher(folder).poll(), width=40).splitlines()) <= 40


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (59, "59 s"),
        (60, "1 min"),
        (125, "2 min 5 s"),
        (7260, "2 h 1 min"),
        (90000, "1 d 1 h"),
        (math.nan, "?"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert _duration(seconds) == words


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"is not a run directory \(it has no .lt-run\)"):
        RunWatcher(tmp_path)


def test_a_finished_run_is_shown_once_and_nothing_in_it_changes(recipe_base, fake_engine) -> None:
    recipe_base["metrics"]["validation_interval"] = 10
    assert run(load(base=recipe_base, overrides=["run.engine=fake"]), environ={}) == 0
    out = Path(recipe_base["run"]["dir"])
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    console = Console(file=io.StringIO(), width=140)
    watch_run(out, interval_s=3600, once=False, console=console)  # returns, as the run is done
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "step 20 of 20" in shown
    assert "training completed at step 20" in shown
    assert "bits per byte" in shown
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_the_command(folder: Path) -> None:
    append(folder / "metrics.jsonl", record(7))
    command = [sys.executable, "-m", "lt_trainer", "watch", str(folder), "--once"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "step 7 of 400" in done.stdout
    missing = subprocess.run([*command[:-2], str(folder / "none"), "--once"], capture_output=True, text=True)
    assert missing.returncode == 64
    assert "is not a run directory" in missing.stderr
