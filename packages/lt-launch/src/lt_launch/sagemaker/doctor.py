"""Checks of `lt launch doctor` for SageMaker: request limits and rights in S3."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from lt_launch.errors import LaunchError
from lt_launch.job import Pipeline, with_container_env
from lt_launch.profile import Profile
from lt_launch.sagemaker.options import SageMakerOptions, parse_pairs
from lt_launch.target import Finding
from lt_trainer.errors import RecipeError

PERMISSIONS_REMEDY = (
    "see containers/iam/sagemaker-client.json and sagemaker-job.json; the job's own role needs the same"
)


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

        yield _check_request(
            lambda: create_training_job_request(
                with_container_env(pipeline.single_job, target="SageMaker", env=profile.env), options
            )
        )
    if client is None:
        from lt_launch.sagemaker.client import SageMakerClient

        client = SageMakerClient(options)
    for name, source in parse_pairs(options.channels, "sagemaker.channels").items():
        if source.startswith("s3://"):
            problem = client.check_s3_list(source)
            level = "error" if problem else "ok"
            remedy = _remedy(problem, "upload the store with lt data upload, or get the permission to list it")
            yield Finding(level=level, check=f"channel {name}", detail=problem or f"{source} exists", remedy=remedy)
        else:
            text = f"{source} is inside the VPC and cannot be checked from here"
            yield Finding(level="ok", check=f"channel {name}", detail=text)
    for what, address in (("output", options.output_path), ("checkpoints", options.checkpoint_s3_uri)):
        if address:
            problem = client.check_s3_write(address)
            level, remedy = "error" if problem else "ok", _remedy(problem, PERMISSIONS_REMEDY)
            text = problem or f"objects can be written, read and deleted in {address}"
            yield Finding(level=level, check=what, detail=text, remedy=remedy)
    if not options.checkpoint_s3_uri:
        text = "sagemaker.checkpoint_s3_uri is not set: a stopped job loses its progress"
        yield Finding(level="warning", check="checkpoints", detail=text, remedy="set it to s3://BUCKET/FOLDER")


def _remedy(problem: str, default: str) -> str:
    if not problem:
        return ""
    return "log in, or see aws configure" if "credentials" in problem.lower() else default


def _check_request(make: Any) -> Finding:
    try:
        make()
    except (LaunchError, RecipeError) as exc:
        return Finding(level="error", check="request", detail=str(exc), remedy="change the named field")
    return Finding(level="ok", check="request", detail="within all limits of CreateTrainingJob")
