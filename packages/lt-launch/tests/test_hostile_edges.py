"""What a stranger put in the place of a file: every command refuses it at once, in a line that changes no terminal.

Each command that takes a path is given each thing of `lt_test_helpers.hostile` there, and in each file of a launch and
of its run. The slow test changes values of a launch's, a stage's and a run's records at random (LT_FUZZ, LT_SEED).
"""

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from lt_launch import launch_dir, policy
from lt_launch.__main__ import main
from lt_launch.errors import LaunchError
from lt_launch.job import Job, Pipeline
from lt_launch.profile import Profile
from lt_launch.spec import stage_spec
from lt_launch.target import Launch, RenderedLaunch
from lt_test_helpers.hostile import (
    ANSI,
    CONTENTS,
    FEW,
    PLACES,
    assert_harmless,
    assert_refused,
    make_fifo,
    mutate,
    replace,
    run_command,
    unusable_paths,
)

MANY = int(os.environ.get("LT_FUZZ", "2000"))
SEED = int(os.environ.get("LT_SEED", "0"))
NAME = ANSI.replace("/", "")

COMMANDS: dict[str, list[str]] = {
    "run": ["run", "{bad}"],
    "render": ["render", "{bad}"],
    "render profile": ["render", "{good}", "--profile", "{bad}"],
    "render hostfile": ["render", "{good}", "--on", "ssh", "--hostfile", "{bad}"],
    "doctor profile": ["doctor", "--profile", "{bad}"],
    "doctor hostfile": ["doctor", "--on", "ssh", "--hostfile", "{bad}"],
    "nodes profile": ["nodes", "--on", "slurm", "--profile", "{bad}"],
    "nodes hostfile": ["nodes", "--on", "ssh", "--hostfile", "{bad}"],
    "list profile": ["list", "--on", "slurm", "--profile", "{bad}"],
    "status": ["status", "{bad}"],
    "logs": ["logs", "{bad}"],
    "cancel": ["cancel", "{bad}"],
    "sagemaker-entrypoint": ["sagemaker-entrypoint", "--root", "{bad}"],
}
HARMLESS = {name: ("empty",) for name in COMMANDS if name.endswith("profile")}
"""An empty profile is one."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LT_LAUNCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "home"


def make(out: Path) -> Launch:
    pipeline = Pipeline.from_job(Job(name="x", argv=("true",)))
    specs = {stage.name: stage_spec(stage, pipeline, Profile()) for stage in pipeline.stages}
    return launch_dir.create(pipeline, Profile(), "local", RenderedLaunch(files={}), specs, out=out)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_path_of_a_command(command: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    good = tmp_path / "good.toml"
    good.write_text('command = ["true"]\nname = "x"\n')
    for number, (kind, make_it) in enumerate(FEW.items()):
        folder = tmp_path / f"{number} {NAME}"
        folder.mkdir()
        make_it(folder / "bad")
        words = [word.format(bad=folder / "bad", good=good) for word in COMMANDS[command]]
        outcome = run_command(main, "launch", *words)
        if kind in HARMLESS.get(command, ()):
            assert_harmless(outcome)
            continue
        try:
            assert_refused(outcome)
        except AssertionError as exc:
            raise AssertionError(f"{command} with {kind}") from exc


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_that_may_not_be_looked_at(
    command: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    good = tmp_path / "good.toml"
    good.write_text('command = ["true"]\nname = "x"\n')
    with unusable_paths(tmp_path) as paths:
        for bad in paths.values():
            assert_refused(
                run_command(main, "launch", *(word.format(bad=bad, good=good) for word in COMMANDS[command]))
            )


FILES = (
    "launch.json",
    "events.jsonl",
    "launch.lock",
    "../.lt-run",
    "../recipe.json",
    "../metrics.jsonl",
    "../events.jsonl",
    "stages/x/attempt-000/start.json",
    "stages/x/attempt-000/exit.json",
    "stages/x/attempt-000/rank-00000.log",
    "stages/x/done.json",
    "stages/x/attempt-000/key",
)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_a_launch_of_another_kind(name: str, home: Path, tmp_path: Path) -> None:
    out = tmp_path / NAME
    kinds = {kind: FEW[kind] for kind in ("fifo", "link to a device", "binary", "nested lists")}
    for kind, make_it in (PLACES | CONTENTS if name == "launch.json" else kinds).items():
        shutil.rmtree(out, ignore_errors=True)
        made = make(out)
        (out / ".lt-run").write_text("{}")
        replace(made.directory / name, make_it)
        if kind in CONTENTS:
            with open(made.directory / name, "ab") as file:
                file.write(b"\n")
        commands = [["status", out], ["status", out, "--json"], ["logs", out]]
        for words in [*commands, ["list"]] if name == "launch.json" else commands:
            outcome = run_command(main, "launch", *words)
            assert_harmless(outcome)
            assert outcome.code in (0, 64), (kind, words, outcome)


def test_no_link_is_followed_to_what_a_launch_writes(home: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    made = make(tmp_path / "out")
    for name in ("events.jsonl", "launch.lock"):
        replace(made.directory / name, lambda path: path.symlink_to(victim))
    launch_dir.log_event(made, "created")
    with pytest.raises(LaunchError, match="symbolic link"), launch_dir.acquire_lock(made):
        pass
    for name in ("note", "table.json"):
        (tmp_path / name).symlink_to(victim)
    policy.write_text(tmp_path / "note", "new")
    policy.write_table(tmp_path / "table.json", {})
    for name in ("log", "pipe"):
        (make_fifo if name == "pipe" else lambda path: path.symlink_to(victim))(tmp_path / name)
        with pytest.raises(OSError):  # noqa: PT011 - of the system or ours
            os.close(policy.open_for_appending(tmp_path / name))
    assert victim.read_text() == "precious"
    assert not (tmp_path / "table.json").is_symlink()


def test_a_pipe_among_what_a_stage_reads(tmp_path: Path) -> None:
    (tmp_path / "inputs").mkdir()
    make_fifo(tmp_path / "inputs" / "pipe")
    assert policy.fingerprint(tmp_path / "inputs") == policy.fingerprint(tmp_path / "inputs")
    assert policy.read_table(tmp_path / "inputs" / "pipe") is None
    assert policy.read_lines(tmp_path / "inputs" / "pipe") == []
    assert policy.last_lines(tmp_path / "inputs" / "pipe") == []


@pytest.mark.slow
def test_values_of_a_launch_changed_at_random(home: Path, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    made = make(tmp_path / "out")
    (tmp_path / "out" / ".lt-run").write_text("{}")
    record = {"step": 3, "loss": 2.0, "tokens_per_sec": 5.0, "mfu": 0.4, "elapsed_s": 2.0}
    recipe = {"recipe": {"schedule": {"max_steps": 9}, "batch": {"global_batch_size": 4}, "data": {"seq_len": 8}}}
    texts = {
        made.directory / "launch.json": (made.directory / "launch.json").read_text(),
        tmp_path / "out" / "metrics.jsonl": json.dumps(record) + "\n",
        tmp_path / "out" / "events.jsonl": json.dumps({"event": "start", "world": 2}) + "\n",
        tmp_path / "out" / "recipe.json": json.dumps(recipe),
        made.directory / "events.jsonl": json.dumps({"time": "x", "event": "submitted", "job_ids": {"x": "7"}}) + "\n",
    }
    stage = made.directory / "stages" / "x"
    ended = {"kind": "failed", "code": 70, "reason": "x", "rank": 0, "step": 3, "step_before": 1, "tail": ["a line"]}
    texts |= {
        stage / "spec.json": (stage / "spec.json").read_text(),
        stage / "attempt-000" / "exit.json": json.dumps(ended),
        stage / "done.json": json.dumps({"outputs": {"file": "hash"}}),
    }
    (stage / "attempt-000").mkdir()
    for path, text in texts.items():
        path.write_text(text)
    for number in range(MANY):
        path = rng.choice(list(texts))
        value = json.loads(texts[path])
        for _ in range(rng.choice((1, 1, 2, 3))):
            value = mutate(rng, value)
        path.write_text(json.dumps(value) + "\n")
        for words in (
            ["status", tmp_path / "out"],
            ["status", tmp_path / "out", "--json"],
            ["logs", tmp_path / "out"],
            ["list"],
        ):
            outcome = run_command(main, "launch", *words)
            assert_harmless(outcome)
            assert outcome.code in (0, 64), (number, path, words, outcome)
        path.write_text(texts[path])
