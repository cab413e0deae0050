"""A run folder that somebody else made is data: looking at it runs nothing of theirs and signals nobody."""

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
from lt_launch.launch_dir import create, load_launch
from lt_launch.process_start import identify_process, process_start
from lt_launch.profile import Profile
from lt_launch.sagemaker.target import SageMakerTarget
from lt_launch.slurm.target import SlurmTarget
from lt_launch.spec import stage_spec
from lt_launch.target import Launch, LaunchTarget, RenderedLaunch

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


def forget(own_home: Path) -> None:
    """Make every launch a stranger's: none is listed any more."""
    (own_home / "launches").unlink()


def test_transport_of_a_strangers_launch_is_not_used(own_home: Path, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    values = {"ssh.hosts": ["n1"], "ssh.ssh_args": ["-o", f"ProxyCommand=touch {proof}"]}
    made = make(tmp_path / "run", "ssh", values)
    assert load_launch(made.directory).profile.values["ssh.ssh_args"].value == values["ssh.ssh_args"], "one's own"
    forget(own_home)
    assert "ssh.ssh_args" not in load_launch(made.directory).profile.values
    assert not proof.exists()
    (own_home / "profile.toml").write_text('[ssh]\nhosts = ["n1"]\n')
    assert load_launch(made.directory).profile.to_dict() == {"ssh.hosts": ["n1"]}


def test_a_listed_launch_whose_file_another_user_wrote_is_a_strangers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(tmp_path / "run", "ssh", {"ssh.hosts": ["n1"]})
    assert launch_dir.is_own(made.directory)
    monkeypatch.setattr(os, "getuid", lambda: (made.directory / "launch.json").stat().st_uid + 1)
    assert not launch_dir.is_own(made.directory)


@pytest.mark.parametrize("case", ["stranger", "another start"])
def test_cancel_signals_no_process_that_a_file_names(
    case: str, own_home: Path, tmp_path: Path, victim: subprocess.Popen
) -> None:
    made = make(tmp_path / "run", "local", {})
    start = process_start(victim.pid) if case == "stranger" else "1"
    with (made.directory / "launch.lock").open("w") as lock:
        lock.write(f"process {victim.pid} on {socket.gethostname()} since {start}\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        if case == "stranger":
            forget(own_home)
        with pytest.raises(LaunchError, match="not a launch that you made" if case == "stranger" else "no longer runs"):
            list(cancel(made))
    assert victim.poll() is None


def test_a_process_is_known_by_its_start() -> None:
    start = process_start(os.getpid())
    assert identify_process(f"{os.getpid()} {start}") == os.getpid()
    assert identify_process(f"{os.getpid()} {start}0") == 0


@pytest.mark.parametrize("target", [SlurmTarget(), SageMakerTarget()], ids=lambda target: target.name)
def test_jobs_that_a_strangers_launch_names_are_not_cancelled(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: LaunchTarget
) -> None:
    """Its job ids may be those of other jobs of one's own."""
    asked: list[object] = []
    monkeypatch.setattr("lt_launch.slurm.target.run_slurm_command", lambda *command, **_: asked.append(command) or "")
    monkeypatch.setattr(SageMakerTarget, "_client", lambda *values: asked.append(values))
    made = launch_dir.save_job_ids(make(tmp_path / "run", target.name, {}), {"x": "4711"})
    forget(own_home)
    with pytest.raises(LaunchError, match="not a launch that you made"):
        list(target.cancel(made))
    assert asked == []
    assert not (made.directory / "stages" / "x" / "cancelled").exists()


def test_a_launch_that_cannot_be_listed_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").write_text("a file")
    monkeypatch.setenv("LT_LAUNCH_HOME", str(tmp_path / "home"))
    with pytest.raises(LaunchError, match=r"cannot write .*home/launches: .*set LT_LAUNCH_HOME to a folder"):
        make(tmp_path / "run", "local", {})
    assert not (tmp_path / "run").exists()
