"""The run directory: what it writes, whose folder it refuses, who holds the lock, and what a full disk leaves."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lt_trainer.config.recipe import ResolvedRecipe, from_dict, load
from lt_trainer.errors import RunDirError
from lt_trainer.run_directory.environment import RECORDED_VARIABLES
from lt_trainer.run_directory.jsonl import read_jsonl
from lt_trainer.run_directory.run_dir import RunDir


def resolved(*overrides: str) -> ResolvedRecipe:
    return load(base={"data": {"store": "stores/train"}}, overrides=overrides)


def refusal(out: Path) -> str:
    with pytest.raises(RunDirError) as caught:
        RunDir.open(out)
    assert caught.value.exit_code == 64
    return str(caught.value)


def test_a_new_run_directory_and_what_a_later_start_changes_in_it(tmp_path: Path) -> None:
    out = tmp_path / "a" / "run"
    longer = {"schedule.max_steps": (10000, 20000), "schedule.warmup_steps": (500, 1000)}
    for steps, changes in ((10000, {}), (20000, longer)):
        given = resolved(f"schedule.max_steps={steps}")
        with RunDir.open(out, resolved=given) as run_dir:
            run_dir.append_event("start", step=0)
            assert run_dir.changes == changes
            run_dir.record_recipe()
        names = ".lt-run .lt-run.lock checkpoints environment.json events.jsonl logs recipe.json recipe.toml"
        assert sorted(item.name for item in out.iterdir()) == names.split()
        assert load(out / "recipe.toml").recipe == given.recipe
        record = json.loads((out / "recipe.json").read_text())
        assert from_dict(record["recipe"]) == given.recipe
        assert record["origins"]["schedule.max_steps"] == "--set"
    assert json.loads((out / ".lt-run").read_text()) == {"format": "lt-run", "version": 1}
    events = read_jsonl(out / "events.jsonl")
    assert [(event["event"], event["step"], event["time"][-6:]) for event in events] == [("start", 0, "+00:00")] * 2


def test_a_foreign_folder_is_not_touched_and_what_a_killed_start_left_is_not_foreign(tmp_path: Path) -> None:
    (tmp_path / "..lt-run.123.tmp").write_text("")
    (tmp_path / ".lt-run.lock").write_text("")
    (tmp_path / "thesis.tex").write_text("x")
    assert refusal(tmp_path) == (
        f'run.dir = "{tmp_path}": the folder is not empty and not a run directory (no .lt-run); '
        "set run.dir to a new or empty folder"
    )
    assert len(list(tmp_path.iterdir())) == 3
    (tmp_path / "thesis.tex").unlink()
    RunDir.open(tmp_path).close()
    assert (tmp_path / ".lt-run").exists()


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (".lt-run", '{"format": "lt-run", "version": 2}', "of another version of lt-trainer (this one writes"),
        (".lt-run", "", "damaged or of another version"),
        (".lt-run", '{"format": "other"}', "damaged or of another version"),
        ("recipe.json", "{", "recipe.json is damaged ("),
    ],
)
def test_later_versions_and_damage_are_refused(tmp_path: Path, name: str, content: str, told: str) -> None:
    RunDir.open(tmp_path, resolved=resolved()).close()
    before = (tmp_path / name).read_text()
    (tmp_path / name).write_text(content)
    with pytest.raises(RunDirError, match=re.escape(told)):
        RunDir.open(tmp_path, resolved=resolved())
    (tmp_path / name).write_text(before)
    RunDir.open(tmp_path, resolved=resolved()).close()  # the refusal let go of the lock
    with pytest.raises(RunDirError, match=r"cannot use .*\.lt-run: File exists; set run\.dir to a writable folder"):
        RunDir.open(tmp_path / ".lt-run")


HOLDER = """
import sys
from lt_trainer.run_directory.run_dir import RunDir
run_dir = RunDir.open(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    """Within a process, too; the system releases the lock of a killed process."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        message = refusal(tmp_path)
        holder.kill()
    assert message == (
        f'run.dir = "{tmp_path}": in use by process {holder.pid} on {os.uname().nodename}; '
        "wait for it or stop it, or set run.dir to another folder"
    )
    with RunDir.open(tmp_path):
        assert f"in use by process {os.getpid()} on " in refusal(tmp_path)
    RunDir.open(tmp_path).close()


@pytest.mark.parametrize("fails_at", range(7))
def test_a_full_disk_leaves_whole_descriptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    """Three files, a sync of the file, a rename and a sync of the folder each."""
    RunDir.open(tmp_path, resolved=resolved()).close()
    before = {name: (tmp_path / name).read_text() for name in ("recipe.toml", "recipe.json", "environment.json")}
    order: list[str] = []
    real_replace = os.replace

    def fsync(descriptor: int) -> None:
        if order.count("sync") == fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        order.append("sync")

    def replace(source: str, target: str) -> None:
        order.append("rename")
        real_replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "replace", replace)
        if fails_at < 6:
            full = pytest.raises(RunDirError, match=r"No space left on device; free space on its disk$")
            with full, RunDir.open(tmp_path, resolved=resolved("run.seed=1")) as run_dir:
                run_dir.record_recipe()
        else:
            with RunDir.open(tmp_path, resolved=resolved("run.seed=1")) as run_dir:
                run_dir.record_recipe()
    assert order == (["sync", "rename", "sync"] * 3)[: len(order)], "synced before they get their name"
    assert order.count("sync") == fails_at
    assert not [item for item in tmp_path.iterdir() if item.name.endswith(".tmp")]
    if fails_at == 0:
        assert {name: (tmp_path / name).read_text() for name in before} == before
    load(tmp_path / "recipe.toml")
    json.loads((tmp_path / "recipe.json").read_text())
    RunDir.open(tmp_path).close()


def test_the_environment_holds_no_variable_beyond_the_list_and_imports_nothing_heavy() -> None:
    program = (
        "import json, sys; from lt_trainer.run_directory.environment import describe_environment\n"
        "print(json.dumps(describe_environment({'HF_TOKEN': 'hush', 'WANDB_API_KEY': 'hush', 'WORLD_SIZE': '8'})))\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["variables"] == {"WORLD_SIZE": "8"}
    assert not any(word in name for name in RECORDED_VARIABLES.split() for word in ("KEY", "TOKEN", "SECRET", "PASS"))
    assert found["packages"]["lt-trainer"]
    assert (found["cpus"], found["memory_gib"] > 0, bool(found["cpu"])) == (os.cpu_count(), True, True)
    assert re.fullmatch("[0-9a-f]{40}", found["commit"]), "tests run in a checkout"
