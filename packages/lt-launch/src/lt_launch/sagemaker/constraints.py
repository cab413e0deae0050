"""Offline check of requests against SageMaker's service model, a data file of botocore.

botocore itself checks required members, types and minima; lengths, maxima, patterns and choices are otherwise refused
by the service. The walk below checks all of them and names field, value and limit, and the field of the run file that
the member is made of. What the model cannot express, CreateTrainingJob answers before an instance starts.

Cost: reading the model is 0.1 CPU-seconds.
"""

import re
import unicodedata
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from lt_launch.sagemaker.errors import SageMakerError

SOURCES: Mapping[str, str] = {
    "TrainingJobName": "job.name",
    "RoleArn": "sagemaker.role",
    "AlgorithmSpecification": "sagemaker.image or sagemaker.algorithm",
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
    "VpcConfig.Subnets": "sagemaker.subnets",
    "VpcConfig.SecurityGroupIds": "sagemaker.security_groups",
    "StoppingCondition.MaxRuntimeInSeconds": "job.time_limit, or sagemaker.max_run_s",
    "StoppingCondition.MaxWaitTimeInSeconds": "sagemaker.max_wait_s",
    "StoppingCondition.MaxPendingTimeInSeconds": "sagemaker.max_pending_s",
    "CheckpointConfig.S3Uri": "sagemaker.checkpoint_s3_uri",
    "CheckpointConfig.LocalPath": "sagemaker.checkpoint_local_path",
    "Environment": "job.env, or the fields of the recipe that travel as variables",
    "RetryStrategy": "sagemaker.max_retry_attempts",
    "Tags": "sagemaker.tags",
    "AlgorithmName": "--name",
    "AlgorithmDescription": "--description",
    "TrainingSpecification.TrainingImage": "--image",
    "TrainingSpecification.TrainingImageDigest": "--digest",
}
"""What the members of a request are made of, by path; a path stands for everything below it."""
MAX_SHOWN_CHARS = 80
"""Maximum number of characters of a value in an error."""
UNICODE_CLASSES = {
    "L": "a-zA-Z",
    "N": "0-9",
    "Z": " ",
    "P": r"""!"#%&'()*,\-./:;?@\[\\\]_{}""",
    "S": r"$+<=>\^`|~",
    "M": "\ue000",
    "Alnum": "a-zA-Z0-9",
}
"""ASCII members of the Unicode classes in patterns, which Python's `re` does not support."""
ASCII_REPLACEMENTS = {"L": "a", "N": "0", "Z": " ", "P": "!", "S": "$", "M": "\ue000"}
"""ASCII replacement of a non-ASCII character in a pattern, by the first letter of its Unicode category."""
ANYTHING = re.compile(r"(?s:.*)")
TYPES: Mapping[str, tuple[str, Any]] = {
    "structure": ("an object", Mapping),
    "map": ("an object", Mapping),
    "list": ("a list", (list, tuple)),
    "string": ("text", str),
    "boolean": ("true or false", bool),
    "integer": ("a whole number", int),
    "long": ("a whole number", int),
    "float": ("a number", (int, float)),
    "double": ("a number", (int, float)),
}


@cache
def load_model_shapes() -> Mapping[str, Any]:
    """Return the shapes of SageMaker's service model by name.

    Raises:
        SageMakerError: botocore is not installed.
    """
    try:
        from botocore.loaders import Loader
    except ModuleNotFoundError as exc:
        raise SageMakerError("checking a SageMaker request needs boto3: pip install 'lt-launch[sagemaker]'") from exc
    return Loader(include_default_search_paths=True).load_service_model("sagemaker", "service-2")["shapes"]


def check_request(shape: str, request: Mapping[str, Any]) -> None:
    """Reject a request that the service's model rejects.

    Args:
        shape: name of the request in the service model.
        request: the request.

    Raises:
        SageMakerError: names each field that violates a constraint, with the limit and the field to change.
    """
    violations = list(find_violations(shape, request))
    if violations:
        lines = (f"  {field}: {problem}; change {_source_of(field)}" for field, problem in violations)
        raise SageMakerError("SageMaker would reject this request:\n" + "\n".join(lines))


def _source_of(field: str) -> str:
    """Return the field of a run file, or the option, that a member of a request is made of."""
    path = re.sub(r"\[\d+\]| key .*", "", field)
    while path and path not in SOURCES:
        path = path.rpartition(".")[0]
    return SOURCES.get(path, field)


def find_violations(shape_name: str, value: Any, field: str = "") -> Iterator[tuple[str, str]]:
    """Yield the field and the problem of each constraint that `value` violates as the named shape."""
    shape, prefix = load_model_shapes()[shape_name], f"{field}." if field else ""
    kind = shape["type"]
    expected, fits = TYPES[kind]
    if not isinstance(value, fits) or (type(value) is bool) != (kind == "boolean"):
        yield field or shape_name, f"expected {expected}, got {_shorten(value)}"
        return
    yield from ((field or shape_name, problem) for problem in _broken_limits(shape, value))
    if kind == "structure":
        yield from (
            (f"{prefix}{name}", "is required and missing") for name in shape.get("required", ()) if name not in value
        )
        for name, item in value.items():
            if name in shape["members"]:
                yield from find_violations(shape["members"][name]["shape"], item, f"{prefix}{name}")
            else:
                yield f"{prefix}{name}", "is not a field of SageMaker"
    elif kind == "list":
        for at, item in enumerate(value):
            yield from find_violations(shape["member"]["shape"], item, f"{field}[{at}]")
    elif kind == "map":
        for key, item in value.items():
            yield from find_violations(shape["key"]["shape"], key, f"{field} key {key!r}")
            yield from find_violations(shape["value"]["shape"], item, f"{field}.{key}")


def _broken_limits(shape: Mapping[str, Any], value: Any) -> Iterator[str]:
    units = {"string": " characters", "list": " entries", "map": " entries"}
    unit = units.get(shape["type"], "")
    size, found = (len(value), f"it has {len(value)}") if unit else (value, f"got {_shorten(value)}")
    if "min" in shape and size < shape["min"]:
        yield f"must be at least {shape['min']}{unit}, {found}"
    if "max" in shape and size > shape["max"]:
        yield f"must be at most {shape['max']}{unit}, {found}"
    if "enum" in shape and value not in shape["enum"]:
        from difflib import get_close_matches

        near = get_close_matches(value, shape["enum"], n=4, cutoff=0.3)
        choices = ", ".join(shape["enum"] if len(shape["enum"]) <= 8 else [*near, "..."])
        yield f"{_shorten(value)} is not one of {choices}"
    if "pattern" in shape and not _compile_pattern(shape["pattern"]).fullmatch(_as_ascii(value)):
        yield f"{_shorten(value)} does not fit the pattern {shape['pattern']}"


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


@cache
def _compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern of the service model, which uses Java syntax; what Python lacks is left to the service."""
    try:
        return re.compile(re.sub(r"\\p\{(\w+)\}", lambda found: UNICODE_CLASSES[found[1]], pattern))
    except (re.error, KeyError):
        return ANYTHING


def _as_ascii(text: str) -> str:
    """Replace each other character by an ASCII one of its class, or by one that fits no class."""
    return "".join(
        char if char.isascii() else ASCII_REPLACEMENTS.get(unicodedata.category(char)[0], "\x00") for char in text
    )
