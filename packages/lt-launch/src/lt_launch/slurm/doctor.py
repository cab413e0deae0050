"""Checks of `lt launch doctor --on slurm`, made with the controller alone; no node is used."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from lt_launch.errors import LaunchError
from lt_launch.job import Pipeline, Stage
from lt_launch.profile import Profile
from lt_launch.slurm.commands import run_slurm_command
from lt_launch.slurm.options import SlurmOptions
from lt_launch.target import Finding, LaunchTarget

HYPERPOD_MARKER = Path("/opt/sagemaker_cluster")
"""Folder that the machines of a SageMaker HyperPod cluster have."""
LOCAL_FILE_SYSTEMS = ("ext2/ext3", "xfs", "btrfs", "tmpfs", "overlayfs", "zfs")
"""Node-local file systems, by the names of stat."""


def findings(target: LaunchTarget, profile: Profile, pipeline: Pipeline | None) -> Iterator[Finding]:
    """Check the controller and nodes, and that each stage can be scheduled with enough time to save."""
    try:
        answer = run_slurm_command("scontrol", "ping").strip()
    except LaunchError as exc:
        yield Finding(level="error", check="controller", detail=str(exc), remedy="ask its admin")
        return
    if "is UP" not in answer:
        yield Finding(level="error", check="controller", detail=answer, remedy="ask its admin")
        return
    yield Finding(level="ok", check="controller", detail=answer)
    counts = Counter(f"{node.partition} {node.state}" for node in target.nodes(profile))
    yield Finding(level="ok", check="nodes", detail=", ".join(f"{n} {name}" for name, n in sorted(counts.items())))
    if pipeline is None:
        return
    config, options = run_slurm_command("scontrol", "show", "config"), profile.options("slurm", SlurmOptions)
    yield _check_shared_folder(Path(pipeline.out).absolute())
    scripts = target.render(pipeline, profile).files
    for stage in pipeline.stages:
        yield _check_schedulable(stage, scripts[f"{stage.name}.sbatch"])
        if stage.job.is_training:
            yield _check_kill_wait(stage, config)
        if HYPERPOD_MARKER.is_dir() and options.auto_resume != "off":
            yield check_auto_resume(run_slurm_command("srun", "--help"), config, stage)


def _check_shared_folder(folder: Path) -> Finding:
    existing = folder
    while not existing.exists():
        existing = existing.parent
    result = subprocess.run(["stat", "-f", "-c", "%T", existing], capture_output=True, text=True, check=False)
    kind = result.stdout.strip()
    if kind in LOCAL_FILE_SYSTEMS:
        text, remedy = f"{existing} is {kind}, a node-local file system", "use a folder that the nodes share (--out)"
        return Finding(level="warning", check="shared folder", detail=text, remedy=remedy)
    return Finding(level="ok", check="shared folder", detail=f"{existing} is {kind}")


def _check_schedulable(stage: Stage, script: str) -> Finding:
    result = subprocess.run(["sbatch", "--test-only"], input=script, capture_output=True, text=True, check=False)
    lines = result.stderr.strip().splitlines()
    text = lines[-1].removeprefix("sbatch: ").removeprefix("allocation failure: ") if lines else "no answer"
    if result.returncode:
        remedy = "change resources, or slurm.partition and the like in the profile"
        return Finding(level="error", check=f"stage {stage.name}", detail=text, remedy=remedy)
    return Finding(level="ok", check=f"stage {stage.name}", detail=text)


def _check_kill_wait(stage: Stage, config: str) -> Finding:
    """Check the time to save at preemption: KillWait, or the partition's GraceTime if set."""
    match = re.search(r"^KillWait\s*=\s*(\d+)", config, re.MULTILINE)
    kill_wait_s = int(match[1]) if match else 0
    if kill_wait_s < stage.job.grace_period_s:
        remedy = "ask for a longer KillWait or GraceTime, or save more often (checkpoint.interval)"
        text = f"a preempted job has {kill_wait_s} s, fault_tolerance.grace_period_s is {stage.job.grace_period_s:g}"
        return Finding(level="warning", check="time to save", detail=text, remedy=remedy)
    return Finding(level="ok", check="time to save", detail=f"KillWait is {kill_wait_s} s")


def check_auto_resume(srun_help: str, config: str, stage: Stage) -> Finding:
    """Check what HyperPod needs to replace a node of a running step.

    Args:
        srun_help: what `srun --help` prints.
        config: what `scontrol show config` prints.
        stage: the stage; with GPUs as generic resources HyperPod requeues its job instead.
    """
    task_plugin = re.search(r"^TaskPlugin\s*=\s*(\S+)", config, re.MULTILINE)
    level: Literal["ok", "warning"] = "warning"
    if "--auto-resume" not in srun_help:
        text, remedy = "a HyperPod cluster whose srun has no --auto-resume", "install its SPANK plugin"
    elif task_plugin and task_plugin[1] != "task/none":
        text = f"TaskPlugin is {task_plugin[1]}, with which HyperPod does not resume steps"
        remedy = "ask its admin for TaskPlugin=task/none, or set slurm.auto_resume to off: the policy requeues then"
    elif not stage.job.resources.exclusive:
        text = "srun supports --auto-resume, and the job shares its nodes"
        remedy = "set resources.exclusive: other jobs of a replaced node are lost"
    else:
        level, text, remedy = "ok", "srun supports --auto-resume", ""
        if stage.job.resources.gpus_per_node:
            text += "; HyperPod requeues a job with generic resources (GPUs)"
    return Finding(level=level, check="auto-resume", detail=text, remedy=remedy)
