"""The run directory: what it writes, whose folder it refuses, who holds the lock, and what a full disk leaves."""

import errno
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lt_trainer.config.recipe import ResolvedRecipe, from_dict, load
from lt_trainer.errors import RunDirError
from lt_trainer.run_directory import run_dir as module
from lt_trainer.run_directory.environment import RECORDED_VARIABLES, describe_environment
from lt_trainer.run_directory.jsonl import read_jsonl
from lt_trainer.run_directory.run_dir import RunDir


def resolved(*overrides: str) -> ResolvedRecipe:
    return load(base={"data": {"store": "stores/train"}}, overrides=overrides)


def refusal(out: Path) -> str:
    with pytest.raises(RunDirError) as caught:
        RunDir.open(out)
    assert caught.value.exit_code == 64
    return str(caught.value)


def test_a_new_run_directory(tmp_path: Path) -> None:
    out = tmp_path / "a" / "run"
    with RunDir.open(out, resolved=resolved("optimizer.lr=5e-3")) as run_dir:
        run_dir.append_event("start", step=0)
        names = sorted(item.name for item in out.iterdir())
        assert run_dir.changes == {}
    assert names == [
        ".lt-run",
        ".lt-run.lock",
        "checkpoints",
        "environment.json",
        "events.jsonl",
        "logs",
        "recipe.json",
        "recipe.toml",
    ]
    assert json.loads((out / ".lt-run").read_text()) == {"format": "lt-run", "version": 1}
    assert load(out / "recipe.toml").recipe == resolved("optimizer.lr=5e-3").recipe
    record = json.loads((out / "recipe.json").read_text())
    assert from_dict(record["recipe"]) == resolved("optimizer.lr=5e-3").recipe
    assert record["origins"]["optimizer.lr"] == "--set"
    assert record["unchecked"] == list(resolved().unchecked)
    assert json.loads((out / "environment.json").read_text())["packages"]["lt-trainer"]
    (event,) = read_jsonl(out / "events.jsonl")
    assert (event["event"], event["step"]) == ("start", 0)
    assert event["time"].endswith("+00:00")
    assert (run_dir.checkpoints, run_dir.metrics) == (out / "checkpoints", out / "metrics.jsonl")


def test_reopening_goes_on_and_tells_what_changed(tmp_path: Path) -> None:
    with RunDir.open(tmp_path, resolved=resolved()) as run_dir:
        run_dir.append_event("start")
        (run_dir.checkpoints / "mine").write_text("kept")
    with RunDir.open(tmp_path, resolved=resolved("schedule.max_steps=20000")) as run_dir:
        run_dir.append_event("start")
        assert run_dir.changes == {"schedule.max_steps": (10000, 20000)}
    assert len(read_jsonl(tmp_path / "events.jsonl")) == 2
    assert (tmp_path / "checkpoints" / "mine").read_text() == "kept"
    assert load(tmp_path / "recipe.toml").recipe.schedule.max_steps == 20000


