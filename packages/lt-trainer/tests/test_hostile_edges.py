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
from lt_trainer.config.fields import flatten
from lt_trainer.config.recipe import load, to_dict, to_toml
from lt_trainer.config.toml import dump
from lt_trainer.errors import RunDirError, TrainerError
from lt_trainer.files import write_atomic
from lt_trainer.quickstart import training as quickstart
from lt_trainer.quickstart.settings import QuickstartFolder, QuickstartSettings
from lt_trainer.training.runner import run as train
from lt_trainer.tuning.journal import ProbeJournal
from lt_trainer.tuning.settings import TunedSetting

MANY = int(os.environ.get("LT_FUZZ", "3000"))
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


def make_run(folder: Path, store: Path) -> Path:
    """A run directory that was stopped after three steps: every kind of file that commands read."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "monitor").mkdir()
    tables = {
        "model": {"preset": "tiny-2m", "vocab_size": 320},
        "data": {"store": str(store), "seq_len": 32, "validation_sets": {"one": {"store": str(store)}}},
        "batch": {"global_batch_size": 8, "micro_batch_size": 1},
        "schedule": {"max_steps": 40, "warmup_steps": 3},
        "run": {"dir": "first"},
    }
    resolved = load(base=tables)
    table = {"recipe": to_dict(resolved.recipe), "origins": dict(resolved.origins), "unchecked": []}
    records = [
        {
            "step": step,
            "loss": 7.0 / step,
            "learning_rate": 1e-3,
            "grad_norm": 1.0,
            "tokens_per_sec": 32768.0,
            "mfu": 0.4,
            "hfu": 0.5,
            "memory_gib": 61.5,
            "valid_tokens": 4000,
            "elapsed_s": step * 2.0,
            "data_s": 0.05,
            "forward_backward_s": 1.7,
            "joules_per_token": 0.1,
            "energy_kwh": 0.2,
        }
        for step in (1, 2, 3)
    ]
    records.append(
        {
            "step": 3,
            "val_loss": 2.0,
            "val_tokens": 9,
            "elapsed_s": 6.5,
            "val_perplexity": 7.4,
            "val_bits_per_byte": 1.0,
            "val_set": "one",
        }
    )
    records.append(
        {"step": 3, "eval_task": "copy", "eval_items": 5, "elapsed_s": 6.6, "eval_acc": 0.5, "eval_acc_stderr": 0.1}
    )
    time = "2026-01-02T10:00:30.000+00:00"
    start = {"world": 8, "device": "NVIDIA H200", "peak_flops": 9.89e14, "peak_source": "datasheet", "pid": 7}
    data = {
        "step": 0,
        "row": 0,
        "global_batch_size": 64,
        "dp_size": 8,
        "seed": 1,
        "fingerprint": "ab",
        "skipped": [[3, 5]],
    }
    events = [
        {"time": time, "event": "start", **start},
        {"time": time, "event": "data", **data},
        {"time": time, "event": "checkpoint", "step": 2, "path": "checkpoints/step-00000002"},
        {"time": time, "event": "step_skipped", "step": 3, "loss": "nan", "grad_norm": "inf"},
        {"time": time, "event": "rollback", "step": 2, "from_step": 3, "rows": [1, 2]},
        {"time": time, "event": "note", "text": "a note"},
        {"time": time, "event": "stop", "step": 3, "signal": "SIGTERM"},
    ]
    sample = {
        "time": time,
        "node": 0,
        "host": "n1",
        "cpu_percent": 5.0,
        "memory_available_gib": 9.5,
        "disk_write_mib_s": 1.0,
        "disk_free_gib": 100.0,
        "ranks": {"0": {"rss_gib": 1.0, "cpu_percent": 3.0}},
        "gpus": [{"gpu": 0, "utilization_percent": 97.0, "power_w": 600.0, "temperature_c": 60}],
        "energy_j": 5.0,
    }
    files = {
        ".lt-run": json.dumps({"format": "lt-run", "version": 1}),
        "recipe.json": json.dumps(table),
        "recipe.toml": to_toml(resolved.recipe, resolved.origins),
        "environment.json": json.dumps(
            {"python": "3.11.7", "hostname": "n1", "cpu": "x", "platform": "y", "packages": {"torch": "2.15.0"}}
        ),
        "metrics.jsonl": "".join(json.dumps(record) + "\n" for record in records),
        "events.jsonl": "".join(json.dumps(event) + "\n" for event in events),
        "monitor/node00000.jsonl": json.dumps(sample) + "\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def add_line_end(path: Path) -> None:
    """Make a line of a file: an unfinished last one is not read."""
    with open(path, "ab") as file:
        file.write(b"\n")


RUN_FILES = (
    "recipe.json",
    "recipe.toml",
    "environment.json",
    "metrics.jsonl",
    "events.jsonl",
    "monitor/node00000.jsonl",
)


READERS = {
    "watch": ("recipe.json", "metrics.jsonl", "events.jsonl", "monitor/node00000.jsonl"),
    "report": ("recipe.json", "recipe.toml", "environment.json", "metrics.jsonl", "events.jsonl"),
}
"""Files of a run that a command reads."""


@pytest.mark.parametrize("name", RUN_FILES)
def test_a_run_of_a_stranger_is_shown_or_refused(name: str, tmp_path: Path) -> None:
    whole = make_run(tmp_path / "whole", tmp_path / "nowhere")
    for kind, make in (PLACES | CONTENTS).items():
        run = tmp_path / f"{ANSI.replace('/', '')} {kind}"
        shutil.copytree(whole, run)
        replace(run / name, make)
        if kind in CONTENTS and name.endswith(".jsonl"):
            add_line_end(run / name)
        for command in (command for command, names in READERS.items() if name in names):
            options = {"watch": ["--once"], "report": ["--out", tmp_path / "r.html", "--overwrite"]}[command]
            outcome = run_command(main, command, run, *options)
            assert_harmless(outcome)
            assert outcome.code in (0, 64), (kind, command, outcome)
    assert run_command(main, "report", whole, "--out", tmp_path / "whole.html").code == 0
    assert run_command(main, "watch", whole, "--once").code == 0


@pytest.mark.slow
def test_values_of_a_run_changed_at_random(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    run = make_run(tmp_path / "run", tmp_path / "nowhere")
    whole = {name: (run / name).read_text() for name in RUN_FILES}
    for number in range(MANY):
        name = rng.choice([name for name in RUN_FILES if name != "recipe.toml"])
        lines = whole[name].splitlines()
        index = rng.randrange(len(lines))
        value = json.loads(lines[index])
        for _ in range(rng.choice((1, 1, 2, 3))):
            value = mutate(rng, value)
        try:
            lines[index] = json.dumps(value)
        except (TypeError, ValueError):
            continue
        (run / name).write_text("\n".join(lines) + "\n")
        for command in (["watch", run, "--once"], ["report", run, "--out", tmp_path / "r.html", "--overwrite"]):
            outcome = run_command(main, *command)
            assert_harmless(outcome)
            assert outcome.code in (0, 64), (number, name, lines[index], outcome)
        (run / name).write_text(whole[name])


COMMANDS: dict[str, list[str]] = {
    "run": ["run", "{bad}"],
    "check": ["check", "{bad}"],
    "torchrun": ["torchrun", "{bad}", "--nproc-per-node", "2"],
    "show": ["show", "{bad}"],
    "plan": ["plan", "{bad}", "--devices", "8", "--device", "h100"],
    "bench": ["bench", "{bad}"],
    "tune": ["tune", "{bad}"],
    "hyperparameters": ["show", "{recipe}", "--hyperparameters", "{bad}"],
    "watch": ["watch", "{bad}", "--once"],
    "report": ["report", "{bad}"],
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


def test_a_journal_of_probes(tmp_path: Path) -> None:
    """It is read before the first probe."""
    for kind, make in (PLACES | CONTENTS).items():
        path = tmp_path / f"{kind}.jsonl"
        make(path)
        if kind in CONTENTS:
            add_line_end(path)
        if kind in ("empty", "object", "NaN", "escapes", "lone surrogate", "duplicate keys"):
            continue  # a line of no or of another key
        with pytest.raises(RunDirError):
            ProbeJournal(path, "key")
    whole = {
        "key": "key",
        "outcome": "ok",
        "step_s": 1.0,
        "setting": TunedSetting(micro_batch_size=1, activation_checkpointing="none", compile=False).to_overrides(),
    }
    rng = random.Random(SEED)
    path = tmp_path / "journal"
    for _ in range(100):
        value = mutate(rng, whole)
        path.write_text(json.dumps(value) + "\n")
        with alarm(), suppress(RunDirError):
            ProbeJournal(path, "key").close()


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
