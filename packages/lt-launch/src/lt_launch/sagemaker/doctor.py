"""Checks of `lt launch doctor` for SageMaker: request limits and rights in S3."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from lt_launch.job import Pipeline, with_container_env
from lt_launch.profile import Profile
from lt_launch.sagemaker.options import SageMakerOptions, parse_pairs
from lt_launch.target import Finding

RIGHTS_REMEDY = "upload the store with lt data upload, log in, or see containers/iam/sagemaker-client.json"


def sagemaker_findings(profile: Profile, pipeline: Pipeline | None, client: Any = None) -> Iterator[Finding]:
    """Check boto3, the request, and this user's rights to read and write.

    Args:
        profile: the profile with [sagemaker].
        pipeline: the pipeline whose request is checked; None checks the profile alone.
        client: replacement of `lt_launch.sagemaker.client.SageMakerClient`.
    """
    if find_spec("boto3") is None:
        yield Finding(level="error", check="boto3", detail="missing", remedy="pip install 'lt-launch[sagemaker]'")
        return
    options = profile.options("sagemaker", SageMakerOptions)
    if pipeline is not None:
        from lt_launch.sagemaker.request import create_training_job_request

        job = with_container_env(pipeline.single_job, target="SageMaker", env=profile.env)
        create_training_job_request(job, options)
        yield Finding(level="ok", check="request", detail="within all limits of CreateTrainingJob")
    if client is None:
        from lt_launch.sagemaker.client import SageMakerClient

        client = SageMakerClient(options)
    checks = {
        f"channel {name}": (client.check_s3_list(source), source)
        for name, source in parse_pairs(options.channels, "sagemaker.channels").items()
        if source.startswith("s3://")
    }
    for name, address in (("output", options.output_path), ("checkpoints", options.checkpoint_s3_uri)):
        if address:
            checks[name] = (client.check_s3_write(address), address)
    for name, (problem, address) in checks.items():
        level, remedy = ("error", RIGHTS_REMEDY) if problem else ("ok", "")
        yield Finding(level=level, check=name, detail=problem or address, remedy=remedy)
    if not options.checkpoint_s3_uri:
        text = "sagemaker.checkpoint_s3_uri is not set: a stopped job loses its progress"
        yield Finding(level="warning", check="checkpoints", detail=text, remedy="set it to s3://BUCKET/FOLDER")
