"""A violated constraint of a request, and the fields of a run file that its members are made of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Violation", "source_of", "truncated_repr"]

MAX_SHOWN_CHARS = 80
"""Maximum number of characters of a value in an error."""

SOURCES: Mapping[str, Mapping[str, str]] = {
    "CreateTrainingJobRequest": {
        "TrainingJobName": "job.name",
        "RoleArn": "sagemaker.role",
        "AlgorithmSpecification": "sagemaker.image or sagemaker.algorithm",
        "AlgorithmSpecification.TrainingImage": "sagemaker.image",
        "AlgorithmSpecification.AlgorithmName": "sagemaker.algorithm",
        "AlgorithmSpecification.TrainingInputMode": "sagemaker.input_mode",
        "HyperParameters": "the recipe",
        "InputDataConfig": "sagemaker.channels",
        "OutputDataConfig.S3OutputPath": "sagemaker.output_path",
        "OutputDataConfig.KmsKeyId": "sagemaker.output_kms_key",
        "ResourceConfig.InstanceType": "job.resources.instance_type",
        "ResourceConfig.InstanceCount": "job.nodes",
        "ResourceConfig.VolumeSizeInGB": "job.resources.volume_gib",
        "ResourceConfig.VolumeKmsKeyId": "sagemaker.volume_kms_key",
        "ResourceConfig.KeepAlivePeriodInSeconds": "sagemaker.keep_alive_period_s",
        "VpcConfig": "sagemaker.subnets and sagemaker.security_groups",
        "VpcConfig.Subnets": "sagemaker.subnets",
        "VpcConfig.SecurityGroupIds": "sagemaker.security_groups",
        "StoppingCondition.MaxRuntimeInSeconds": "job.time_limit, or sagemaker.max_run_s",
        "StoppingCondition.MaxWaitTimeInSeconds": "sagemaker.max_wait_s, or sagemaker.use_spot_instances",
        "StoppingCondition.MaxPendingTimeInSeconds": "sagemaker.max_pending_s",
        "CheckpointConfig.S3Uri": "sagemaker.checkpoint_s3_uri",
        "CheckpointConfig.LocalPath": "sagemaker.checkpoint_local_path",
        "Environment": "job.env, or the fields of the recipe that travel as variables",
        "RetryStrategy": "sagemaker.max_retry_attempts",
        "Tags": "sagemaker.tags",
    },
    "CreateAlgorithmInput": {
        "AlgorithmName": "--name",
        "AlgorithmDescription": "--description",
        "TrainingSpecification.TrainingImage": "--image",
        "TrainingSpecification.TrainingImageDigest": "--digest",
    },
}
"""What the members of a request are made of, by shape and path; a path stands for everything below it."""


@dataclass(frozen=True)
class Violation:
    """One violated constraint: the field, the limit with the given value, and what to do."""

    field: str
    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}" + (f"; {self.remedy}" if self.remedy else "")


def truncated_repr(value: object) -> str:
    """Return the value as it stands in an error, cut if it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


def source_of(shape: str, field: str) -> str:
    """Return the field of a run file, or the option, that a member of a request is made of, or ""."""
    sources, path = SOURCES.get(shape, {}), re.sub(r"\[\d+\]| key .*", "", field)
    while path:
        if path in sources:
            return sources[path]
        path = path.rpartition(".")[0]
    return ""
