"""Rules between the fields of a SageMaker request that its service model cannot express.

Each rule is a generator over one part of the request; the tables at the end say which rules a request has to keep. What
an address of AWS must look like is in `aws_names`; what the container could not run is in `recipe_rules`.
"""

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lt_launch.sagemaker import aws_names
from lt_launch.sagemaker.instances import LOCAL_STORAGE_GB
from lt_launch.sagemaker.violation import Violation, truncated_repr

__all__ = ["find_broken_rules"]

MAX_VOLUME_GB = 16384
"""Largest volume that EBS has."""
MAX_RUNTIME_S = 28 * 86400
RESERVED_FOLDERS = ("/opt/ml/input", "/opt/ml/model", "/opt/ml/output", "/opt/ml/code")
"""Folders of the contract: the service writes to them, or uploads what is in them as something else."""
RESERVED_TAG_PREFIX = "aws:"
"""Start of the tags that AWS makes itself."""


def find_broken_rules(shape: str, request: Mapping[str, Any], region: str = "") -> Iterator[Violation]:
    """Yield each violated rule; wrong types are left to the service model.

    Args:
        shape: name of the request in the service model.
        request: the request.
        region: region that it is sent to; "" = the one that its own addresses name.
    """
    if not isinstance(request, Mapping):
        return
    for rule in RULES.get(shape, ()):
        yield from rule(request)
    if shape == "CreateTrainingJobRequest":
        yield from _check_regions(request, region)


