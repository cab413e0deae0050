"""What doctor says of a real cluster and of jobs that could never run on it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lt_launch.job import Job, Pipeline, Resources, Stage
from lt_launch.profile import Profile
from lt_launch.slurm import doctor
from lt_launch.slurm.doctor import check_auto_resume
from lt_launch.slurm.target import SlurmTarget
from lt_launch.target import Finding


def look(made: Job, folder: Path, **slurm: Any) -> dict[str, Finding]:
    profile = Profile().with_values({f"slurm.{name}": value for name, value in slurm.items()}, "test")
    pipeline = Pipeline.from_job(made, out=str(folder / "run"))
    return {finding.check: finding for finding in SlurmTarget().doctor(profile, pipeline)}


def job(**changes: Any) -> Job:
    values = {"name": "train", "argv": ("true",), "completion": "run_dir", "run_dir": "run", "grace_period_s": 10.0}
    return Job(**{**values, **changes})


@pytest.fixture
def on_hyperpod(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """As on HyperPod: a SPANK plugin makes srun take --auto-resume, and the cluster has no task plugin."""
    monkeypatch.setattr(doctor, "HYPERPOD_MARKER", tmp_path)
    yield tmp_path
    assert cluster.run("squeue", "-h") == "", "nothing was submitted"


@pytest.mark.parametrize(
    ("changes", "slurm", "check", "level", "words"),
    [
        ({}, {}, "nodes", "ok", "3 low idle"),
        ({"nodes": 3}, {}, "stage train", "ok", "to start at"),
        ({"nodes": 9}, {}, "stage train", "error", "not available"),
        ({}, {"partition": "nowhere"}, "stage train", "error", "invalid partition"),
        ({"resources": Resources(cpus_per_proc=64)}, {}, "stage train", "error", "not available"),
        ({}, {}, "time to save", "ok", "killwait is 20 s"),
        ({"grace_period_s": 60.0}, {}, "time to save", "warning", "fault_tolerance.grace_period_s is 60"),
        ({"resources": Resources(exclusive=True)}, {}, "auto-resume", "ok", "srun supports --auto-resume"),
    ],
)
def test_what_is_found(
    on_hyperpod: Path, changes: dict[str, Any], slurm: dict[str, Any], check: str, level: str, words: str
) -> None:
    finding = look(job(**changes), on_hyperpod, **slurm)[check]
    assert (finding.level, bool(finding.remedy)) == (level, level != "ok")
    assert words.lower() in finding.detail.lower()


def test_a_partitions_grace_time_is_time_to_save(on_hyperpod: Path, cluster: Any) -> None:
    cluster.run("scontrol", "update", "PartitionName=low", "GraceTime=45")
    try:
        default, other = (look(job(grace_period_s=60.0), on_hyperpod, partition=name) for name in ("", "high"))
    finally:
        cluster.run("scontrol", "update", "PartitionName=low", "GraceTime=0")
    assert default["time to save"].level == "ok"
    assert default["time to save"].detail == "KillWait is 20 s, GraceTime of the partition 45 s"
    assert other["time to save"].detail.startswith("a preempted job has 20 s (")


@pytest.mark.parametrize(
    ("srun_help", "config", "resources", "level", "words"),
    [
        ("", "", {}, "warning", "no --auto-resume"),
        ("--auto-resume=N", "TaskPlugin    = task/cgroup\n", {}, "warning", "TaskPlugin is task/cgroup"),
        ("--auto-resume=N", "TaskPlugin    = task/none\n", {}, "warning", "shares its nodes"),
        (
            "--auto-resume=N",
            "TaskPlugin = task/none\n",
            {"exclusive": True, "gpus_per_node": 8},
            "ok",
            "requeues a job",
        ),
    ],
)
def test_rules_of_auto_resume(srun_help: str, config: str, resources: dict[str, Any], level: str, words: str) -> None:
    finding = check_auto_resume(srun_help, config, Stage(job=job(resources=Resources(**resources))))
    assert (finding.level, bool(finding.remedy)) == (level, level == "warning")
    assert words in finding.detail


def test_without_a_controller_that_is_all_there_is_to_say(
    fake: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake("scontrol", "#!/bin/sh\necho 'scontrol: fatal: Could not establish a configuration source' >&2\nexit 1\n")
    assert "run this on a login node of the cluster" in look(job(), tmp_path)["controller"].detail
    monkeypatch.setenv("PATH", "/nowhere")
    (found,) = look(job(), tmp_path).values()
    assert (found.check, found.level) == ("controller", "error")
    assert "scontrol is not installed here" in found.detail
