"""What `lt launch doctor --on slurm` asks before a job waits for hours: of the controller alone, no node is used."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from lt_launch.backend import Backend, Finding
from lt_launch.errors import LaunchError
from lt_launch.job import Pipeline, Stage
from lt_launch.profile import Profile
from lt_launch.slurm.options import SlurmOptions
from lt_launch.slurm.queue import ask

__all__ = ["findings"]

ONE_MACHINE = ("ext2/ext3", "xfs", "btrfs", "tmpfs", "overlayfs", "zfs")
"""File systems (as stat names them) that only one machine sees."""


def findings(target: Backend, profile: Profile, pipeline: Pipeline | None) -> Iterator[Finding]:
    """Controller, nodes, and for a pipeline whether each stage could ever run, with enough time to save."""
    try:
        answer = ask("scontrol", "ping").strip()
    except LaunchError as exc:
        yield Finding(level="wrong", what="controller", found=str(exc), remedy="ask its admin")
        return
    up = "is UP" in answer
    yield Finding(level="ok" if up else "wrong", what="controller", found=answer, remedy="" if up else "ask its admin")
    if not up:
        return
    counts = Counter(f"{node.partition} {node.state}" for node in target.nodes(profile))
    yield Finding(level="ok", what="nodes", found=", ".join(f"{n} {name}" for name, n in sorted(counts.items())))
    if pipeline is None:
        return
    options = profile.options("slurm", SlurmOptions)
    yield _shared(Path(pipeline.out).absolute())
    scripts = target.render(pipeline, profile).files
    for stage in pipeline.stages:
        yield _could_run(stage, scripts[f"{stage.name}.sbatch"])
        if stage.job.trains:
            yield _time_to_save(stage)
        yield from _offers(stage, options)


def _shared(folder: Path) -> Finding:
    there = folder
    while not there.exists():
        there = there.parent
    done = subprocess.run(["stat", "-f", "-c", "%T", there], capture_output=True, text=True, check=False)
    kind = done.stdout.strip()
    if kind in ONE_MACHINE:
        remedy = "use a folder on the cluster's shared file system (--out), or be sure that this one is exported"
        return Finding(level="warning", what="shared folder", found=f"{there} is {kind}, of one machine", remedy=remedy)
    return Finding(level="ok", what="shared folder", found=f"{there} is {kind}")


def _could_run(stage: Stage, script: str) -> Finding:
    done = subprocess.run(["sbatch", "--test-only"], input=script, capture_output=True, text=True, check=False)
    said = done.stderr.strip().splitlines()
    text = said[-1].removeprefix("sbatch: ").removeprefix("allocation failure: ") if said else "no answer"
    if done.returncode:
        remedy = "change resources, or slurm.partition and the like in the profile"
        return Finding(level="wrong", what=f"stage {stage.name}", found=text, remedy=remedy)
    return Finding(level="ok", what=f"stage {stage.name}", found=text)


def _time_to_save(stage: Stage) -> Finding:
    """A preempted job is killed KillWait after its signal (or after the partition's GraceTime, where it has one)."""
    found = re.search(r"^KillWait\s*=\s*(\d+)", ask("scontrol", "show", "config"), re.MULTILINE)
    wait = int(found[1]) if found else 0
    if wait < stage.job.grace_s:
        remedy = "ask for a longer KillWait or GraceTime, or save more often (checkpoint.interval)"
        text = f"a preempted job has {wait} s, guard.grace_s is {stage.job.grace_s:g}"
        return Finding(level="warning", what="time to save", found=text, remedy=remedy)
    return Finding(level="ok", what="time to save", found=f"KillWait is {wait} s")


def _offers(stage: Stage, options: SlurmOptions) -> Iterator[Finding]:
    help_ = ask("srun", "--help")
    if Path("/opt/sagemaker_cluster").is_dir():
        there = "--auto-resume" in help_
        text = "srun offers --auto-resume" if there else "a HyperPod cluster whose srun has no --auto-resume"
        remedy = "" if there else "ask for its SPANK plugin"
        yield Finding(level="ok" if there else "warning", what="auto-resume", found=text, remedy=remedy)
    if stage.job.container.image and options.container != "enroot":
        there = "--container-image" in help_
        text = "srun offers --container-image" if there else "srun has no --container-image"
        remedy = "" if there else "enroot is used where nodes have it; else ask for pyxis"
        yield Finding(level="ok" if there else "warning", what="containers", found=text, remedy=remedy)
