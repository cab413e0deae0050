"""What doctor says of a real cluster and of jobs that could never run on it."""

from pathlib import Path
from typing import Any

import pytest

from lt_launch.job import ContainerImage, Job, Pipeline, Resources, Stage
from lt_launch.profile import Profile
from lt_launch.slurm import doctor
from lt_launch.slurm.doctor import check_auto_resume, findings
from lt_launch.slurm.target import SlurmTarget
from lt_launch.target import Finding
from lt_trainer.config.section import Given


def look(made: Job | None, folder: Path, **slurm: Any) -> dict[str, Finding]:
    profile = Profile(values={f"slurm.{name}": Given(value, "test") for name, value in slurm.items()})
    pipeline = Pipeline.from_job(made, out=str(folder / "run")) if made else None
    return {finding.check: finding for finding in findings(SlurmTarget(), profile, pipeline)}


def job(**changes: Any) -> Job:
    values = {"name": "train", "argv": ("true",), "completion": "run_dir", "run_dir": "run", "grace_period_s": 10.0}
    return Job(**{**values, **changes})


def test_a_job_that_fits(cluster: Any, tmp_path: Path) -> None:
    found = look(job(nodes=3), tmp_path)
    assert "is UP" in found["controller"].detail
    assert "3 low idle" in found["nodes"].detail
    assert found["stage train"].level == "ok", found["stage train"]
    assert found["time to save"].level == "ok"
    assert found["time to save"].detail == "KillWait is 20 s"
    assert cluster.run("squeue", "-h") == "", "nothing was submitted"


@pytest.mark.parametrize(
    ("changes", "slurm", "words"),
    [
        ({"nodes": 9}, {}, "not available"),
        ({}, {"partition": "nowhere"}, "Invalid partition"),
        ({"resources": Resources(cpus_per_proc=64)}, {}, "not available"),
    ],
)
def test_a_job_that_could_never_run(
    cluster: Any, tmp_path: Path, changes: dict[str, Any], slurm: dict[str, Any], words: str
) -> None:
    finding = look(job(**changes), tmp_path, **slurm)["stage train"]
    assert finding.level == "error"
    assert words.lower() in finding.detail.lower()


def test_what_is_worth_a_warning(cluster: Any, tmp_path: Path) -> None:
    found = look(job(grace_period_s=60.0, container=ContainerImage(image="x.sqsh")), tmp_path)
    assert found["time to save"].level == "warning"
    assert "20 s, fault_tolerance.grace_period_s is 60" in found["time to save"].detail


def test_auto_resume_of_a_hyperpod_cluster(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a SPANK plugin makes srun take the option, and the cluster has no task plugin."""
    monkeypatch.setattr(doctor, "HYPERPOD_MARKER", tmp_path)
    found = look(job(resources=Resources(exclusive=True)), tmp_path)
    assert (found["auto-resume"].level, found["auto-resume"].detail) == ("ok", "srun supports --auto-resume")
    assert "auto-resume" not in look(job(), tmp_path, auto_resume="off")


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
        ("--auto-resume=N", "TaskPlugin = task/none\n", {"exclusive": True}, "ok", "supports --auto-resume"),
    ],
)
def test_rules_of_auto_resume(srun_help: str, config: str, resources: dict[str, Any], level: str, words: str) -> None:
    finding = check_auto_resume(srun_help, config, Stage(job=job(resources=Resources(**resources))))
    assert finding.level == level
    assert words in finding.detail
    assert bool(finding.remedy) == (level == "warning")


def test_without_a_controller_that_is_all_there_is_to_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = look(job(), tmp_path)
    assert list(found) == ["controller"]
    assert found["controller"].level == "error"
    assert "scontrol is not installed here" in found["controller"].detail


def test_a_machine_that_knows_no_cluster_says_where_to_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho 'scontrol: fatal: Could not establish a configuration source' >&2\nexit 1\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert "run this on a login node of the cluster" in look(job(), tmp_path)["controller"].detail
