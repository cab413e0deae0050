"""What `lt launch doctor` looks at before a training job costs money: limits, rights in S3, and what cannot be seen."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from lt_launch.backend import Backend, Finding
from lt_launch.errors import LaunchError
from lt_launch.job import Pipeline, for_containers
from lt_launch.profile import Profile
from lt_launch.sagemaker.options import SageMakerOptions, pairs
from lt_trainer.errors import RecipeError

__all__ = ["findings", "local_findings"]

RIGHTS = "see containers/iam/sagemaker-client.json and sagemaker-job.json; the job's own role needs the same"


def findings(profile: Profile, pipeline: Pipeline | None, aws: Any = None) -> Iterator[Finding]:
    """boto3, the request, and what this person may read and write.

    Args:
        profile: with [sagemaker].
        pipeline: whose request is checked; None checks the profile alone.
        aws: stands in for `lt_launch.sagemaker.aws.Aws`.
    """
    if find_spec("boto3") is None:
        yield Finding(level="wrong", what="boto3", found="missing", remedy="pip install 'lt-launch[sagemaker]'")
        return
    options = profile.options("sagemaker", SageMakerOptions)
    if pipeline is not None:
        from lt_launch.sagemaker.request import request

        yield _request(lambda: request(for_containers(pipeline.only, target="SageMaker", env=profile.env), options))
    if aws is None:
        from lt_launch.sagemaker.aws import Aws

        aws = Aws(options)
    for name, source in pairs(options.channels, "sagemaker.channels").items():
        if source.startswith("s3://"):
            problem = aws.can_list(source)
            level = "wrong" if problem else "ok"
            remedy = _remedy(problem, "send the store there with lt data upload, or get the right to list it")
            yield Finding(level=level, what=f"channel {name}", found=problem or f"{source} is there", remedy=remedy)
        else:
            text = f"{source} is inside the VPC and cannot be looked at from here"
            yield Finding(level="ok", what=f"channel {name}", found=text)
    for what, address in (("output", options.output), ("checkpoints", options.checkpoints)):
        if address:
            problem = aws.can_write(address)
            level, remedy = "wrong" if problem else "ok", _remedy(problem, RIGHTS)
            found = problem or f"{address} takes, gives and removes an object"
            yield Finding(level=level, what=what, found=found, remedy=remedy)
    if not options.checkpoints:
        text = "there is no sagemaker.checkpoints: a job that is stopped has lost what it trained"
        yield Finding(level="warning", what="checkpoints", found=text, remedy="set it to s3://BUCKET/FOLDER")


def _remedy(problem: str, otherwise: str) -> str:
    if not problem:
        return ""
    return "log in, or see aws configure" if "credentials" in problem.lower() else otherwise


def local_findings(target: Backend, profile: Profile, pipeline: Pipeline | None) -> Iterator[Finding]:
    """The request, and whether the containers' stand-ins can be cut off from the network."""
    from lt_launch.sagemaker.emulator import isolation

    if pipeline is not None:
        yield _request(lambda: target.render(pipeline, profile))
    if isolation():
        yield Finding(level="ok", what="network isolation", found="one host gets a network of its own")
    else:
        text = "this system lets us make no network of its own; libraries are told that they are offline"
        yield Finding(level="warning", what="network isolation", found=text, remedy="run as root with iproute2")


def _request(make: Any) -> Finding:
    try:
        make()
    except (LaunchError, RecipeError) as exc:
        return Finding(level="wrong", what="request", found=str(exc), remedy="change what is named")
    return Finding(level="ok", what="request", found="keeps every limit of CreateTrainingJob")
