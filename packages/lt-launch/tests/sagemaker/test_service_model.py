"""Constraints of CreateTrainingJob, broken one by one, are refused here with the field and the limit named."""

import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_launch.errors import LaunchError
from lt_launch.sagemaker.service_model import ANYTHING, check_request, compile_pattern, find_violations, service_model

VALID: dict[str, Any] = {
    "TrainingJobName": "a" * 63,
    "RoleArn": "arn:aws:iam::123456789012:role/trainer",
    "AlgorithmSpecification": {"TrainingImage": "123456789012.dkr.ecr.us-east-1.amazonaws.com/lt:1"}
    | {"TrainingInputMode": "File", "MetricDefinitions": [{"Name": "loss", "Regex": "loss=(.*)"}]},
    "HyperParameters": {f"K{i}": "v" * 2500 for i in range(100)},
    "InputDataConfig": [
        {"ChannelName": "train", "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://b/store"}}}
    ],
    "OutputDataConfig": {"S3OutputPath": "s3://bucket/out"},
    "ResourceConfig": {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 2, "KeepAlivePeriodInSeconds": 21600},
    "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
    "EnableNetworkIsolation": True,
    "Environment": {"K" * 512: "v" * 512},
}
GONE = object()


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("TrainingJobName", "a" * 64, "TrainingJobName: must be at most 63 characters, it has 64; change job.name"),
        ("TrainingJobName", 7, "Invalid type for parameter TrainingJobName, value: 7"),
        ("TrainingJobName", GONE, 'Missing required parameter in input: "TrainingJobName"'),
        ("RoleArn", "a", "RoleArn, value: 1, valid min length: 20; change sagemaker.role"),
        ("RoleArn", "arn:aws:iam::123456789012:user/me", "does not fit the pattern arn:aws"),
        ("AlgorithmSpecification.TrainingInputMode", "Fast", "'Fast' is not one of Pipe, File, FastFile"),
        ("AlgorithmSpecification.MetricDefinitions", [{"Name": "a"}], 'MetricDefinitions[0]: "Regex"'),
        ("HyperParameters", {f"K{i}": "v" for i in range(101)}, "HyperParameters: must be at most 100 entries"),
        ("HyperParameters", {"K" * 257: "v"}, "must be at most 256 characters, it has 257; change the recipe"),
        ("HyperParameters.K1", "v" * 2501, "HyperParameters.K1: must be at most 2500 characters"),
        ("InputDataConfig", [], "InputDataConfig"),
        ("InputDataConfig", [{**VALID["InputDataConfig"][0], "ChannelName": "a b"}], "[0].ChannelName: 'a b' does not"),
        ("ResourceConfig.InstanceType", "ml.p5.24xlarge", "ml.p5.48xlarge"),
        ("ResourceConfig.InstanceCount", -1, "InstanceCount"),
        ("ResourceConfig.KeepAlivePeriodInSeconds", 21601, "must be at most 21600, got 21601; change sagemaker.keep"),
        ("EnableNetworkIsolation", "yes", "EnableNetworkIsolation"),
        ("Environment.NoSuch", "x" * 513, "Environment.NoSuch: must be at most 512 characters"),
        ("OutputDataConfig.KmsKeyId", "k" * 2049, "2048 characters, it has 2049; change sagemaker.request.OutputData"),
        ("NoSuchMember", 1, 'Unknown parameter in input: "NoSuchMember"'),
    ],
)
def test_each_broken_constraint_is_refused_with_field_and_limit(path: str, value: Any, says: str) -> None:
    check_request("CreateTrainingJob", VALID)
    head, _, member = path.partition(".")
    made = {**VALID, head: {**VALID[head], member: value} if member else value}
    with pytest.raises(LaunchError) as caught:
        check_request("CreateTrainingJob", {name: item for name, item in made.items() if item is not GONE})
    assert says in str(caught.value)
    assert all(len(line) < 700 for line in str(caught.value).splitlines())


def test_hardly_any_pattern_of_the_model_is_left_to_the_service() -> None:
    shapes = [service_model().shape_for(name) for name in service_model().shape_names]
    patterns = {shape.metadata["pattern"] for shape in shapes if "pattern" in shape.metadata}
    left = [one for one in patterns if compile_pattern(one) is ANYTHING]
    assert len(left) <= 0.02 * len(patterns), left


@settings(max_examples=60)
@given(st.text(min_size=1, max_size=40))
def test_unicode_classes_are_what_unicode_says(text: str) -> None:
    """Algorithm descriptions take letters, marks, separators, symbols, numbers and punctuation, and no controls."""
    allowed = all(unicodedata.category(char)[0] in "LMZSNP" for char in text)
    assert any(find_violations(service_model().shape_for("EntityDescription"), text)) == (not allowed)