def _as_mapping(request: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = request.get(name)
    return found if isinstance(found, Mapping) else {}


def _as_items(values: Mapping[str, Any], name: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the mappings in a list with their positions."""
    found = values.get(name)
    for at, item in enumerate(found if isinstance(found, list | tuple) else ()):
        if isinstance(item, Mapping):
            yield at, item


def _as_int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _check_algorithm(request: Mapping[str, Any]) -> Iterator[Violation]:
    specification = _as_mapping(request, "AlgorithmSpecification")
    if ("AlgorithmName" in specification) == ("TrainingImage" in specification):
        yield Violation("AlgorithmSpecification", "takes exactly one of TrainingImage and AlgorithmName")
    if "AlgorithmName" in specification and specification.get("MetricDefinitions"):
        yield Violation(
            "AlgorithmSpecification.MetricDefinitions",
            "must be left out with AlgorithmName: the algorithm brings its own",
        )
    if "AlgorithmName" in specification and specification.get("ContainerEntrypoint"):
        yield Violation("AlgorithmSpecification.ContainerEntrypoint", "must be left out with AlgorithmName")
    name = _as_text(specification.get("AlgorithmName"))
    if name.startswith("arn:") and ":algorithm/" not in name:
        yield Violation(
            "AlgorithmSpecification.AlgorithmName",
            f"{truncated_repr(name)} is not the ARN of an algorithm",
            "give one that ends with :algorithm/NAME in sagemaker.algorithm",
        )


def _check_image(specification: Mapping[str, Any], prefix: str) -> Iterator[Violation]:
    """Check the image of a specification; one in another registry needs a TrainingImageConfig."""
    image = _as_text(specification.get("TrainingImage"))
    if image and "TrainingImageConfig" not in specification and (problem := aws_names.image_problem(image)):
        source = "--image" if prefix == "TrainingSpecification" else "sagemaker.image"
        yield Violation(f"{prefix}.TrainingImage", problem.problem, f"{problem.remedy} in {source}")


def _check_metrics(specification: Mapping[str, Any], prefix: str) -> Iterator[Violation]:
    """Check that each metric has a name of its own and a regular expression with a group, the value."""
    names: set[str] = set()
    for at, metric in _as_items(specification, "MetricDefinitions"):
        name, regex = _as_text(metric.get("Name")), _as_text(metric.get("Regex"))
        if name in names:
            yield Violation(
                f"{prefix}.MetricDefinitions[{at}].Name", f"{truncated_repr(name)} stands there twice", "rename one"
            )
        names.add(name)
        try:
            groups = re.compile(regex).groups
        except re.error as exc:
            remedy = "mend it, or escape its special characters with a backslash"
            problem = f"{truncated_repr(regex)} is not a regular expression: {exc}"
            yield Violation(f"{prefix}.MetricDefinitions[{at}].Regex", problem, remedy)
            continue
        if regex and not groups:
            remedy = "put the number into parentheses, as in loss=([0-9.]+)"
            yield Violation(f"{prefix}.MetricDefinitions[{at}].Regex", f"{truncated_repr(regex)} has no group", remedy)


def _check_training_specification(request: Mapping[str, Any]) -> Iterator[Violation]:
    specification = _as_mapping(request, "AlgorithmSpecification")
    yield from _check_image(specification, "AlgorithmSpecification")
    yield from _check_metrics(specification, "AlgorithmSpecification")


def _check_published_specification(request: Mapping[str, Any]) -> Iterator[Violation]:
    specification = _as_mapping(request, "TrainingSpecification")
    yield from _check_image(specification, "TrainingSpecification")
    yield from _check_metrics(specification, "TrainingSpecification")


def _check_channels(request: Mapping[str, Any]) -> Iterator[Violation]:
    channels = list(_as_items(request, "InputDataConfig"))
    names = [channel.get("ChannelName") for _, channel in channels]
    for name in sorted({str(name) for name in names if names.count(name) > 1}):
        yield Violation("InputDataConfig", f"has the channel {truncated_repr(name)} more than once")
    for at, channel in channels:
        if isinstance(sources := channel.get("DataSource"), Mapping) and len(sources) != 1:
            yield Violation(f"InputDataConfig[{at}].DataSource", f"takes exactly one source, it has {len(sources)}")


def _check_file_systems(request: Mapping[str, Any]) -> Iterator[Violation]:
    common_mode = _as_mapping(request, "AlgorithmSpecification").get("TrainingInputMode")
    for at, channel in _as_items(request, "InputDataConfig"):
        system = _as_mapping(channel, "DataSource").get("FileSystemDataSource")
        if not isinstance(system, Mapping):
            continue
        if not _as_mapping(request, "VpcConfig"):
            yield Violation(
                "VpcConfig", f"is required: InputDataConfig[{at}] reads a file system, which is inside a VPC"
            )
        field = f"InputDataConfig[{at}].DataSource.FileSystemDataSource.DirectoryPath"
        path = system.get("DirectoryPath")
        if isinstance(path, str) and not path.startswith("/"):
            yield Violation(field, f"must start with /, got {path[:40]!r}")
        elif path == "/" and system.get("FileSystemType") == "FSxLustre":
            remedy = "start it with the mount name that FSx shows, as in fsx://FILE_SYSTEM_ID/MOUNT_NAME/FOLDER"
            yield Violation(field, f"{truncated_repr(path)} has no mount name", remedy)
        mode = channel.get("InputMode", common_mode)
        if mode != "File":
            remedy = "give this channel the mode File, or S3 as its source"
            yield Violation(
                f"InputDataConfig[{at}].InputMode", f"{truncated_repr(mode)} is for S3, and it is a file system", remedy
            )


def _check_addresses(request: Mapping[str, Any]) -> Iterator[Violation]:
    """Check the addresses in S3 and the names of KMS keys."""
    addresses = {
        "OutputDataConfig.S3OutputPath": _as_mapping(request, "OutputDataConfig").get("S3OutputPath"),
        "CheckpointConfig.S3Uri": _as_mapping(request, "CheckpointConfig").get("S3Uri"),
    }
    for at, channel in _as_items(request, "InputDataConfig"):
        source = _as_mapping(_as_mapping(channel, "DataSource"), "S3DataSource")
        addresses[f"InputDataConfig[{at}].DataSource.S3DataSource.S3Uri"] = source.get("S3Uri")
    for field, address in addresses.items():
        text = _as_text(address)
        if re.match("(s3|https)://.", text) and (problem := aws_names.bucket_problem(text)):
            yield Violation(field, *problem)
    keys = {
        "OutputDataConfig.KmsKeyId": _as_mapping(request, "OutputDataConfig").get("KmsKeyId"),
        "ResourceConfig.VolumeKmsKeyId": _as_mapping(request, "ResourceConfig").get("VolumeKmsKeyId"),
    }
    for field, key in keys.items():
        if (text := _as_text(key)) and (problem := aws_names.key_problem(text)):
            yield Violation(field, *problem)


def _check_vpc(request: Mapping[str, Any]) -> Iterator[Violation]:
    config = _as_mapping(request, "VpcConfig")
    for name, kind in (("Subnets", "subnet"), ("SecurityGroupIds", "sg")):
        values = config.get(name)
        for at, value in enumerate(values if isinstance(values, list | tuple) else ()):
            if _as_text(value) and (problem := aws_names.vpc_id_problem(kind, value)):
                yield Violation(f"VpcConfig.{name}[{at}]", *problem)


def _check_resources(request: Mapping[str, Any]) -> Iterator[Violation]:
    resources = _as_mapping(request, "ResourceConfig")
    for name in ("InstanceCount", "VolumeSizeInGB"):
        value = _as_int(resources.get(name))
        if value is not None and value < 1:
            yield Violation(f"ResourceConfig.{name}", f"must be at least 1, got {value}")
    if "InstanceGroups" not in resources and "InstanceType" not in resources:
        yield Violation("ResourceConfig.InstanceType", "is required and missing")
    if request.get("EnableManagedSpotTraining") is True and resources.get("KeepAlivePeriodInSeconds"):
        yield Violation(
            "ResourceConfig.KeepAlivePeriodInSeconds",
            f"must be left out with managed spot training, got {resources['KeepAlivePeriodInSeconds']}",
        )
    yield from _check_disks(resources)


def _check_disks(resources: Mapping[str, Any]) -> Iterator[Violation]:
    """Check the volume against EBS, or against the disks of an instance type that has its own."""
    kind = _as_text(resources.get("InstanceType"))
    size, local_size = _as_int(resources.get("VolumeSizeInGB")), LOCAL_STORAGE_GB.get(kind, 0)
    if size is not None and local_size and size > local_size:
        remedy = f"set job.resources.volume_gib to at most {local_size}, or leave it out"
        problem = f"{size} is more than the {local_size} GB of local disks of {kind}, which has no volume besides"
        yield Violation("ResourceConfig.VolumeSizeInGB", problem, remedy)
    elif size is not None and size > MAX_VOLUME_GB:
        yield Violation("ResourceConfig.VolumeSizeInGB", f"must be at most {MAX_VOLUME_GB}, got {size}")
    if local_size and (key := resources.get("VolumeKmsKeyId")):
        problem = f"{truncated_repr(key)} is for volumes, and {kind} has local disks, which encrypt themselves"
        yield Violation("ResourceConfig.VolumeKmsKeyId", problem, "leave sagemaker.volume_kms_key out")


def _check_stopping_condition(request: Mapping[str, Any]) -> Iterator[Violation]:
    stopping = _as_mapping(request, "StoppingCondition")
    run, wait = _as_int(stopping.get("MaxRuntimeInSeconds")), _as_int(stopping.get("MaxWaitTimeInSeconds"))
    if run is not None and run > MAX_RUNTIME_S:
        yield Violation("StoppingCondition.MaxRuntimeInSeconds", f"must be at most {MAX_RUNTIME_S}, 28 days, got {run}")
    if request.get("EnableManagedSpotTraining") is True:
        if wait is None:
            yield Violation("StoppingCondition.MaxWaitTimeInSeconds", "is required with managed spot training")
        elif run is not None and wait < run:
            yield Violation(
                "StoppingCondition.MaxWaitTimeInSeconds", f"must be at least MaxRuntimeInSeconds = {run}, got {wait}"
            )
    elif wait is not None:
        yield Violation("StoppingCondition.MaxWaitTimeInSeconds", f"is only for managed spot training, got {wait}")
    if request.get("ServerlessJobConfig") is None and not stopping:
        yield Violation("StoppingCondition", "is required and missing")


def _check_checkpoints(request: Mapping[str, Any]) -> Iterator[Violation]:
    given = _as_mapping(request, "CheckpointConfig").get("LocalPath")
    if not isinstance(given, str) or not given:
        return
    path = posixpath.normpath(given)
    if not path.startswith("/"):
        yield Violation("CheckpointConfig.LocalPath", f"{truncated_repr(given)} is not an absolute path")
    for folder in RESERVED_FOLDERS:
        if f"{path}/".startswith(f"{folder}/") or f"{folder}/".startswith(f"{path.rstrip('/')}/"):
            yield Violation(
                "CheckpointConfig.LocalPath",
                f"{truncated_repr(given)} and {folder}, which the service uses itself, are in one another",
                "leave sagemaker.checkpoint_local_path out, or choose a folder beside it",
            )
            return


def _check_tags(request: Mapping[str, Any]) -> Iterator[Violation]:
    keys: set[str] = set()
    for at, tag in _as_items(request, "Tags"):
        for name in ("Key", "Value"):
            text = _as_text(tag.get(name))
            if text.lower().startswith(RESERVED_TAG_PREFIX):
                yield Violation(
                    f"Tags[{at}].{name}",
                    f"{truncated_repr(text)} starts with {RESERVED_TAG_PREFIX}, which AWS keeps for itself",
                )
        key = _as_text(tag.get("Key"))
        if key in keys:
            yield Violation(f"Tags[{at}].Key", f"{truncated_repr(key)} stands there twice")
        keys.add(key)


def _check_regions(request: Mapping[str, Any], region: str) -> Iterator[Violation]:
    """Check that all that names a region names the job's, and that the role is in its partition."""
    specification = _as_mapping(request, "AlgorithmSpecification")
    named = {
        "AlgorithmSpecification.TrainingImage": specification.get("TrainingImage"),
        "AlgorithmSpecification.AlgorithmName": specification.get("AlgorithmName"),
        "OutputDataConfig.KmsKeyId": _as_mapping(request, "OutputDataConfig").get("KmsKeyId"),
        "ResourceConfig.VolumeKmsKeyId": _as_mapping(request, "ResourceConfig").get("VolumeKmsKeyId"),
    }
    for field, name in named.items():
        found = aws_names.region_of(_as_text(name))
        region = region or found
        if found and found != region:
            remedy = f"set sagemaker.region to {found}, or name one in {region}"
            yield Violation(field, f"{truncated_repr(name)} is in {found}, and the job is in {region}", remedy)
    role = _as_text(request.get("RoleArn"))
    partition = aws_names.partition_of(region)
    if region and role.startswith("arn:") and role.split(":")[1] != partition:
        problem = f"{truncated_repr(role)} is not in {partition}, the partition of {region}"
        yield Violation("RoleArn", problem, "change sagemaker.role or sagemaker.region")


RULES: Mapping[str, tuple[Callable[[Mapping[str, Any]], Iterator[Violation]], ...]] = {
    "CreateTrainingJobRequest": (
        _check_algorithm,
        _check_training_specification,
        _check_channels,
        _check_file_systems,
        _check_addresses,
        _check_vpc,
        _check_resources,
        _check_stopping_condition,
        _check_checkpoints,
        _check_tags,
    ),
    "CreateAlgorithmInput": (_check_published_specification,),
}
"""Rules of each request, by the name of its shape."""
