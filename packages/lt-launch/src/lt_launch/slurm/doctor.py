"""Checks of `lt launch doctor --on slurm`, made with the controller alone; no node is used."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from lt_launch.errors import LaunchError
from lt_launch.job import Pipeline, Stage
from lt_launch.profile import Profile
from lt_launch.slurm.commands import run_slurm_command
from lt_launch.slurm.options import SlurmOptions
from lt_launch.target import Finding

HYPERPOD_MARKER = Path("/opt/sagemaker_cluster")
"""Folder that the machines of a SageMaker HyperPod cluster have."""
LOCAL_FILE_SYSTEMS = ("ext2/ext3", "xfs", "btrfs", "tmpfs", "overlayfs", "zfs")
"""Node-local file systems, by the names of stat."""


def findings(profile: Profile, pipeline: Pipeline, scripts: Mapping[str, str]) -> Iterator[Finding]:
    """Check the controller and nodes, and that each stage, by its script, can be scheduled with enough time to save."""
    try:
        answer = run_slurm_command("scontrol", "ping").strip()
    except LaunchError as exc:
        answer = str(exc)
    if "is UP" not in answer:
        yield Finding(level="error", check="controller", detail=answer, remedy="ask its admin")
        return
    yield Finding(level="ok", check="controller", detail=answer)
    nodes = run_slurm_command("sinfo", "-h", "-o", "%D %R %T").splitlines()
    yield Finding(level="ok", check="nodes", detail=", ".join(nodes))
    config, options = run_slurm_command("scontrol", "show", "config"), profile.options("slurm", SlurmOptions)
    folder = Path(pipeline.out).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    kind = _output("stat", "-f", "-c", "%T", str(existing))[0]
    problem, remedy = "", "use a folder that the nodes share (--out)"
    if kind in LOCAL_FILE_SYSTEMS:
        problem = f"{existing} is {kind}, a node-local file system"
    yield _finding("shared folder", problem, remedy, ok=f"{existing} is {kind}")
    for stage in pipeline.stages:
        text, failed = _output("sbatch", "--test-only", text=scripts[f"{stage.name}.sbatch"])
        remedy = "change resources, or slurm.partition and the like in the profile"
        level = "error" if failed else "ok"
        yield Finding(level=level, check=f"stage {stage.name}", detail=text, remedy=remedy if failed else "")
        if stage.job.is_training:
            partitions = run_slurm_command("scontrol", "-o", "show", "partition")
            yield _check_time_to_save(stage, config, partitions, stage.job.resources.partition or options.partition)
        if HYPERPOD_MARKER.is_dir() and options.auto_resume != "off":
            yield check_auto_resume(run_slurm_command("srun", "--help"), config, stage)


def _output(*words: str, text: str = "") -> tuple[str, int]:
    """Return the last line that a command writes, without the program's name, and its exit code."""
    result = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    line = (result.stdout + result.stderr).strip().rpartition("\n")[2]
    return line.removeprefix(f"{words[0]}: ").removeprefix("allocation failure: "), result.returncode


def _finding(check: str, problem: str, remedy: str, *, ok: str) -> Finding:
    if problem:
        return Finding(level="warning", check=check, detail=problem, remedy=remedy)
    return Finding(level="ok", check=check, detail=ok)


def _check_time_to_save(stage: Stage, config: str, partitions: str, names: str) -> Finding:
    """Check the time between SIGTERM and SIGKILL of a preempted job: the partition's GraceTime, then KillWait.

    Args:
        stage: the stage.
        config: what `scontrol show config` prints.
        partitions: what `scontrol -o show partition` prints.
        names: the stage's partitions, separated by commas; "" = the cluster's default.
    """
    kill_wait_s, grace_s = int(_setting("KillWait", config) or 0), stage.job.grace_period_s
    grace_times_s = [0]
    for line in partitions.splitlines():
        values = dict(word.split("=", 1) for word in line.split() if "=" in word)
        is_used = values["PartitionName"] in names.split(",") if names else values["Default"] == "YES"
        if is_used:
            grace_times_s.append(int(values["GraceTime"]))
    grace_time_s = min(grace_times_s[1:] or grace_times_s)
    available = f"KillWait is {kill_wait_s} s, GraceTime of the partition {grace_time_s} s"
    problem = ""
    if kill_wait_s + grace_time_s < grace_s:
        total_s = kill_wait_s + grace_time_s
        problem = f"a preempted job has {total_s} s ({available}), fault_tolerance.grace_period_s is {grace_s:g}"
    remedy = "ask for a longer KillWait or GraceTime, or save more often (checkpoint.interval)"
    return _finding("time to save", problem, remedy, ok=available)


def _setting(name: str, config: str) -> str:
    match = re.search(rf"^{name}\s*=\s*(\w\S*)", config, re.MULTILINE)
    return match[1] if match else ""


def check_auto_resume(srun_help: str, config: str, stage: Stage) -> Finding:
    """Check what HyperPod needs to replace a node of a running step.

    Args:
        srun_help: what `srun --help` prints.
        config: what `scontrol show config` prints.
        stage: the stage; with GPUs as generic resources HyperPod requeues its job instead.
    """
    plugin, problem, remedy = _setting("TaskPlugin", config), "", ""
    if "--auto-resume" not in srun_help:
        problem, remedy = "a HyperPod cluster whose srun has no --auto-resume", "install its SPANK plugin"
    elif plugin not in ("", "task/none"):
        problem = f"TaskPlugin is {plugin}, with which HyperPod does not resume steps"
        remedy = "ask its admin for TaskPlugin=task/none, or set slurm.auto_resume to off: the policy requeues then"
    elif not stage.job.resources.exclusive:
        problem = "srun supports --auto-resume, and the job shares its nodes"
        remedy = "set resources.exclusive: other jobs of a replaced node are lost"
    generic = "; HyperPod requeues a job with generic resources (GPUs)" if stage.job.resources.gpus_per_node else ""
    return _finding("auto-resume", problem, remedy, ok=f"srun supports --auto-resume{generic}")
