"""Every constraint of CreateTrainingJob, broken alone, is refused here with the field and the limit named."""

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_launch.sagemaker.constraints import _compile_pattern, check_request, find_violations, load_model_shapes
from lt_launch.sagemaker.errors import SageMakerError

SHAPE = "CreateTrainingJobRequest"
VALID: dict[str, Any] = {
    "TrainingJobName": "a-job",
    "RoleArn": "arn:aws:iam::123456789012:role/trainer",
    "AlgorithmSpecification": {
        "TrainingImage": "123456789012.dkr.ecr.us-east-1.amazonaws.com/lt:1",
        "TrainingInputMode": "File",
        "MetricDefinitions": [{"Name": "loss", "Regex": "loss=(.*)"}],
        "ContainerEntrypoint": ["train"],
        "ContainerArguments": ["x"],
    },
    "HyperParameters": {"MAX_STEPS": "10"},
    "InputDataConfig": [
        {
            "ChannelName": "train",
            "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://bucket/store"}},
        },
        {
            "ChannelName": "run",
            "DataSource": {
                "FileSystemDataSource": {
                    "FileSystemId": "fs-0123456789abcdef0",
                    "FileSystemAccessMode": "rw",
                    "FileSystemType": "FSxLustre",
                    "DirectoryPath": "/fsx/run",
                }
            },
        },
    ],
    "OutputDataConfig": {"S3OutputPath": "s3://bucket/out", "KmsKeyId": "alias/key", "CompressionType": "NONE"},
    "ResourceConfig": {
        "InstanceType": "ml.p3.16xlarge",
        "InstanceCount": 2,
        "VolumeSizeInGB": 1,
        "VolumeKmsKeyId": "1234abcd-12ab-34cd-56ef-1234567890ab",
        "KeepAlivePeriodInSeconds": 60,
    },
    "VpcConfig": {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]},
    "StoppingCondition": {"MaxRuntimeInSeconds": 3600, "MaxPendingTimeInSeconds": 7200},
    "Tags": [{"Key": "project", "Value": "lt"}],
    "EnableNetworkIsolation": True,
    "CheckpointConfig": {"S3Uri": "s3://bucket/checkpoints", "LocalPath": "/opt/ml/checkpoints"},
    "Environment": {"NAME": "value"},
    "RetryStrategy": {"MaximumRetryAttempts": 3},
}

Break = tuple[str, tuple[Any, ...], Any, str]
"""What is done, where, with what, and the limit that the error must show; GONE takes the member away."""
GONE = object()


def breaks(name: str, value: Any, path: tuple[Any, ...] = ()) -> Iterator[Break]:  # noqa: C901 - one branch a kind
    """One broken constraint at a time, for every constraint that the model has along a valid request."""
    shape = load_model_shapes()[name]
    kind = shape["type"]
    yield f"{path} of another type", path, {"string": 7, "boolean": "yes"}.get(kind, "text"), "expected"
    if kind == "string":
        if shape.get("min", 0) > 0:
            yield f"{path} too short", path, "a" * (shape["min"] - 1), f"at least {shape['min']} "
        if "max" in shape:
            yield f"{path} too long", path, "a" * (shape["max"] + 1), f"at most {shape['max']} "
        if "enum" in shape:
            yield f"{path} no choice", path, "nothing-of-that", "is not one of"
        if "pattern" in shape and shape["pattern"] not in (".*", "[\\S\\s]*"):
            bad = next(text for text in ("\n", "?!", "") if not re.fullmatch(_compile_pattern(shape["pattern"]), text))
            yield f"{path} pattern", path, bad + "\n" * max(shape.get("min", 0) - len(bad), 0), shape["pattern"]
    elif kind in ("integer", "long"):
        for limit, beyond, word in (("min", -1, "at least"), ("max", 1, "at most")):
            if limit in shape:
                yield f"{path} {limit}", path, shape[limit] + beyond, f"{word} {shape[limit]}"
    elif kind == "list":
        if "max" in shape:
            yield f"{path} too many", path, list(value) * (shape["max"] + 1), f"at most {shape['max']} "
        if shape.get("min"):
            yield f"{path} too few", path, [], f"at least {shape['min']} "
        for at, item in enumerate(value):
            yield from breaks(shape["member"]["shape"], item, (*path, at))
    elif kind == "map":
        if "max" in shape:
            yield f"{path} too many", path, {f"K{i}": "v" for i in range(shape["max"] + 1)}, f"at most {shape['max']} "
        longest = load_model_shapes()[shape["key"]["shape"]]["max"]
        yield f"{path} long key", path, {"K" * (longest + 1): "v"}, f"at most {longest} "
        for key, item in value.items():
            yield from breaks(shape["value"]["shape"], item, (*path, key))
    elif kind == "structure":
        yield f"{path} unknown member", (*path, "NoSuchMember"), 1, "not a field"
        for member in shape.get("required", ()):
            yield f"{path}.{member} missing", (*path, member), GONE, "required"
        for member, item in value.items():
            yield from breaks(shape["members"][member]["shape"], item, (*path, member))


def broken(path: tuple[Any, ...], value: Any) -> Any:
    made = copy.deepcopy(VALID)
    if not path:
        return value
    inner: Any = made
    for part in path[:-1]:
        inner = inner[part]
    if value is GONE:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return made


def field_of(path: tuple[Any, ...]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or SHAPE


def test_the_valid_request_is_accepted() -> None:
    check_request(SHAPE, VALID)


def test_each_broken_constraint_is_refused_with_field_and_limit() -> None:
    cases = list(breaks(SHAPE, VALID))
    assert len(cases) > 150
    for what, path, value, limit in cases:
        with pytest.raises(SageMakerError) as caught:
            check_request(SHAPE, broken(path, value))
        message = str(caught.value)
        assert field_of(path) in message, what
        assert limit in message, (what, message)
        assert all(len(line) < 700 for line in message.splitlines()), what


def test_no_constraint_is_found_where_a_limit_is_just_kept() -> None:
    name = {"TrainingJobName": "a" * 63}
    check_request(SHAPE, {**VALID, **name, "HyperParameters": {f"K{i}": "v" * 2500 for i in range(100)}})
    check_request(SHAPE, {**VALID, "Environment": {"K" * 512: "v" * 512}})
    resources = {**VALID["ResourceConfig"], "KeepAlivePeriodInSeconds": 21600}
    check_request(SHAPE, {**VALID, "ResourceConfig": resources})


def test_a_near_instance_type_is_suggested() -> None:
    made = {**VALID, "ResourceConfig": {"InstanceType": "ml.p5.24xlarge", "InstanceCount": 1}}
    with pytest.raises(SageMakerError, match=r"ml\.p5\.48xlarge"):
        check_request(SHAPE, made)


@settings(max_examples=60, deadline=None)
@given(st.text(min_size=1, max_size=40))
def test_unicode_classes_are_what_unicode_says(text: str) -> None:
    """Algorithm descriptions take letters, marks, separators, symbols, numbers and punctuation, and no controls."""
    import unicodedata

    allowed = all(unicodedata.category(char)[0] in "LMZSNP" for char in text)
    assert any(find_violations("EntityDescription", text)) == (not allowed)


def test_tags_take_letters_of_any_alphabet_and_few_signs() -> None:
    assert not any(find_violations("TagKey", "Größe=Δ 1.0:/+-@_"))
    assert any(find_violations("TagKey", "a#b"))
    assert any(find_violations("TagKey", "½§"))
