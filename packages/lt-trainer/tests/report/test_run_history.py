"""What a run's files tell: state, the way that counts, time over starts, marks, names."""

import json
import math
from pathlib import Path

import pytest

from lt_trainer.errors import RecipeError, RunDirError
from lt_trainer.observability.report.run_history import read_run, unique_names


def test_a_run_with_everything_in_it(eventful: Path) -> None:
    run = read_run(eventful)
    assert (run.name, run.state, run.step, run.max_steps, run.n_superseded) == ("eventful", "completed", 400, 400, 10)
    assert [record["step"] for record in run.train] == list(range(1, 401))
    assert max(record["loss"] for record in run.train) < 99, "the way that was left is gone"
    assert {name: [r["step"] for r in found] for name, found in run.validation.items()} == {
        "web": list(range(50, 401, 50)),
        "code": list(range(50, 401, 50)),
    }
    assert [(mark.kind, mark.step) for mark in run.step_events] == [
        ("checkpoint", 100),
        ("checkpoint", 200),
        ("stop", 200),
        ("resume", 200),
        ("checkpoint", 300),
        ("step_skipped", 308),
        ("step_skipped", 309),
        ("step_skipped", 310),
        ("rollback", 300),
        ("checkpoint", 400),
        ("completed", 400),
    ]
    assert [mark.text for mark in run.step_events if mark.text] == [
        "SIGTERM",
        *["loss nan, grad norm inf"] * 3,
        "from step 310",
    ]
    assert run.data_event["row"] == 19840
    assert run.recipe().batch.global_batch_size == 64


def test_seconds_are_those_of_all_starts(make_run) -> None:
    records = [{"step": s, "loss": 1.0, "elapsed_s": t} for s, t in ((1, 5.0), (2, 9.0), (2, 3.0), (3, 7.5), (4, 1.25))]
    run = read_run(make_run(records=records))
    assert run.training_seconds == 9.0 + 7.5 + 1.25
    assert [record["elapsed_s"] for record in run.train] == [5.0, 3.0, 7.5, 1.25]


def test_a_short_start_counts_too(make_run) -> None:
    """The second start's first record comes later on its own clock than the first start's last one."""
    numbers = ((1, 2.0, 2.0), (2, 3.0, 1.0), (3, 50.0, 50.0), (4, 51.0, 1.0), (5, 52.5, 1.5))
    records = [
        {"step": step, "loss": 1.0, "elapsed_s": elapsed, "forward_backward_s": busy - 0.5, "rest_s": 0.5}
        for step, elapsed, busy in numbers
    ]
    records.insert(4, {"step": 4, "val_loss": 1.0, "val_tokens": 9, "elapsed_s": 51.25})
    assert read_run(make_run(records=records)).training_seconds == 3.0 + 52.5


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], "not started"),
        ([{"event": "start"}], "running or killed"),
        ([{"event": "start"}, {"event": "stop", "step": 3, "signal": "SIGUSR1"}], "stopped by SIGUSR1"),
        ([{"event": "stop", "step": 3, "signal": "SIGUSR1"}, {"event": "start"}], "running or killed"),
        ([{"event": "start"}, {"event": "completed", "step": 9}, {"event": "note", "text": "x"}], "completed"),
    ],
)
def test_the_state_is_what_the_run_has_said_last(make_run, events: list[dict[str, object]], state: str) -> None:
    assert read_run(make_run(events=events)).state == state


def test_what_was_left_are_training_records(make_run) -> None:
    records = [{"step": step, "loss": 1.0, "elapsed_s": float(step)} for step in (1, 2, 3)]
    records += [{"step": 3, "val_loss": 1.0, "val_tokens": 9, "elapsed_s": 3.5}]
    records += [{"step": step, "loss": 1.0, "elapsed_s": step - 1.0} for step in (2, 3)]
    run = read_run(make_run(records=records))
    assert (run.n_superseded, run.validation) == (2, {})


def test_a_validation_that_was_done_twice_counts_once(make_run) -> None:
    records = [{"step": 5, "val_loss": loss, "val_tokens": 9, "elapsed_s": 1.0} for loss in (3.0, 2.0)]
    assert [record["val_loss"] for record in read_run(make_run(records=records)).validation[""]] == [2.0]


def test_a_run_that_has_only_begun(make_run) -> None:
    folder = make_run(records=[], events=[])
    for name in ("metrics.jsonl", "events.jsonl", "recipe.json", "recipe.toml", "environment.json"):
        (folder / name).unlink()
    run = read_run(folder)
    assert (run.step, run.training_seconds, run.max_steps, dict(run.start_event), dict(run.data_event)) == (
        0,
        0.0,
        0,
        {},
        {},
    )
    with pytest.raises(RecipeError, match=r"has no recipe.json"):
        run.recipe()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"is not a run directory \(it has no .lt-run\)"):
        read_run(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]", "[" * 10**6], ids=["cut", "list", "nested"])
def test_a_damaged_file_is_named(make_run, content: str) -> None:
    folder = make_run()
    (folder / "recipe.json").write_text(content)
    with pytest.raises(RunDirError, match=r"recipe.json is damaged"):
        read_run(folder)


def test_not_finite_numbers_are_numbers_again(make_run) -> None:
    (one,) = read_run(make_run(records=[{"step": 1, "loss": "nan", "elapsed_s": 1.0}])).train
    assert math.isnan(one["loss"])


def test_names_are_as_long_as_they_must_be(tmp_path: Path) -> None:
    assert unique_names([tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "c"]) == ["a/run", "b/run", "c"]
    assert unique_names([tmp_path / "x" / "a" / "run", tmp_path / "y" / "a" / "run"]) == ["x/a/run", "y/a/run"]


def test_nothing_in_the_run_is_touched(eventful: Path, tmp_path: Path) -> None:
    from lt_trainer.observability.report.writer import write_report

    before = {path: path.read_bytes() for path in eventful.rglob("*") if path.is_file()}
    write_report([eventful], tmp_path / "page.html")
    assert {path: path.read_bytes() for path in eventful.rglob("*") if path.is_file()} == before
    assert json.loads(before[eventful / ".lt-run"])["format"] == "lt-run"
