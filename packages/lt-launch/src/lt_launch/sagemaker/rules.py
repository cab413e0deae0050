"""Rules between the fields of a SageMaker request that its service model cannot express."""

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["find_broken_rules"]


def find_broken_rules(shape: str, request: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield field and problem of each violated rule; wrong types are left to the service model."""
    if shape == "CreateTrainingJobRequest" and isinstance(request, Mapping):
        for rule in (
            _check_algorithm,
            _check_channels,
            _check_file_systems,
            _check_resources,
            _check_stopping_condition,
        ):
            yield from rule(request)


def _as_mapping(request: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = request.get(name)
    return found if isinstance(found, Mapping) else {}


def _as_int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _check_algorithm(request: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    specification = _as_mapping(request, "AlgorithmSpecification")
    if ("AlgorithmName" in specification) == ("TrainingImage" in specification):
        yield "AlgorithmSpecification", "takes exactly one of TrainingImage and AlgorithmName"
    if "AlgorithmName" in specification and specification.get("MetricDefinitions"):
        yield (
            "AlgorithmSpecification.MetricDefinitions",
            "must be left out with AlgorithmName: the algorithm brings its own",
        )
    if "AlgorithmName" in specification and specification.get("ContainerEntrypoint"):
        yield "AlgorithmSpecification.ContainerEntrypoint", "must be left out with AlgorithmName"


def _check_channels(request: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    channels = request.get("InputDataConfig")
    if not isinstance(channels, list):
        return
    names = [channel.get("ChannelName") for channel in channels if isinstance(channel, Mapping)]
    for name in sorted({str(name) for name in names if names.count(name) > 1}):
        yield "InputDataConfig", f"has the channel {name!r} more than once"
    for at, channel in enumerate(channels):
        if isinstance(channel, Mapping) and isinstance(channel.get("DataSource"), Mapping):
            sources = channel["DataSource"]
            if len(sources) != 1:
                yield f"InputDataConfig[{at}].DataSource", f"takes exactly one source, it has {len(sources)}"


def _check_file_systems(request: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    channels = request.get("InputDataConfig")
    for at, channel in enumerate(channels if isinstance(channels, list) else []):
        source = channel.get("DataSource") if isinstance(channel, Mapping) else None
        system = source.get("FileSystemDataSource") if isinstance(source, Mapping) else None
        if not isinstance(system, Mapping):
            continue
        if not _as_mapping(request, "VpcConfig"):
            yield "VpcConfig", f"is required: InputDataConfig[{at}] reads a file system, which is inside a VPC"
        if isinstance(path := system.get("DirectoryPath"), str) and not path.startswith("/"):
            yield (
                f"InputDataConfig[{at}].DataSource.FileSystemDataSource.DirectoryPath",
                f"must start with /, got {path[:40]!r}",
            )


def _check_resources(request: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    resources = _as_mapping(request, "ResourceConfig")
    for name in ("InstanceCount", "VolumeSizeInGB"):
        value = _as_int(resources.get(name))
        if value is not None and value < 1:
            yield f"ResourceConfig.{name}", f"must be at least 1, got {value}"
    if "InstanceGroups" not in resources and "InstanceType" not in resources:
        yield "ResourceConfig.InstanceType", "is required and missing"
    if request.get("EnableManagedSpotTraining") is True and resources.get("KeepAlivePeriodInSeconds"):
        yield "ResourceConfig.KeepAlivePeriodInSeconds", "must be left out with managed spot training"


def _check_stopping_condition(request: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    stopping = _as_mapping(request, "StoppingCondition")
    run, wait = _as_int(stopping.get("MaxRuntimeInSeconds")), _as_int(stopping.get("MaxWaitTimeInSeconds"))
    if request.get("EnableManagedSpotTraining") is True:
        if wait is None:
            yield "StoppingCondition.MaxWaitTimeInSeconds", "is required with managed spot training"
        elif run is not None and wait < run:
            yield "StoppingCondition.MaxWaitTimeInSeconds", f"must be at least MaxRuntimeInSeconds = {run}, got {wait}"
    elif wait is not None:
        yield "StoppingCondition.MaxWaitTimeInSeconds", "is only for managed spot training"
    if request.get("ServerlessJobConfig") is None and not stopping:
        yield "StoppingCondition", "is required and missing"
