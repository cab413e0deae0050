"""The status table: what a person reads, from launch directories and run directories."""

import json
import os
import time
from pathlib import Path

import pytest

from lt_launch.errors import LaunchError
from lt_launch.job import Job, Pipeline, Stage
from lt_launch.launch_dir import acquire_lock, create
from lt_launch.policy import Place, write_table
from lt_launch.profile import Profile
from lt_launch.spec import stage_spec
from lt_launch.status import COLUMNS, show_status, status_rows
from lt_launch.target import RenderedLaunch

STEPS, BATCH, SEQ = 1000, 8, 128
RECIPE = f"[schedule]\nmax_steps = {STEPS}\n[batch]\nglobal_batch_size = {BATCH}\n[data]\nseq_len = {SEQ}\n"
TRAIN = Job(
    name="train", argv=("x",), completion="run_dir", run_dir="runs/p/run", recipe=RECIPE, nodes=2, procs_per_node=4
)
EVIL = "[red]why \x1b[31m\n\x9b2J"


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Twenty elements of which one has failed, a training at step 250 on four hosts, and a stage that waits."""
    monkeypatch.chdir(tmp_path)
    stages = (
        Stage(job=Job(name="prepare", argv=("x",)), array=20),
        Stage(job=TRAIN, after=("prepare",)),
        Stage(job=Job(name="export", argv=("x",)), after=("train",)),
    )
    pipeline = Pipeline(name="p", stages=stages, out="runs/p")
    specs = {stage.name: stage_spec(stage, pipeline, Profile()) for stage in pipeline.stages}
    made = create(pipeline, Profile(), "local", RenderedLaunch(files={}), specs)
    for index in range(20):
        place = Place(made.directory / "stages/prepare/spec.json", index)
        number = place.new_attempt()
        done = {"kind": "failed", "code": 3, "reason": EVIL} if index == 7 else {"kind": "done", "code": 0}
        write_table(place.attempt(number) / "exit.json", done)
    train = Place(made.directory / "stages/train/spec.json")
    train.new_attempt()
    (train.attempt(0) / "hosts").write_text("h1\nh2\nh3\nh4\n")
    (tmp_path / "runs/p/run").mkdir()
    rows = [{"step": s, "loss": 3.5, "tokens_per_sec": 128, "mfu": "nan"} for s in range(10, 251, 10)]
    lines = [json.dumps(row) for row in [*rows, {"step": 250, "val_loss": 9.0}]]
    (tmp_path / "runs/p/run/metrics.jsonl").write_text("\n".join([*lines, '{"step": 9']))
    return made


def states() -> dict[str, str]:
    return {row["status"].stage: row["status"].state for row in status_rows("p")}


def test_the_table(launch, capsys: pytest.CaptureFixture[str]) -> None:
    """What others have written is one line and changes no terminal."""
    folder = launch.directory / "stages/train/attempt-000"
    then = time.time() - 3700
    os.utime(folder, (then, then))
    with acquire_lock(launch):
        show_status(["p"], as_json=False)
    shown = capsys.readouterr().out.splitlines()
    assert tuple(shown[0].split()) == COLUMNS
    cells = [row.split() for row in shown]
    assert cells[1][:6] == ["p", "local", "prepare[19", "of", "20]", "completed"]
    assert cells[2][:4] == ["p", "local", "prepare.7", "failed"]
    assert cells[3][:4] == ["p", "local", "train", "running"]
    assert cells[3][4].startswith("1:01:4")
    where = ["h1,", "h2,", "h3", "and", "1", "more"]
    assert cells[3][5:] == ["250/1000", "25%", "3.5000", "1.02", "k", "0:12:30", *where]
    assert cells[4] == ["p", "local", "export", "pending"]
    assert shown[5:] == [r"p prepare.7: [red]why \x1b[31m\n\x9b2J"]


def test_states_when_nobody_runs_it(launch) -> None:
    rows = {row["status"].stage: row["status"] for row in status_rows("p")}
    assert (rows["train"].state, rows["train"].reason) == ("lost", "the process that ran it is gone")
    assert rows["export"].state == "pending"
    file = launch.directory / "stages/train/attempt-000/exit.json"
    expected = {"done": "completed", "stopped": "requeued", "killed": "failed", "lost": "lost", "failed": "failed"}
    for kind, state in expected.items():
        write_table(file, {"kind": kind, "code": 75, "reason": "why"})
        assert states()["train"] == state, kind
    for stage in ("train", "export"):
        (launch.directory / "stages" / stage / "cancelled").touch()
    write_table(file, {"kind": "stopped", "code": 75})
    assert (states()["train"], states()["export"]) == ("cancelled", "cancelled")
    file.write_text("{")
    assert states()["train"] == "unknown"


def test_json_holds_the_same_and_damage_does_not_hide_others(launch, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = Pipeline.from_job(Job(name="other", argv=("x",)))
    spec = {"other": stage_spec(pipeline.stages[0], pipeline, Profile())}
    other = create(pipeline, Profile(), "local", RenderedLaunch(files={}), spec)
    (other.directory / "launch.json").write_text("{")
    show_status([], as_json=True)
    shown = capsys.readouterr()
    rows = {row["stage"]: row for row in json.loads(shown.out)}
    assert {row["run"] for row in rows.values()} == {"p"}
    assert (rows["train"]["state"], rows["train"]["progress"]["step"]) == ("lost", 250)
    assert rows["train"]["progress"]["mfu"] is None
    assert rows["export"]["progress"] is None
    assert "launch.json is damaged" in shown.err


def test_stages_whose_names_end_in_numbers_are_no_array(tmp_path: Path) -> None:
    stages = tuple(Stage(job=Job(name=f"exp.{number}", argv=("x",))) for number in range(14))
    pipeline = Pipeline(name="q", stages=stages, out=str(tmp_path / "q"))
    specs = {stage.name: stage_spec(stage, pipeline, Profile()) for stage in stages}
    create(pipeline, Profile(), "local", RenderedLaunch(files={}), specs)
    assert [row["status"].stage for row in status_rows("q")] == [stage.name for stage in stages]


def test_where_nothing_was_launched_it_says_how_to() -> None:
    with pytest.raises(LaunchError, match=r"lt launch run RUN\.toml"):
        show_status([], as_json=False)
