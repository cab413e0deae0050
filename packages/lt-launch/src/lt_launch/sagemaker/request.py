"""A CreateTrainingJob request from a job and a profile: pure, the same for the same input, checked before it is used.

The recipe travels in two ways. Fields that are hyperparameters of the published algorithm go as such, so that the
console shows them; NUM_NODES is always there and is the number of instances. Every other field that differs from its
default goes as an environment variable LT_SET_nn = "section.field=value". Paths do not travel: the container has its
own.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any

from lt_launch.job import Job
from lt_launch.sagemaker.constraints import check
from lt_launch.sagemaker.errors import SageMakerError
from lt_launch.sagemaker.options import SageMakerOptions, pairs
from lt_trainer.engine import engine_names, engine_spec
from lt_trainer.fields import Leaf, flatten, leaves
from lt_trainer.hyperparameters import table
from lt_trainer.metrics import METRIC_DEFINITIONS
from lt_trainer.recipe import Recipe
from lt_trainer.toml import format_value

__all__ = ["SET", "VALIDATION_SET", "channel_of", "hyperparameters", "request", "sets"]

SET = "LT_SET_"
HOME_ONLY = ("run.out", "model.preset", "parallel.n_nodes")
"""Fields that mean nothing in the container, or that it is told in another way."""
CHANNELS = {"data.store": "train", "data.validation": "validation", "model.init_from": "init"}
VALIDATION_SET = "validation-"
SET_STORE = re.compile(r"data\.validation_sets\.([A-Za-z0-9._-]+)\.store")
WAIT_FACTOR = 2
FILE_SYSTEMS = {"fsx": "FSxLustre", "efs": "EFS"}
VOLUME_GB = 1
"""What the seed of this interface uses; channels in File mode need more, file systems and FastFile do not."""


def request(job: Job, options: SageMakerOptions) -> dict[str, Any]:
    """The request of one training job.

    Args:
        job: its recipe, nodes (instances), resources.instance_type and volume_gib, time limit and environment count.
        options: the profile's table.

    Raises:
        SageMakerError: something is missing, or the service would refuse it; names field, value and limit.
    """
    if not job.recipe:
        raise SageMakerError(f"job {job.name}: only a job that trains a recipe runs here; choose it with --stage")
    recipe = tomllib.loads(job.recipe)
    _require(options)
    spot = {"EnableManagedSpotTraining": True} if options.spot else {}
    made: dict[str, Any] = {
        "TrainingJobName": job.name,
        "RoleArn": options.role,
        "AlgorithmSpecification": _algorithm(options),
        "HyperParameters": hyperparameters(recipe, job.nodes),
        "InputDataConfig": _channels(recipe, options),
        "OutputDataConfig": _without_empty(
            S3OutputPath=options.output,
            KmsKeyId=options.kms_key,
            CompressionType="GZIP" if options.compress_output else "NONE",
        ),
        "ResourceConfig": _without_empty(
            InstanceType=job.resources.instance_type,
            InstanceCount=job.nodes,
            VolumeSizeInGB=job.resources.volume_gib or VOLUME_GB,
            VolumeKmsKeyId=options.volume_kms_key,
            KeepAlivePeriodInSeconds=options.keep_alive_s,
        ),
        "StoppingCondition": _stopping(job, options),
        "EnableNetworkIsolation": options.isolated,
        "EnableInterContainerTrafficEncryption": options.encrypt_traffic,
        **spot,
    }
    if options.checkpoints:
        made["CheckpointConfig"] = {"S3Uri": options.checkpoints, "LocalPath": options.checkpoints_in}
    if options.subnets or options.security_groups:
        made["VpcConfig"] = {"Subnets": list(options.subnets), "SecurityGroupIds": list(options.security_groups)}
    if environment := _environment(recipe, job):
        made["Environment"] = environment
    if options.tags:
        made["Tags"] = [{"Key": key, "Value": value} for key, value in pairs(options.tags, "sagemaker.tags").items()]
    if options.retries:
        made["RetryStrategy"] = {"MaximumRetryAttempts": options.retries}
    check("CreateTrainingJobRequest", made)
    _refuse_what_cannot_work(recipe, made)
    return made


def hyperparameters(recipe: Mapping[str, Any], instances: int) -> dict[str, str]:
    """The upper-case hyperparameters that differ from their defaults, as strings, and NUM_NODES."""
    values = flatten(recipe)
    nodes = values.get("parallel.n_nodes", 1)
    if nodes not in (1, instances):
        raise SageMakerError(
            f"parallel.n_nodes (NUM_NODES) = {nodes} and the job has {instances} instances; leave one of them out"
        )
    found = {
        name: _text(values[leaf.name])
        for name, leaf in table().items()
        if leaf.name in values and values[leaf.name] != leaf.default and name != "NUM_NODES"
    }
    return {**found, "NUM_NODES": str(instances)}


def sets(recipe: Mapping[str, Any]) -> list[str]:
    """What else differs from its default, as `section.field=value`, ready for `--set`."""
    schema, named = leaves(Recipe) | _of_engines(recipe), {leaf.name for leaf in table().values()}
    return [
        f"{name}={_text(value)}"
        for name, value in flatten(recipe).items()
        if name not in named
        and name not in HOME_ONLY
        and not channel_of(name)
        and not (name in schema and _same(value, schema[name].default))
        and value != {}
    ]


def channel_of(name: str) -> str:
    """The channel through which a path in the recipe reaches the container; empty for fields that are no paths."""
    match = SET_STORE.fullmatch(name)
    return VALIDATION_SET + match[1] if match else CHANNELS.get(name, "")


def _of_engines(recipe: Mapping[str, Any]) -> dict[str, Leaf]:
    """The options of the engines that are installed here; those of others are all sent."""
    installed, found = engine_names(), dict[str, Leaf]()
    for name in recipe.get("engine", {}):
        if name in installed:
            found |= leaves(engine_spec(name).options, f"engine.{name}.")
    return found


def _same(value: Any, default: Any) -> bool:
    return (tuple(value) if isinstance(value, list) else value) == default


def _text(value: Any) -> str:
    """A value as `--set` and hyperparameters read it."""
    return value if isinstance(value, str) else format_value(value)


def _require(options: SageMakerOptions) -> None:
    wanted = {
        "sagemaker.role": (options.role, "the ARN of a role with the rights in containers/iam/sagemaker-job.json"),
        "sagemaker.output": (options.output, "s3://BUCKET/FOLDER for the trained model"),
        "sagemaker.image or sagemaker.algorithm": (
            options.image or options.algorithm,
            "an image in ECR or the ARN of a subscribed algorithm",
        ),
    }
    for name, (value, remedy) in wanted.items():
        if not value:
            raise SageMakerError(f"{name} is not set; set it in the profile's [sagemaker] to {remedy}")


def _algorithm(options: SageMakerOptions) -> dict[str, Any]:
    if options.algorithm:
        return {
            "AlgorithmName": options.algorithm,
            "TrainingInputMode": options.input_mode,
            "EnableSageMakerMetricsTimeSeries": True,
        }
    return {
        "TrainingImage": options.image,
        "TrainingInputMode": options.input_mode,
        "MetricDefinitions": [dict(definition) for definition in METRIC_DEFINITIONS],
        "EnableSageMakerMetricsTimeSeries": True,
    }


def _channels(recipe: Mapping[str, Any], options: SageMakerOptions) -> list[dict[str, Any]]:
    sources = pairs(options.channels, "sagemaker.channels")
    paths = {name: value for name, value in flatten(recipe).items() if value and channel_of(name)}
    for name, address in paths.items():
        if str(address).startswith("s3://"):
            sources.setdefault(channel_of(name), address)
    if "train" not in sources:
        raise SageMakerError(
            'sagemaker.channels has no channel "train"; add "train=s3://BUCKET/STORE" (send the store there with '
            "`lt data upload`), or give data.store an s3:// address"
        )
    for name, address in paths.items():
        if channel_of(name) not in sources:
            raise SageMakerError(
                f'{name} = {address!r} needs a channel; add "{channel_of(name)}=s3://BUCKET/FOLDER" to '
                "sagemaker.channels"
            )
    return [_channel(name, source, options) for name, source in sources.items()]


def _channel(name: str, source: str, options: SageMakerOptions) -> dict[str, Any]:
    scheme, separator, rest = source.partition("://")
    if separator and scheme in FILE_SYSTEMS:
        rest, _, mode = rest.partition("?")
        identifier, _, path = rest.partition("/")
        if mode not in ("", "ro", "rw"):
            raise SageMakerError(f"sagemaker.channels, {name}={source}: behind ? stands ro or rw")
        system = {
            "FileSystemId": identifier,
            "FileSystemAccessMode": mode or "ro",
            "FileSystemType": FILE_SYSTEMS[scheme],
            "DirectoryPath": f"/{path}",
        }
        return {"ChannelName": name, "DataSource": {"FileSystemDataSource": system}, "InputMode": "File"}
    s3 = {"S3DataType": "S3Prefix", "S3Uri": source, "S3DataDistributionType": "FullyReplicated"}
    return {"ChannelName": name, "DataSource": {"S3DataSource": s3}, "InputMode": options.input_mode}


def _stopping(job: Job, options: SageMakerOptions) -> dict[str, int]:
    run = job.time_limit_s or options.max_run_s
    found = {"MaxRuntimeInSeconds": run}
    if options.spot or options.max_wait_s:
        found["MaxWaitTimeInSeconds"] = options.max_wait_s or WAIT_FACTOR * run
    if options.max_pending_s:
        found["MaxPendingTimeInSeconds"] = options.max_pending_s
    return found


def _environment(recipe: Mapping[str, Any], job: Job) -> dict[str, str]:
    numbered = {f"{SET}{at:02}": text for at, text in enumerate(sets(recipe))}
    processes = {"LT_PROCS_PER_NODE": str(job.procs_per_node)} if job.procs_per_node > 1 else {}
    return {**job.env, **numbered, **processes}


def _refuse_what_cannot_work(recipe: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    """What the service would accept and the container could not do."""
    mirror = recipe.get("checkpoint", {}).get("mirror", "")
    if mirror and made["EnableNetworkIsolation"]:
        raise SageMakerError(
            f"checkpoint.mirror = {mirror!r} cannot be reached from an isolated container; leave it out and set "
            "sagemaker.checkpoints, or set sagemaker.isolated to false"
        )
    names = [channel["ChannelName"] for channel in made["InputDataConfig"]]
    if made["ResourceConfig"]["InstanceCount"] > 1 and "run" not in names:
        raise SageMakerError(
            f"{made['ResourceConfig']['InstanceCount']} instances need one folder that all of them write checkpoints "
            'to; add a writable file system, "run=fsx://FILE_SYSTEM_ID/FOLDER?rw", to sagemaker.channels'
        )


def _without_empty(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in ("", 0)}