def test_an_empty_folder_is_taken_and_a_foreign_one_is_not_touched(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("x")
    assert refusal(foreign) == (
        f"run.dir = '{foreign}': the folder is not empty and not a run directory (no .lt-run); "
        "set run.dir to a new or empty folder"
    )
    assert [item.name for item in foreign.iterdir()] == ["thesis.tex"]
    empty = tmp_path / "empty"
    empty.mkdir()
    RunDir.open(empty).close()
    assert (empty / ".lt-run").exists()


def test_what_a_killed_start_left_does_not_make_a_folder_foreign(tmp_path: Path) -> None:
    (tmp_path / "..lt-run.123.tmp").write_text("")
    (tmp_path / ".lt-run.lock").write_text("")
    RunDir.open(tmp_path).close()


def test_later_versions_damage_and_files_are_refused(tmp_path: Path) -> None:
    marker = tmp_path / ".lt-run"
    marker.write_text('{"format": "lt-run", "version": 2}')
    assert refusal(tmp_path) == (
        f"run.dir = '{tmp_path}': the run directory has version 2, this lt-trainer supports version 1; "
        "use the lt-trainer that wrote it, or set run.dir to a new folder"
    )
    for damaged in ("", "[]", '{"format": "other"}'):
        marker.write_text(damaged)
        assert refusal(tmp_path) == f"run.dir = '{tmp_path}': {marker} is damaged; set run.dir to a new folder"
    file = tmp_path / "file"
    file.write_text("x")
    assert refusal(file) == (f"run.dir = '{file}': cannot use {file}: File exists; set run.dir to a writable folder")


def test_a_damaged_recipe_json_is_named(tmp_path: Path) -> None:
    RunDir.open(tmp_path, resolved=resolved()).close()
    (tmp_path / "recipe.json").write_text("{")
    with pytest.raises(RunDirError, match=r"recipe\.json is damaged \(.*\); set run\.dir to a new folder, or rem"):
        RunDir.open(tmp_path, resolved=resolved())
    RunDir.open(tmp_path).close()  # the refusal let go of the lock


HOLDER = """
import sys
from lt_trainer.run_directory.run_dir import RunDir
run_dir = RunDir.open(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        message = refusal(tmp_path)
        holder.kill()
    assert message == (
        f"run.dir = '{tmp_path}': in use by process {holder.pid} on {os.uname().nodename}; "
        "wait for it or stop it, or set run.dir to another folder"
    )
    RunDir.open(tmp_path).close()  # the system released the lock of the killed process


def test_the_lock_is_also_held_within_a_process_until_close(tmp_path: Path) -> None:
    run_dir = RunDir.open(tmp_path)
    assert f"in use by process {os.getpid()} on " in refusal(tmp_path)
    run_dir.close()
    run_dir.close()
    RunDir.open(tmp_path).close()


@pytest.mark.parametrize("fails_at", range(8))
def test_a_full_disk_leaves_the_earlier_description(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    RunDir.open(tmp_path, resolved=resolved()).close()
    before = {name: (tmp_path / name).read_text() for name in ("recipe.toml", "recipe.json", "environment.json")}
    calls = 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls > fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "fsync", fsync)
    if fails_at < 6:  # three files, a sync of the file and one of the folder each
        with pytest.raises(RunDirError, match=r"No space left on device; free space on its disk$"):
            RunDir.open(tmp_path, resolved=resolved("run.seed=1"))
    else:
        RunDir.open(tmp_path, resolved=resolved("run.seed=1")).close()
        assert calls == 6
    monkeypatch.undo()
    assert not [item for item in tmp_path.iterdir() if item.name.endswith(".tmp")]
    if fails_at == 0:
        assert {name: (tmp_path / name).read_text() for name in before} == before
    load(tmp_path / "recipe.toml")
    json.loads((tmp_path / "recipe.json").read_text())
    RunDir.open(tmp_path).close()


def test_files_are_synced_before_they_get_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        order.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        real_fsync(descriptor)

    def replace(source: str, target: str) -> None:
        order.append("rename")
        real_replace(source, target)

    monkeypatch.setattr(module.os, "fsync", fsync)
    monkeypatch.setattr(module.os, "replace", replace)
    RunDir.open(tmp_path).close()
    assert order[1::3] == ["rename", "rename"]
    if os.path.isdir("/proc/self/fd"):
        assert order == ["file", "rename", "folder"] * 2


def test_the_environment_holds_no_variable_beyond_the_list() -> None:
    found = describe_environment({"AWS_SECRET_ACCESS_KEY": "s3cr3t", "HF_TOKEN": "t0ken", "WORLD_SIZE": "8"})
    assert found["variables"] == {"WORLD_SIZE": "8"}
    assert "s3cr3t" not in json.dumps(found)
    assert not any(word in name for name in RECORDED_VARIABLES.split() for word in ("KEY", "TOKEN", "SECRET", "PASS"))
    assert found["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert found["packages"]["lt-trainer"]
    assert found["cpus"] == os.cpu_count()
    assert found["memory_gib"] > 0
    assert found["cpu"]
    assert re.fullmatch("[0-9a-f]{40}", found["commit"]), "tests run in a checkout"


def test_describing_the_environment_imports_nothing_heavy() -> None:
    program = textwrap.dedent("""
        import sys
        from lt_trainer.run_directory.environment import describe_environment
        describe_environment()
        print([m for m in ("torch", "numpy", "transformers") if m in sys.modules])
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
