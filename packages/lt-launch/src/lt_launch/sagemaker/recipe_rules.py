"""Contradictions of recipe, job and request that the service accepts and the container cannot run.

    instance type    the recipe's engine trains on it
    channel run      several instances share one writable folder; it is the run directory of a single one, too
    spot             an interrupted job starts from its checkpoints, so it needs a place for them
    grace period     the service kills everything 120 s after its signal
    isolation        a mirror cannot be reached
    variables        some are the container's own

Pure; the first contradiction is raised.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lt_launch.job import Job
from lt_launch.sagemaker.contract import GRACE_PERIOD_S, PROCS_PER_NODE_VARIABLE, RUN_CHANNEL, engine_of
from lt_launch.sagemaker.errors import SageMakerError
from lt_launch.sagemaker.options import SageMakerOptions
from lt_trainer.config.section import flatten
from lt_trainer.config.sections import FaultToleranceOptions

OVERRIDE_PREFIX = "LT_SET_"
CONTAINER_PREFIXES = (OVERRIDE_PREFIX, "SM_")
DEFAULT_VOLUME_GB = 1
"""Smallest volume; channels in File mode need more, file systems and FastFile do not."""
WITHOUT_DISKS = re.compile(r"ml\.(?:[cmr]\d+[in]?|t3|p2|p3)\.")
"""Families of instances that have a volume only; the newer ones with accelerators have NVMe disks."""
RUN_REMEDY = 'add a writable file system, "run=fsx://FILE_SYSTEM_ID/FOLDER?rw", to sagemaker.channels'


def check_compatible(
    recipe: Mapping[str, Any], job: Job, options: SageMakerOptions, request: Mapping[str, Any]
) -> None:
    """Reject a request that the container could not run.

    Args:
        recipe: the resolved recipe.
        job: the job.
        options: options of the profile.
        request: the request made of them.

    Raises:
        SageMakerError: names field, value and remedy.
    """
    for problem in _problems(flatten(recipe), job, options, request):
        raise SageMakerError(problem)


def request_notes(request: Mapping[str, Any]) -> tuple[str, ...]:
    """Return warnings on a valid request: channels that are copied to a volume of the default size."""
    resources = request["ResourceConfig"]
    copied = [
        channel["ChannelName"]
        for channel in request["InputDataConfig"]
        if channel["InputMode"] == "File" and "S3DataSource" in channel["DataSource"]
    ]
    kind = resources["InstanceType"]
    if copied and WITHOUT_DISKS.match(kind) and resources["VolumeSizeInGB"] == DEFAULT_VOLUME_GB:
        return (
            f"{kind} has no local disks, and its volume of {DEFAULT_VOLUME_GB} GB must hold the channels "
            f"{', '.join(copied)}: set job.resources.volume_gib, or sagemaker.input_mode to FastFile",
        )
    return ()


def _problems(
    values: Mapping[str, Any], job: Job, options: SageMakerOptions, request: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a sentence with field, value and remedy for each contradiction."""
    if (mirror := values.get("checkpoint.mirror_url")) and request["EnableNetworkIsolation"]:
        yield (
            f"checkpoint.mirror_url = {mirror!r} cannot be reached from an isolated container; leave it out and set "
            "sagemaker.checkpoint_s3_uri, or set sagemaker.network_isolation to false"
        )
    kind, engine = job.resources.instance_type, values.get("run.engine", "gpu")
    if engine != engine_of(kind) and values.get(f"engine.{engine}.device") != "cpu":
        yield (
            f"run.engine = {engine!r} and job.resources.instance_type = {kind!r}, which the engine {engine_of(kind)} "
            "trains on; change one of them"
        )
    grace_s = values.get("fault_tolerance.grace_period_s", 0)
    if grace_s > GRACE_PERIOD_S and grace_s != FaultToleranceOptions().grace_period_s:
        yield (
            f"fault_tolerance.grace_period_s = {grace_s:g}: SageMaker kills all processes 120 s after its signal; set "
            f"it to at most {GRACE_PERIOD_S:g}, or leave it out"
        )
    for name, value in job.env.items():
        if name == PROCS_PER_NODE_VARIABLE or name.startswith(CONTAINER_PREFIXES):
            yield f"job.env.{name} = {value!r} is set by the container, from job.procs_per_node and the recipe"
    inputs = {channel["ChannelName"]: channel["DataSource"] for channel in request["InputDataConfig"]}
    if options.input_mode != "File" and not any("S3DataSource" in source for source in inputs.values()):
        yield f"sagemaker.input_mode = {options.input_mode!r} is for channels in S3; set it to 'File'"
    yield from _run_channel_problems(inputs.get(RUN_CHANNEL), request["ResourceConfig"]["InstanceCount"])
    if not options.checkpoint_s3_uri and options.use_spot_instances and RUN_CHANNEL not in inputs:
        yield (
            "sagemaker.use_spot_instances = True: an interrupted job would start at step 0; set "
            "sagemaker.checkpoint_s3_uri to s3://BUCKET/FOLDER, or add a writable channel run"
        )
    path = options.checkpoint_local_path
    if not options.checkpoint_s3_uri and path != SageMakerOptions().checkpoint_local_path:
        yield f"sagemaker.checkpoint_local_path = {path!r} has no effect; set sagemaker.checkpoint_s3_uri, too"


def _run_channel_problems(source: Mapping[str, Any] | None, instances: int) -> Iterator[str]:
    """Check the folder that all instances write checkpoints to."""
    if source is None:
        if instances > 1:
            yield f"{instances} instances need one folder that all of them write checkpoints to; {RUN_REMEDY}"
    elif "S3DataSource" in source:
        address = source["S3DataSource"]["S3Uri"]
        yield f"channel {RUN_CHANNEL} = {address!r} is each host's own copy: checkpoints would be lost; {RUN_REMEDY}"
    elif (mode := source["FileSystemDataSource"]["FileSystemAccessMode"]) != "rw":
        yield f"channel {RUN_CHANNEL} has the access mode {mode!r}; end its address with ?rw to write checkpoints"
