"""Pure rendering of one sbatch script per stage and of the sbatch commands that chain them.

A script needs bash, Slurm and the profile's python on the nodes, and the launch directory on a shared file system;
lt-launch itself is not needed (`script.py`).
"""

from __future__ import annotations

import math
import re

from lt_launch.job import Pipeline, Stage
from lt_launch.profile import Profile
from lt_launch.slurm.options import SlurmOptions
from lt_launch.slurm.script import script_body
from lt_launch.target import RenderedLaunch
from lt_trainer.errors import RecipeError

QUOTED = re.compile(r"""["'].*["']\s*""")
"""Values that enroot's common::envfmt changes."""
EXIT_MARGIN_S = 30
"""Seconds beyond the job's grace period for exit codes and the policy."""


def render(pipeline: Pipeline, profile: Profile) -> RenderedLaunch:
    """Render the scripts by name, and the commands that submit them in order.

    Raises:
        RecipeError: a stage requires a feature that Slurm lacks.
    """
    options = profile.options("slurm", SlurmOptions)
    files = {f"{stage.name}.sbatch": _render_script(stage, pipeline, profile, options) for stage in pipeline.stages}
    commands = tuple(_sbatch_command(stage) for stage in pipeline.stages)
    return RenderedLaunch(files=files, commands=commands)


def _render_script(stage: Stage, pipeline: Pipeline, profile: Profile, options: SlurmOptions) -> str:
    if stage.job.container.image and options.container_runtime != "pyxis":
        _check_quotes(profile, stage)
    lines = [f"#SBATCH {line}" for line in sbatch_directives(stage, pipeline, options)]
    return "\n".join(["#!/bin/bash", *lines, "", script_body(stage, pipeline, profile, options)])


def _check_quotes(profile: Profile, stage: Stage) -> None:
    """Check that enroot leaves the values of variables as they are: it takes quotes around them away."""
    sources = {f"env.{name}": value for name, value in profile.env.items() if name not in stage.job.env}
    sources |= {f"job.env.{name}": value for name, value in stage.job.env.items()}
    for source, value in sources.items():
        if QUOTED.fullmatch(value):
            remedy = "leave the quotes out, or use pyxis (slurm.container_runtime)"
            raise RecipeError("enroot removes the quotes around a value", values={source: value}, remedy=remedy)


def _sbatch_command(stage: Stage) -> tuple[str, ...]:
    words = ["sbatch", "--parsable"]
    if stage.after:
        words.append("--dependency=" + ",".join(f"afterok:{{jobid:{name}}}" for name in stage.after))
    return (*words, f"{stage.name}.sbatch")


def sbatch_directives(stage: Stage, pipeline: Pipeline, options: SlurmOptions) -> list[str]:
    """Return the sbatch options by line, in groups; Slurm expands only its own % patterns in them."""
    job, resources = stage.job, stage.job.resources
    if job.time_limit_s and job.time_limit_s <= _signal_lead_time_s(stage, options):
        raise RecipeError(
            f"leaves no time to train: the signal comes {_signal_lead_time_s(stage, options)} s before the limit",
            values={"job.time_limit": job.time_limit_s, "job.grace_period_s": job.grace_period_s},
            remedy="raise the time limit, or lower fault_tolerance.grace_period_s",
        )
    if options.signal_lead_time_s and options.signal_lead_time_s < job.grace_period_s:
        raise RecipeError(
            "is shorter than the grace period: Slurm would kill the job while it saves",
            values={"slurm.signal_lead_time_s": options.signal_lead_time_s, "job.grace_period_s": job.grace_period_s},
            remedy="raise slurm.signal_lead_time_s, or leave it out to use the grace period plus 30 s",
        )
    cpus, gib = resources.cpus_per_proc, resources.memory_gib
    size = [f"--nodes={job.nodes}", f"--ntasks-per-node={job.procs_per_node}"]
    size += [f"--cpus-per-task={cpus}"] if cpus else []
    size += _gpu_directives(stage, options)
    size += [f"--mem={gib}G" if gib else "--mem=0"] if gib or resources.exclusive else []
    size += ["--exclusive"] if resources.exclusive else []
    options_by_name = {
        "partition": resources.partition or options.partition,
        "account": options.account,
        "qos": options.qos,
        "reservation": options.reservation,
        "constraint": resources.constraint,
        "exclude": ",".join(options.exclude),
    }
    place = [f"--{name}={value}" for name, value in options_by_name.items() if value]
    name = f"{pipeline.name}-{stage.name}" if pipeline.name != stage.name else stage.name
    element = "%A_%a" if stage.array else "%j"
    limit = f"%{stage.array_limit}" if stage.array_limit else ""
    lines = [
        f"--job-name={name} --output=../stages/{stage.name}/slurm-{element}.out",
        " ".join(size),
        " ".join(place),
        f"--array=0-{stage.array - 1}{limit}" if stage.array else "",
        f"--time={_format_time(job.time_limit_s)}" if job.time_limit_s else "",
        f"--signal=B:USR1@{_signal_lead_time_s(stage, options)}",
        "--requeue --open-mode=append --kill-on-invalid-dep=yes",
        *options.sbatch_args,
    ]
    return [line for line in lines if line]


def _gpu_directives(stage: Stage, options: SlurmOptions) -> list[str]:
    gpus = stage.job.resources.gpus_per_node
    if not gpus or not options.gpu_option:
        return []
    return [f"--gpus-per-node={gpus}" if options.gpu_option == "gpus-per-node" else f"--gres=gpu:{gpus}"]


def _signal_lead_time_s(stage: Stage, options: SlurmOptions) -> int:
    return options.signal_lead_time_s or math.ceil(stage.job.grace_period_s) + EXIT_MARGIN_S


def _format_time(seconds: int) -> str:
    """Format seconds as Slurm's days-hours:minutes:seconds."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock
