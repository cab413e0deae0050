"""What is kept of a launch, how it is found again, and what it names is signalled and asked for only as what it is."""

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lt_launch.errors import LaunchError
from lt_launch.hosts import LocalTarget
from lt_launch.job import Job, Pipeline
from lt_launch.launch_dir import acquire_lock, create, list_launch_dirs, load_launch, lock_owner, save_job_ids
from lt_launch.launch_dir_status import read_logs
from lt_launch.profile import Profile
from lt_launch.slurm.target import SlurmTarget
from lt_launch.spec import stage_spec
from lt_launch.target import Launch, RenderedLaunch


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    pipeline = Pipeline.from_job(Job(name="x", argv=("true",)))
    specs = {stage.name: stage_spec(stage, pipeline, Profile()) for stage in pipeline.stages}
    return lambda: create(pipeline, Profile(), "local", RenderedLaunch(files={"a/b.sh": "text"}), specs)


def test_a_launch_is_found_by_folder_and_by_name_and_reads_back(made, tmp_path: Path) -> None:
    launch: Launch = made()
    assert launch.directory == tmp_path / "runs" / "x" / "launch"
    assert (launch.directory / "rendered" / "a" / "b.sh").read_text() == "text"
    save_job_ids(launch, {"x": "42"})
    for name in ("runs/x", "runs/x/launch", "x", tmp_path / "runs/x"):
        found = load_launch(name)
        assert (found.pipeline, found.job_ids, found.target) == (launch.pipeline, {"x": "42"}, "local")
    made()
    assert list_launch_dirs() == [launch.directory]
    with pytest.raises(LaunchError, match="y: no launch here"):
        load_launch("y")


def test_a_launch_is_held_by_one_process(made) -> None:
    launch = made()
    assert lock_owner(launch.directory) == ""
    with acquire_lock(launch):
        assert lock_owner(launch.directory) == f"process {os.getpid()} on {socket.gethostname()}"
        for hold in (lambda: acquire_lock(launch).__enter__(), made):
            with pytest.raises(LaunchError, match="is being launched by process"):
                hold()
    assert lock_owner(launch.directory) == ""


@pytest.mark.parametrize("owner", ["process {} on elsewhere", "process {} on {}"])
def test_cancel_signals_no_process_that_a_strangers_lock_names(
    made, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    launch = made()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim,
        (launch.directory / "launch.lock").open("w") as lock,
    ):
        lock.write(owner.format(victim.pid, socket.gethostname()))
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(LaunchError, match="runs it"):
            LocalTarget().cancel(launch)
        victim.communicate(b"\n")
    assert victim.returncode == 0


def test_ids_in_a_file_are_no_options_of_scontrol(made, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr("lt_launch.slurm.target.run_slurm_command", lambda *command, **_: asked.append(command) or "")
    launch = save_job_ids(made(), {"x": "--clusters=other"})
    for look in (SlurmTarget().status, SlurmTarget().cancel):
        with pytest.raises(LaunchError, match=r"'--clusters=other' in launch\.json is no id of a Slurm job"):
            list(look(launch))
    assert asked == []


def test_a_log_that_is_a_link_is_not_followed(made, tmp_path: Path) -> None:
    launch = made()
    (tmp_path / "private").write_text("hush\n")
    attempt = launch.directory / "stages" / "x" / "attempt-000"
    attempt.mkdir()
    (attempt / "rank-00000.log").symlink_to(tmp_path / "private")
    with pytest.raises(LaunchError, match=r"rank-00000\.log cannot be read: Too many levels of symbolic links"):
        list(read_logs(launch, stage="", rank=0, follow=False))


def test_a_folder_of_something_else_is_left_alone(made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs" / "x" / "launch"
    folder.mkdir(parents=True)
    (folder / "thesis.txt").touch()
    with pytest.raises(LaunchError, match="is not a launch directory"):
        made()
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]
    (folder / "thesis.txt").unlink()
    (tmp_path / "home").write_text("a file")
    monkeypatch.setenv("LT_LAUNCH_HOME", str(tmp_path / "home"))
    with pytest.raises(LaunchError, match=r"cannot write .*home/launches: .*set LT_LAUNCH_HOME to a folder"):
        made()
    assert not list(folder.iterdir())


def test_damage_is_named(made) -> None:
    launch = made()
    for content in (b"{", b"[]", b"\xff", b'{"target": "local", "profile": 3, "pipeline": {}}'):
        (launch.directory / "launch.json").write_bytes(content)
        with pytest.raises(LaunchError, match=r"launch\.json is damaged"):
            load_launch("runs/x")
