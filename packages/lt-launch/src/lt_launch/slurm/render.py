"""One sbatch script for each stage, and the sbatch commands that chain them: pure text.

A script needs bash, Slurm and the python of the profile on the nodes, and the launch's folder, which all nodes share;
lt-launch itself is not needed. What it does stands in its comments (`script.py`).
"""

from __future__ import annotations

import math

from lt_launch.backend import Rendered
from lt_launch.job import Pipeline, Stage
from lt_launch.profile import Profile
from lt_launch.slurm.options import SlurmOptions
from lt_launch.slurm.script import body
from lt_trainer.errors import RecipeError

__all__ = ["header", "render"]

LEAVING_S = 30
"""Beside the job's grace time, for the agents' records and the script's last words."""


def render(pipeline: Pipeline, profile: Profile) -> Rendered:
    """Scripts by name, and the commands that submit them in order.

    Raises:
        RecipeError: a stage asks for what Slurm cannot do.
    """
    options = profile.options("slurm", SlurmOptions)
    files = {f"{stage.name}.sbatch": _script(stage, pipeline, profile, options) for stage in pipeline.stages}
    commands = tuple(_command(stage) for stage in pipeline.stages)
    return Rendered(files=files, commands=commands)


def _script(stage: Stage, pipeline: Pipeline, profile: Profile, options: SlurmOptions) -> str:
    lines = [f"#SBATCH {line}" for line in header(stage, pipeline, options)]
    return "\n".join(["#!/bin/bash", *lines, "", body(stage, pipeline, profile, options)])


def _command(stage: Stage) -> tuple[str, ...]:
    words = ["sbatch", "--parsable"]
    if stage.after:
        words.append("--dependency=" + ",".join(f"afterok:{{jobid:{name}}}" for name in stage.after))
    return (*words, f"{stage.name}.sbatch")


def header(stage: Stage, pipeline: Pipeline, options: SlurmOptions) -> list[str]:
    """The options of sbatch, one a line. Slurm expands no variables in them, only its own % patterns."""
    job, resources = stage.job, stage.job.resources
    if job.time_limit_s and job.time_limit_s <= _warn_s(stage, options):
        raise RecipeError(
            f"leaves no time to train: the warning comes {_warn_s(stage, options)} s before the limit",
            values={"job.time_limit": job.time_limit_s, "job.grace_s": job.grace_s},
            remedy="raise the time limit, or lower guard.grace_s",
        )
    if options.warn_s and options.warn_s < job.grace_s:
        raise RecipeError(
            "the warning leaves less than the grace time, and Slurm would kill the job while it saves",
            values={"slurm.warn_s": options.warn_s, "job.grace_s": job.grace_s},
            remedy="raise slurm.warn_s, or leave it out for the grace time and half a minute",
        )
    tasks = job.procs_per_node if job.spawner == "srun" else 1
    cpus = resources.cpus_per_proc * (1 if job.spawner == "srun" else job.procs_per_node)
    element = "%A_%a" if stage.array else "%j"
    where = f"../stages/{stage.name}"
    lines = [
        f"--job-name={pipeline.name}-{stage.name}" if pipeline.name != stage.name else f"--job-name={stage.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={tasks}",
    ]
    lines += [f"--cpus-per-task={cpus}"] if cpus else []
    lines += _devices(stage, options)
    if resources.memory_gib or resources.exclusive:
        lines.append(f"--mem={resources.memory_gib}G" if resources.memory_gib else "--mem=0")
    lines += ["--exclusive"] if resources.exclusive else []
    if job.time_limit_s:
        lines.append(f"--time={_time(job.time_limit_s)}")
    named = {
        "partition": resources.partition or options.partition,
        "account": options.account,
        "qos": options.qos,
        "reservation": options.reservation,
        "constraint": resources.constraint,
        "exclude": ",".join(options.exclude),
    }
    lines += [f"--{name}={value}" for name, value in named.items() if value]
    if stage.array:
        limit = f"%{stage.array_limit}" if stage.array_limit else ""
        lines.append(f"--array=0-{stage.array - 1}{limit}")
    lines += [
        "--requeue",
        "--open-mode=append",
        f"--output={where}/slurm-{element}.out",
        f"--signal=B:USR1@{_warn_s(stage, options)}",
        "--kill-on-invalid-dep=yes",
        *options.sbatch,
    ]
    return lines


def _devices(stage: Stage, options: SlurmOptions) -> list[str]:
    gpus = stage.job.resources.gpus_per_node
    if not gpus or not options.gpu_option:
        return []
    return [f"--gpus-per-node={gpus}" if options.gpu_option == "gpus-per-node" else f"--gres=gpu:{gpus}"]


def _warn_s(stage: Stage, options: SlurmOptions) -> int:
    return options.warn_s or math.ceil(stage.job.grace_s) + LEAVING_S


def _time(seconds: int) -> str:
    """Slurm's days-hours:minutes:seconds."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock
