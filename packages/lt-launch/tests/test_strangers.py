"""What a launch names is signalled and asked for only as what it is: a process, the id of a job."""

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lt_launch import launch_dir
from lt_launch.driver import cancel
from lt_launch.errors import LaunchError
from lt_launch.job import Job, Pipeline
from lt_launch.launch_dir import create
from lt_launch.process_start import identify_process, process_start
from lt_launch.profile import Profile
from lt_launch.slurm.target import SlurmTarget
from lt_launch.spec import stage_spec
from lt_launch.target import Launch, RenderedLaunch

PIPELINE = Pipeline.from_job(Job(name="x", argv=("true",)))


def make(out: Path, target: str, values: dict) -> Launch:
    profile = Profile().with_values(values, "test")
    specs = {stage.name: stage_spec(stage, PIPELINE, profile) for stage in PIPELINE.stages}
    return create(PIPELINE, profile, target, RenderedLaunch(files={}), specs, out=out)


@pytest.fixture
def victim() -> Iterator[subprocess.Popen]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_cancel_signals_no_process_that_took_the_number_of_the_launcher(
    tmp_path: Path, victim: subprocess.Popen
) -> None:
    made = make(tmp_path / "run", "local", {})
    with (made.directory / "launch.lock").open("w") as lock:
        lock.write(f"process {victim.pid} on {socket.gethostname()} since 1\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(LaunchError, match="no longer runs"):
            list(cancel(made))
    assert victim.poll() is None


def test_a_process_is_known_by_its_start() -> None:
    start = process_start(os.getpid())
    assert identify_process(f"{os.getpid()} {start}") == os.getpid()
    assert identify_process(f"{os.getpid()} {start}0") == 0


def test_ids_in_a_file_are_no_options_of_scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr("lt_launch.slurm.target.run_slurm_command", lambda *command, **_: asked.append(command) or "")
    made = launch_dir.save_job_ids(make(tmp_path / "run", "slurm", {}), {"x": "--clusters=other"})
    for look in (SlurmTarget().status, SlurmTarget().cancel):
        with pytest.raises(LaunchError, match=r"'--clusters=other' in launch\.json is no id of a Slurm job"):
            list(look(made))
    assert asked == []


def test_a_launch_that_cannot_be_listed_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").write_text("a file")
    monkeypatch.setenv("LT_LAUNCH_HOME", str(tmp_path / "home"))
    with pytest.raises(LaunchError, match=r"cannot write .*home/launches: .*set LT_LAUNCH_HOME to a folder"):
        make(tmp_path / "run", "local", {})
    assert not (tmp_path / "run").exists()
