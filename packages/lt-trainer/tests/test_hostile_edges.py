"""What a stranger put in the place of a file: every command refuses it at once, in a line that changes no terminal.

Each command that takes a path is given each thing of `lt_test_helpers.hostile` there, and in each file of a run. The
slow test changes values of a run's files at random: LT_FUZZ chooses how many times, LT_SEED which.
"""

import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest

from lt_test_helpers.hostile import (
    ANSI,
    CONTENTS,
    FEW,
    PLACES,
    alarm,
    assert_harmless,
    assert_refused,
    make_fifo,
    mutate,
    replace,
    run_command,
    unusable_paths,
)
from lt_trainer.__main__ import main
from lt_trainer.config.recipe import load
from lt_trainer.config.section import flatten
from lt_trainer.config.toml import dump
from lt_trainer.errors import RunDirError, TrainerError
from lt_trainer.files import write_atomic
from lt_trainer.quickstart import training as quickstart
from lt_trainer.quickstart.settings import QuickstartFolder, QuickstartSettings
from lt_trainer.training.runner import run as train

SEED = int(os.environ.get("LT_SEED", "0"))


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """`main` changes the handlers of the process, which here is that of the tests."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def recipe(recipe_base: dict, tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(dump(flatten(recipe_base | {"run": {"dir": str(tmp_path / "run"), "engine": "fake"}})))
    return path


def add_line_end(path: Path) -> None:
    """Make a line of a file: an unfinished last one is not read."""
    with open(path, "ab") as file:
        file.write(b"\n")


COMMANDS: dict[str, list[str]] = {
    "run": ["run", "{bad}"],
    "check": ["check", "{bad}"],
    "torchrun": ["torchrun", "{bad}", "--nproc-per-node", "2"],
    "show": ["show", "{bad}"],
    "plan": ["plan", "{bad}", "--devices", "8", "--device", "h100"],
    "bench": ["bench", "{bad}"],
    "tune": ["tune", "{bad}"],
    "hyperparameters": ["show", "{recipe}", "--hyperparameters", "{bad}"],
    "evaluate": ["evaluate", "{bad}", "--store", "{store}"],
    "evaluate store": ["evaluate", "{model}", "--store", "{bad}"],
    "task": ["evaluate", "{model}", "--tasks", "bad", "--tasks-dir", "{folder}"],
    "evaluate out": ["evaluate", "{model}", "--store", "{store}", "--out", "{bad}"],
    "sample": ["sample", "{bad}", "--prompt", "x"],
    "store of a recipe": ["show", "{recipe}", "--set", "schedule.max_steps=3ep", "--set", "data.store={bad}"],
    "preset file": ["show", "{recipe}", "--set", "model.init_from={bad}"],
}
HARMLESS = {
    "hyperparameters": {"object", "UTF-16"},
    "evaluate out": {"directory"},
}
"""What is no mistake there."""
OWN_READERS = ("show", "hyperparameters", "task")
"""Commands by which every content is tried; for the others it is the same reader."""


@pytest.mark.usefixtures("fake_engine")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_path_of_a_command(
    command: str, recipe: Path, little_data: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if COMMANDS[command][0] in ("evaluate", "sample"):
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for number, (kind, make) in enumerate((PLACES | CONTENTS if command in OWN_READERS else FEW).items()):
        folder = tmp_path / f"{number} {ANSI.replace('/', '')}"
        folder.mkdir()
        bad = folder / "bad.jsonl"
        make(bad)
        places = {"bad": bad, "folder": folder, "recipe": recipe, "store": little_data / "train", "model": model}
        outcome = run_command(main, *(word.format(**places) for word in COMMANDS[command]))
        if kind in HARMLESS.get(command, ()):
            assert_harmless(outcome)
            continue
        try:
            assert_refused(outcome)
        except AssertionError as exc:
            raise AssertionError(f"{command} with {kind}") from exc
    assert victim.read_text() == "precious"
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("fake_engine")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_that_may_not_be_looked_at(
    command: str, recipe: Path, little_data: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if COMMANDS[command][0] in ("evaluate", "sample"):
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    places = {"folder": tmp_path, "recipe": recipe, "store": little_data / "train", "model": model}
    with unusable_paths(tmp_path) as paths:
        for bad in paths.values():
            assert_refused(run_command(main, *(word.format(bad=bad, **places) for word in COMMANDS[command])))


@pytest.mark.parametrize("kind", PLACES | CONTENTS)
@pytest.mark.parametrize("more", [[], ["--overwrite"]])
def test_a_quickstart_folder_of_a_stranger(kind: str, more: list[str], tmp_path: Path) -> None:
    """Neither continued nor deleted."""
    pytest.importorskip("transformers")
    lt = pytest.importorskip("lt_launch.__main__")
    out = tmp_path / ANSI.replace("/", "")
    out.mkdir()
    (PLACES | CONTENTS)[kind](out / ".lt-quickstart")
    (out / "summary.json").write_text("precious")
    assert_refused(run_command(lt.main, "quickstart", "--out", out, "--source", tmp_path / "nowhere", *more))
    assert (out / "summary.json").read_text() == "precious"


QUICKSTART_RECORDS = {
    "metrics.jsonl": {
        "step": 3,
        "loss": 2.0,
        "elapsed_s": 1.0,
        "tokens_per_sec": 9.0,
        "mfu": 0.4,
        "val_loss": 2.0,
        "val_tokens": 9,
    },
    "resume_check.jsonl": {"step": 3, "loss": 2.0},
    "events.jsonl": {"event": "start", "peak_source": "datasheet"},
}


@pytest.mark.parametrize("name", QUICKSTART_RECORDS)
def test_records_of_a_quickstart_changed_at_random(name: str, tmp_path: Path) -> None:
    folder = QuickstartFolder(tmp_path)
    folder.run.mkdir()
    for path, record in QUICKSTART_RECORDS.items():
        (folder.run / path).write_text(json.dumps(record) + "\n")
    readers = (
        quickstart.losses,
        quickstart.expected_losses,
        quickstart.validation_loss,
        quickstart.last_metrics,
        quickstart.peak_source,
        quickstart.is_done,
    )
    for reader in readers:
        reader(folder)
    rng = random.Random(SEED)
    for value in ({}, *(mutate(rng, QUICKSTART_RECORDS[name]) for _ in range(300))):
        (folder.run / name).write_text(json.dumps(value) + "\n")
        for reader in readers:
            with suppress(TrainerError):
                reader(folder)


def test_a_quickstart_without_the_records_of_its_steps(tmp_path: Path) -> None:
    folder = QuickstartFolder(tmp_path)
    folder.run.mkdir()
    (folder.run / "events.jsonl").write_text('{"event": "completed"}\n')
    (folder.run / "resume_check.jsonl").write_text('{"step": 3, "loss": 2.0}\n')
    for steps in ((), (1, 2), (2, 3)):
        records = ({"step": step, "loss": 2.0, "elapsed_s": 1.0} for step in steps)
        (folder.run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        with pytest.raises(TrainerError, match=r"no record of step [13]; start over with --overwrite"):
            quickstart.train(folder, QuickstartSettings(), lambda *_: None)


LINKED = (
    ".lt-run.lock",
    "events.jsonl",
    "metrics.jsonl",
    "logs/rank00000.log",
    "alive/rank00000.json",
    "resume_check.jsonl",
)
"""Files of a run that are opened under their own name to write into them."""


@pytest.mark.parametrize("name", LINKED)
def test_no_link_is_followed_to_what_a_run_writes(
    name: str, recipe_base: dict, fake_engine: object, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    run = Path(recipe_base["run"]["dir"])
    resolved = load(base=recipe_base, overrides=["run.engine=fake", "fault_tolerance.hang_timeout_s=60"])
    for make in (lambda path: path.symlink_to(victim), make_fifo):
        victim.write_text("precious")
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir(parents=True)
        (run / ".lt-run").write_text('{"format": "lt-run", "version": 1}')
        replace(run / name, make)
        with alarm(), suppress(RunDirError):
            train(resolved, environ={}, stop_after_step=3, verify_resume_steps=1)
        assert victim.read_text() == "precious"


def test_files_that_are_written_under_another_name_first(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("precious")
    link.symlink_to(victim)
    write_atomic(link, "new")
    assert (victim.read_text(), link.read_text(), link.is_symlink()) == ("precious", "new", False)
    names = {write_names(tmp_path / "file") for _ in range(20)}
    assert len(names) == 20, "no name is used twice"


def write_names(path: Path) -> str:
    """The temporary name that a writer uses."""
    seen: list[str] = []
    with mock.patch("os.replace", lambda source, target: seen.append(os.fspath(source))):
        write_atomic(path, "x")
    return seen[0]
