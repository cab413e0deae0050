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
from collections.abc import Mapping
from typing import Any

from lt_launch.job import Job
from lt_launch.sagemaker.contract import GRACE_PERIOD_S, PROCS_PER_NODE_VARIABLE, RUN_CHANNEL, engine_of
from lt_launch.sagemaker.errors import SageMakerError
from lt_launch.sagemaker.options import SageMakerOptions
from lt_trainer.config.section import flatten
from lt_trainer.config.sections import FaultToleranceOptions

OVERRIDE_PREFIX = "LT_SET_"
TOOLKIT_PREFIX = "SM_"
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
    values = flatten(recipe)
    _check_mirror(values, request)
    _check_engine(values, job)
    _check_grace_period(values)
    _check_variables(job)
    _check_input_mode(options, request)
    _check_run_channel(request)
    _check_checkpoints(options, request)


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


def _check_mirror(values: Mapping[str, Any], request: Mapping[str, Any]) -> None:
    mirror = values.get("checkpoint.mirror_url", "")
    if mirror and request["EnableNetworkIsolation"]:
        raise SageMakerError(
            f"checkpoint.mirror_url = {mirror!r} cannot be reached from an isolated container; leave it out and set "
            "sagemaker.checkpoint_s3_uri, or set sagemaker.network_isolation to false"
        )


def _check_engine(values: Mapping[str, Any], job: Job) -> None:
    kind, engine = job.resources.instance_type, values.get("run.engine", "gpu")
    if engine != engine_of(kind) and values.get(f"engine.{engine}.device") != "cpu":
        raise SageMakerError(
            f"run.engine = {engine!r} and job.resources.instance_type = {kind!r}, which the engine {engine_of(kind)} "
            "trains on; change one of them"
        )


def _check_grace_period(values: Mapping[str, Any]) -> None:
    field = "fault_tolerance.grace_period_s"
    given = values.get(field)
    if given is not None and given > GRACE_PERIOD_S and given != FaultToleranceOptions().grace_period_s:
        raise SageMakerError(
            f"{field} = {given:g}: SageMaker kills all processes 120 s after its signal; set it to at most "
            f"{GRACE_PERIOD_S:g}, or leave it out"
        )


def _check_variables(job: Job) -> None:
    """Reject variables that the launcher or the container sets itself."""
    for name, value in job.env.items():
        if name == PROCS_PER_NODE_VARIABLE:
            raise SageMakerError(f"job.env.{name} = {value!r}: set job.procs_per_node instead")
        if name.startswith(OVERRIDE_PREFIX):
            raise SageMakerError(
                f"job.env.{name} = {value!r}: fields of the recipe travel as such variables; set it in the recipe"
            )
        if name.startswith(TOOLKIT_PREFIX):
            raise SageMakerError(
                f"job.env.{name} = {value!r}: the container sets {TOOLKIT_PREFIX}* itself; leave it out"
            )


def _check_input_mode(options: SageMakerOptions, request: Mapping[str, Any]) -> None:
    if options.input_mode != "File" and not any(
        "S3DataSource" in channel["DataSource"] for channel in request["InputDataConfig"]
    ):
        raise SageMakerError(
            f"sagemaker.input_mode = {options.input_mode!r} is for channels in S3, and there are only file systems; "
            "leave it out, or set it to 'File'"
        )


def _check_run_channel(request: Mapping[str, Any]) -> None:
    """Check the folder that all instances write checkpoints to."""
    count = request["ResourceConfig"]["InstanceCount"]
    run = next((one for one in request["InputDataConfig"] if one["ChannelName"] == RUN_CHANNEL), None)
    if run is None:
        if count > 1:
            raise SageMakerError(
                f"{count} instances need one folder that all of them write checkpoints to; {RUN_REMEDY}"
            )
        return
    system = run["DataSource"].get("FileSystemDataSource")
    if system is None:
        address = run["DataSource"]["S3DataSource"]["S3Uri"]
        raise SageMakerError(
            f"channel {RUN_CHANNEL} = {address!r} is each host's own copy, and checkpoints in it would be lost; "
            f"{RUN_REMEDY}"
        )
    if system["FileSystemAccessMode"] != "rw":
        raise SageMakerError(
            f"channel {RUN_CHANNEL} has the access mode {system['FileSystemAccessMode']!r}, and checkpoints are "
            "written to it; end its address with ?rw in sagemaker.channels"
        )


def _check_checkpoints(options: SageMakerOptions, request: Mapping[str, Any]) -> None:
    if options.checkpoint_s3_uri:
        return
    default = SageMakerOptions().checkpoint_local_path
    if options.checkpoint_local_path != default:
        raise SageMakerError(
            f"sagemaker.checkpoint_local_path = {options.checkpoint_local_path!r} has no effect without an address; "
            "set sagemaker.checkpoint_s3_uri to s3://BUCKET/FOLDER, or leave it out"
        )
    if options.use_spot_instances and all(one["ChannelName"] != RUN_CHANNEL for one in request["InputDataConfig"]):
        raise SageMakerError(
            "sagemaker.use_spot_instances = True: an interrupted job would start at step 0; set "
            "sagemaker.checkpoint_s3_uri to s3://BUCKET/FOLDER, or add a writable channel run"
        )
