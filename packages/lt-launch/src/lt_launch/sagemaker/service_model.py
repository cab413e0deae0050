"""Offline check of requests against SageMaker's service model, a data file of botocore.

botocore checks required and unknown members, types and minima. Maxima, patterns and choices it leaves to the service:
the walk below checks them. Errors name field, value and limit, and the field of the run file that the member is of.
What the model cannot express, CreateTrainingJob answers before an instance starts.

Cost: reading the model is 0.1 CPU-seconds.
"""

import re
import unicodedata
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from lt_launch.errors import LaunchError

SOURCES: Mapping[str, str] = {
    "TrainingJobName": "job.name",
    "RoleArn": "sagemaker.role",
    "AlgorithmSpecification": "sagemaker.image or sagemaker.algorithm",
    "HyperParameters": "the recipe",
    "InputDataConfig": "sagemaker.channels",
    "OutputDataConfig.S3OutputPath": "sagemaker.output_path",
    "ResourceConfig.InstanceType": "job.resources.instance_type",
    "ResourceConfig.InstanceCount": "job.nodes",
    "ResourceConfig.VolumeSizeInGB": "job.resources.volume_gib",
    "ResourceConfig.KeepAlivePeriodInSeconds": "sagemaker.keep_alive_period_s",
    "VpcConfig": "sagemaker.subnets and sagemaker.security_groups",
    "StoppingCondition.MaxRuntimeInSeconds": "job.time_limit, or sagemaker.max_run_s",
    "CheckpointConfig.S3Uri": "sagemaker.checkpoint_s3_uri",
    "Environment": "job.env, or the fields of the recipe that travel as variables",
    "AlgorithmName": "--name",
    "AlgorithmDescription": "--description",
    "TrainingSpecification.TrainingImage": "--image",
    "TrainingSpecification.TrainingImageDigest": "--digest",
}
"""What the members of a request are made of, by path; a path stands for everything below it."""
MAX_SHOWN_CHARS = 80
"""Maximum number of characters of a value in an error."""
UNICODE_CLASSES = {
    "L": ("a", "a-zA-Z"),
    "N": ("0", "0-9"),
    "Z": (" ", " "),
    "P": ("!", r"""!"#%&'()*,\-./:;?@\[\\\]_{}"""),
    "S": ("$", r"$+<=>\^`|~"),
    "M": ("\ue000", "\ue000"),
    "Alnum": ("a", "a-zA-Z0-9"),
}
r"""Classes \p{..} of the patterns, which Python's `re` does not have: the character that stands for one outside ASCII,
and the ASCII members."""
NAMED = re.compile(r"parameter ([^\s,]+),")
"""Field in a line of botocore's report."""
ANYTHING = re.compile(r"(?s:.*)")
UNITS = {"string": " characters", "list": " entries", "map": " entries"}


@cache
def service_model() -> Any:
    """Return SageMaker's service model (`botocore.model.ServiceModel`).

    Raises:
        LaunchError: botocore is not installed.
    """
    try:
        from botocore.loaders import Loader
        from botocore.model import ServiceModel
    except ModuleNotFoundError as exc:
        raise LaunchError("checking a SageMaker request needs boto3: pip install 'lt-launch[sagemaker]'") from exc
    return ServiceModel(Loader(include_default_search_paths=True).load_service_model("sagemaker", "service-2"))


def check_request(operation: str, request: Mapping[str, Any]) -> None:
    """Reject a request that the service's model rejects.

    Args:
        operation: name of the operation in the service model.
        request: the request.

    Raises:
        LaunchError: names each field that violates a constraint, with the limit and the field to change.
    """
    shape = service_model().operation_model(operation).input_shape
    from botocore.validate import ParamValidator

    lines = ParamValidator().validate(request, shape).generate_report().splitlines()
    problems = [(match[1] if (match := NAMED.search(line)) else "", line) for line in lines]
    if not problems:
        problems = [(field, f"{field}: {problem}") for field, problem in find_violations(shape, request)]
    if problems:
        lines = [_shorten(text) + (f"; change {_source_of(field)}" if field else "") for field, text in problems]
        raise LaunchError("\n  ".join(["SageMaker would reject this request:", *lines]))


def _source_of(field: str) -> str:
    """Return the field of a run file, or the option, that a member of a request is made of."""
    path = re.sub(r"\[\d+\]| key .*", "", field)
    while path and path not in SOURCES:
        path = path.rpartition(".")[0]
    return SOURCES.get(path, f"sagemaker.request.{field}")


def find_violations(shape: Any, value: Any, field: str = "") -> Iterator[tuple[str, str]]:
    """Yield field and problem of each limit that `value`, whose types are right, violates as a shape of botocore's."""
    yield from ((field, problem) for problem in _broken_limits(shape, value))
    prefix = f"{field}." if field else ""
    if shape.type_name == "structure":
        for name, item in value.items():
            yield from find_violations(shape.members[name], item, f"{prefix}{name}")
    elif shape.type_name == "list":
        for at, item in enumerate(value):
            yield from find_violations(shape.member, item, f"{field}[{at}]")
    elif shape.type_name == "map":
        for key, item in value.items():
            yield from find_violations(shape.key, key, f"{field} key {key!r}")
            yield from find_violations(shape.value, item, f"{prefix}{key}")


def _broken_limits(shape: Any, value: Any) -> Iterator[str]:
    limits, unit = shape.metadata, UNITS.get(shape.type_name, "")
    size, found = (len(value), f"it has {len(value)}") if unit else (value, f"got {value!r}")
    if "max" in limits and size > limits["max"]:
        yield f"must be at most {limits['max']}{unit}, {found}"
    if "enum" in limits and value not in limits["enum"]:
        from difflib import get_close_matches

        near = get_close_matches(value, limits["enum"], n=4, cutoff=0.3)
        choices = ", ".join(limits["enum"] if len(limits["enum"]) <= 8 else [*near, "..."])
        yield f"{value!r} is not one of {choices}"
    if "pattern" in limits and not compile_pattern(limits["pattern"]).fullmatch(_as_ascii(value)):
        yield f"{_shorten(repr(value), MAX_SHOWN_CHARS)} does not fit the pattern {limits['pattern']}"


def _shorten(text: str, most: int = 600) -> str:
    return text if len(text) <= most else text[:most] + "..."


@cache
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern of the service model, which uses Java syntax; what Python lacks is left to the service."""
    try:
        return re.compile(re.sub(r"\\p\{(\w+)\}", lambda found: UNICODE_CLASSES[found[1]][1], pattern))
    except (re.error, KeyError):
        return ANYTHING


def _as_ascii(text: str) -> str:
    """Replace each other character by an ASCII one of its class, or by one that fits no class."""
    unknown = ("\x00", "")
    return "".join(
        char if char.isascii() else UNICODE_CLASSES.get(unicodedata.category(char)[0], unknown)[0] for char in text
    )
