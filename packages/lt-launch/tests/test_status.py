"""The status table: what a person reads, from launch directories and from plain run directories."""

import doctest
import json
import os
import time
from pathlib import Path

import pytest

from lt_launch import launcher, status
from lt_launch.errors import LaunchError
from lt_launch.job import Job, Pipeline, Stage
from lt_launch.launch_dir import acquire_lock, create, load_launch, log_event, save_job_ids
from lt_launch.policy import Place, write_table
from lt_launch.profile import Profile
from lt_launch.progress import parse_progress, read_progress
from lt_launch.spec import stage_spec
from lt_launch.status import overall_state, show_launches, show_nodes, show_status, status_rows
from lt_launch.target import RenderedLaunch, TargetNode, get_target

STEPS, BATCH, SEQ = 1000, 8, 128


def run_directory(folder: Path, *, step: int, last: str = "start", speed: float = 512.0) -> None:
    """What lt-trainer leaves after `step` steps on two devices."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".lt-run").write_text('{"format": "lt-run", "version": 1}')
    recipe = {"schedule": {"max_steps": STEPS}, "batch": {"global_batch_size": BATCH}, "data": {"seq_len": SEQ}}
    (folder / "recipe.json").write_text(json.dumps({"recipe": recipe}))
    events = [{"event": "start", "world": 2}, {"event": "checkpoint", "step": step}]
    events += [{"event": last}] if last != "start" else []
    (folder / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
    rows = [{"step": s, "loss": 3.5, "tokens_per_sec": speed, "mfu": "nan"} for s in range(10, step + 1, 10)]
    rows.append({"step": step, "val_loss": 9.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9')


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    train = Job(name="train", argv=("x",), completion="run_dir", run_dir="runs/p/run", nodes=1, procs_per_node=2)
    stages = (
        Stage(job=Job(name="prepare", argv=("x",)), array=20),
        Stage(job=train, after=("prepare",)),
        Stage(job=Job(name="export", argv=("x",)), after=("train",)),
    )
    pipeline = Pipeline(name="p", stages=stages, out="runs/p")
    specs = {stage.name: stage_spec(stage, pipeline, Profile()) for stage in pipeline.stages}
    made = create(pipeline, Profile(), "local", RenderedLaunch(files={}), specs)
    for index in range(20):
        place = Place(made.directory / "stages/prepare/spec.json", index)
        number = place.new_attempt()
        done = {"kind": "failed", "code": 3, "reason": "rank 0 on h was the first to fail: exit code 3"}
        if index != 7:
            write_table(place.stamp, {"key": "k"})
            done = {"kind": "done", "code": 0, "reason": ""}
        write_table(place.attempt(number) / "exit.json", done)
    place = Place(made.directory / "stages/train/spec.json")
    place.new_attempt()
    log_event(made, "attempt_started", stage="train", attempt=0, hosts=["h1", "h2", "h3", "h4"])
    run_directory(tmp_path / "runs/p/run", step=250)
    return made


def test_a_launch_is_found_by_folder_name_and_the_ids_of_its_jobs(launch) -> None:
    save_job_ids(launch, {"prepare": "41", "train": "42"})
    for name in ("runs/p", "runs/p/launch", "p", "41", "41_7", "42", "p-train"):
        assert load_launch(name).directory == launch.directory
    with pytest.raises(LaunchError, match="4: no launch here"):
        load_launch("4")


def test_what_is_shown_after_a_submission() -> None:
    assert doctest.testmod(launcher).failed == doctest.testmod(status).failed == 0
    text = launcher.format_submitted(Path("/runs/p"), {"prepare": "41", "train": "42"})
    assert text.startswith("job 41: prepare\njob 42: train\nfolder: /runs/p\nnext: lt launch status p\n")


def test_progress_of_a_run(launch) -> None:
    found = read_progress("runs/p/run")
    assert found is not None
    assert (found.step, found.max_steps, found.loss, found.tokens_per_sec) == (250, STEPS, 3.5, 1024.0)
    assert found.eta_s == 750 * BATCH * SEQ / 1024
    assert read_progress("runs/p") is None


RECIPE = "[schedule]\nmax_steps = 100\n[batch]\nglobal_batch_size = 8\n[data]\nseq_len = 64\n"


def test_progress_of_what_rank_0_has_written() -> None:
    """The newest line of training metrics counts; on two nodes of four devices the speed is that of all."""
    made = Job(name="x", argv=("x",), recipe=RECIPE, nodes=2, procs_per_node=4)
    lines = [
        "step=10 loss=3.5 learning_rate=1e-3 tokens_per_sec=64 mfu=nan",
        "step=20 loss=3.25 learning_rate=1e-3 tokens_per_sec=128 mfu=0.5",
        "step=20 val_loss=9 val_tokens=3",
        "# loss=1 of no step",
    ]
    found = parse_progress(lines, made)
    assert found is not None
    assert (found.step, found.max_steps, found.loss, found.tokens_per_sec, found.mfu) == (20, 100, 3.25, 1024.0, 0.5)
    assert found.eta_s == 80 * 8 * 64 / 1024
    assert parse_progress(lines[2:], made) is None


def test_the_table(launch, capsys: pytest.CaptureFixture[str]) -> None:
    with acquire_lock(launch):
        show_status(["p"], as_json=False)
    shown = capsys.readouterr().out.splitlines()
    assert " ".join(shown[0].split()) == "RUN ON STAGE STATE AGE STEP LOSS TOKENS/S MFU ETA WHERE"
    cells = [row.split() for row in shown]
    assert cells[1][:6] == ["p", "local", "prepare[19", "of", "20]", "completed"]
    assert cells[2][:4] == ["p", "local", "prepare.7", "failed"]
    train = cells[3]
    assert train[:4] == ["p", "local", "train", "running"]
    assert train[5:] == ["250/1000", "25%", "3.5000", "1.02k", "12m30s", "h1,", "h2,", "h3", "and", "1", "more"]
    assert cells[4] == ["p", "local", "export", "pending"]
    assert shown[5] == "p prepare.7: rank 0 on h was the first to fail: exit code 3"


def test_states_when_nobody_runs_it(launch) -> None:
    rows = {row["status"].stage: row["status"] for row in status_rows("p")}
    assert (rows["train"].state, rows["train"].reason) == ("lost", "the process that ran it is gone")
    assert rows["export"].state == "pending"
    place = Place(launch.directory / "stages/train/spec.json")
    for kind, cancelled, state in [
        ("stopped", False, "requeued"),
        ("stopped", True, "cancelled"),
        ("killed", False, "failed"),
        ("lost", False, "lost"),
        ("failed", False, "failed"),
    ]:
        if cancelled:
            log_event(launch, "cancel_requested")
        write_table(place.attempt(0) / "exit.json", {"kind": kind, "code": 75, "reason": "why"})
        assert {row["status"].stage: row["status"].state for row in status_rows("p")}["train"] == state, kind


def test_json_holds_the_same(launch, capsys: pytest.CaptureFixture[str]) -> None:
    show_status(["p"], as_json=True)
    rows = {row["stage"]: row for row in json.loads(capsys.readouterr().out)}
    assert (rows["train"]["state"], rows["train"]["progress"]["step"]) == ("lost", 250)
    assert rows["train"]["progress"]["mfu"] is None
    assert rows["export"]["progress"] is None


@pytest.mark.parametrize(("last", "state"), [("completed", "completed"), ("stop", "requeued"), ("start", "lost")])
def test_a_run_that_was_started_without_a_launcher(tmp_path: Path, last: str, state: str) -> None:
    run_directory(tmp_path / "run", step=20, last=last)
    (row,) = status_rows(tmp_path / "run")
    assert (row["status"].state, row["progress"].step) == (state, 20)


def test_the_list_of_launches(launch, capsys: pytest.CaptureFixture[str]) -> None:
    save_job_ids(launch, {"prepare": "41", "train": "42"})
    show_launches()
    words = capsys.readouterr().out.splitlines()[1].split()
    assert words[:3] == ["p", "local", "failed"]
    assert words[-3:] == ["41", "42", str(launch.directory.parent)]


def test_where_nothing_was_launched_it_says_how_to(capsys: pytest.CaptureFixture[str]) -> None:
    show_launches()
    assert "lt launch run RUN.toml" in capsys.readouterr().err
    with pytest.raises(LaunchError, match=r"lt launch run RUN\.toml"):
        show_status([], as_json=False)


def test_nodes_are_shown_without_columns_that_nobody_fills(capsys: pytest.CaptureFixture[str]) -> None:
    show_nodes("local", None, None)
    assert capsys.readouterr().out.splitlines()[0].split() == ["NODE", "STATE", "DEVICES"]


def test_what_a_target_tells_is_neither_markup_nor_an_escape(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = "[red]n \x1b[31m\n\x9b2J"
    node = TargetNode(name=evil, state=evil, devices=evil, partition=evil, reason=evil)
    target = get_target("local")
    monkeypatch.setattr("lt_launch.status.get_target", lambda name: target)
    monkeypatch.setattr(type(target), "nodes", lambda target, profile: [node])
    show_nodes("local", None, None)
    shown = capsys.readouterr().out
    assert shown.count(r"[red]n \x1b[31m\n\x9b2J") == 5
    assert all(line.isprintable() for line in shown.splitlines())


def test_the_worst_state_is_the_launchs() -> None:
    assert overall_state(["completed", "running", "pending"]) == "running"
    assert overall_state(["completed", "failed", "running"]) == "failed"
    assert overall_state(["completed", "completed"]) == "completed"


def test_the_age_is_counted_from_the_attempts_begin(launch) -> None:
    place = Place(launch.directory / "stages/train/spec.json")
    then = time.time() - 3700
    os.utime(place.attempt(0), (then, then))
    with acquire_lock(launch):
        status = {row["status"].stage: row["status"] for row in status_rows("p")}["train"]
    assert status.since == then


def test_a_damaged_launch_does_not_hide_the_others(launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = Pipeline.from_job(Job(name="other", argv=("x",)))
    other = create(
        pipeline,
        Profile(),
        "local",
        RenderedLaunch(files={}),
        {"other": stage_spec(pipeline.stages[0], pipeline, Profile())},
    )
    (other.directory / "launch.json").write_text("{")
    show_status([], as_json=True)
    shown = capsys.readouterr()
    assert {row["run"] for row in json.loads(shown.out)} == {"p"}
    assert "launch.json is damaged" in shown.err
