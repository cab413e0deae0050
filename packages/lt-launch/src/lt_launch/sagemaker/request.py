"""CreateTrainingJob request of a job and a profile: pure, deterministic, checked before use.

The recipe travels in two ways. Hyperparameters of the published algorithm are sent as such, so that the console shows
them; NUM_NODES is always sent and equals the number of instances. Every other field that differs from its default is
sent as an environment variable LT_SET_nn = "section.field=value". Paths are not sent: the container has its own.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any

from pydantic.fields import FieldInfo

from lt_launch.job import Job
from lt_launch.sagemaker.constraints import check_request
from lt_launch.sagemaker.errors import SageMakerError
from lt_launch.sagemaker.options import SageMakerOptions, parse_pairs
from lt_launch.sagemaker.recipe_rules import DEFAULT_VOLUME_GB, OVERRIDE_PREFIX, check_compatible
from lt_trainer.config.hyperparameters import hyperparameter_fields
from lt_trainer.config.section import flatten, leaves
from lt_trainer.config.sections import Recipe
from lt_trainer.config.toml import format_value
from lt_trainer.engine import engine_names, engine_spec
from lt_trainer.run_directory.records import METRIC_DEFINITIONS

LAUNCHER_ONLY_FIELDS = ("run.dir", "model.preset", "parallel.n_nodes")
"""Fields that have no meaning in the container or reach it in another way."""
FIELD_CHANNELS = {"data.store": "train", "data.validation": "validation", "model.init_from": "init"}
VALIDATION_CHANNEL_PREFIX = "validation-"
VALIDATION_STORE_FIELD = re.compile(r"data\.validation_sets\.([A-Za-z0-9._-]+)\.store")
WAIT_FACTOR = 2
FILE_SYSTEMS = {"fsx": "FSxLustre", "efs": "EFS"}
"""Type of a file system, by the scheme of its addresses."""


def create_training_job_request(job: Job, options: SageMakerOptions) -> dict[str, Any]:
    """Return the request of one training job.

    Args:
        job: the job; used are its recipe, nodes (instances), resources.instance_type and volume_gib, time limit and
            environment.
        options: options of the profile.

    Raises:
        SageMakerError: a value is missing, or the service would reject it; names field, value and limit.
    """
    if not job.recipe:
        raise SageMakerError(f"job {job.name}: only a training job can run here; choose it with --stage")
    recipe = tomllib.loads(job.recipe)
    _check_required(job, options)
    spot = {"EnableManagedSpotTraining": True} if options.use_spot_instances else {}
    request: dict[str, Any] = {
        "TrainingJobName": job.name,
        "RoleArn": options.role,
        "AlgorithmSpecification": _algorithm(options),
        "HyperParameters": hyperparameters(recipe, job.nodes),
        "InputDataConfig": _channels(recipe, options),
        "OutputDataConfig": _without_empty(
            S3OutputPath=options.output_path,
            KmsKeyId=options.output_kms_key,
            CompressionType="GZIP" if options.compress_output else "NONE",
        ),
        "ResourceConfig": _without_empty(
            InstanceType=job.resources.instance_type,
            InstanceCount=job.nodes,
            VolumeSizeInGB=job.resources.volume_gib or DEFAULT_VOLUME_GB,
            VolumeKmsKeyId=options.volume_kms_key,
            KeepAlivePeriodInSeconds=options.keep_alive_period_s,
        ),
        "StoppingCondition": _stopping(job, options),
        "EnableNetworkIsolation": options.network_isolation,
        "EnableInterContainerTrafficEncryption": options.encrypt_traffic,
        **spot,
    }
    if options.checkpoint_s3_uri:
        request["CheckpointConfig"] = {"S3Uri": options.checkpoint_s3_uri, "LocalPath": options.checkpoint_local_path}
    if options.subnets or options.security_groups:
        request["VpcConfig"] = {"Subnets": list(options.subnets), "SecurityGroupIds": list(options.security_groups)}
    if environment := _environment(recipe, job):
        request["Environment"] = environment
    if options.tags:
        request["Tags"] = [
            {"Key": key, "Value": value} for key, value in parse_pairs(options.tags, "sagemaker.tags").items()
        ]
    if options.max_retry_attempts:
        request["RetryStrategy"] = {"MaximumRetryAttempts": options.max_retry_attempts}
    check_request("CreateTrainingJobRequest", request)
    check_compatible(recipe, job, options, request)
    return request


def hyperparameters(recipe: Mapping[str, Any], instance_count: int) -> dict[str, str]:
    """Return the hyperparameters that differ from their defaults, as strings, and NUM_NODES."""
    values = flatten(recipe)
    nodes = values.get("parallel.n_nodes", 1)
    if nodes not in (1, instance_count):
        raise SageMakerError(
            f"parallel.n_nodes (NUM_NODES) = {nodes} and the job has {instance_count} instances; leave one of them out"
        )
    schema = leaves(Recipe)
    changed = {
        name: _format_value(values[field])
        for name, field in hyperparameter_fields().items()
        if field in values and values[field] != schema[field].default and name != "NUM_NODES"
    }
    return {**changed, "NUM_NODES": str(instance_count)}


def recipe_overrides(recipe: Mapping[str, Any]) -> list[str]:
    """Return the other fields that differ from their defaults, as `section.field=value` for `--set`."""
    schema, sent = leaves(Recipe) | _engine_schema(recipe), {*hyperparameter_fields().values()}
    return [
        f"{name}={_format_value(value)}"
        for name, value in flatten(recipe).items()
        if name not in sent
        and name not in LAUNCHER_ONLY_FIELDS
        and not channel_for_field(name)
        and not (name in schema and _is_default(value, schema[name].default))
        and value != {}
    ]


def channel_for_field(name: str) -> str:
    """Return the channel of a path field of the recipe; empty for fields that are not paths."""
    match = VALIDATION_STORE_FIELD.fullmatch(name)
    return VALIDATION_CHANNEL_PREFIX + match[1] if match else FIELD_CHANNELS.get(name, "")


def _engine_schema(recipe: Mapping[str, Any]) -> dict[str, FieldInfo]:
    """Return the options of the installed engines; options of other engines are all sent."""
    installed, schema = engine_names(), dict[str, FieldInfo]()
    for name in recipe.get("engine", {}):
        if name in installed:
            schema |= leaves(engine_spec(name).options, f"engine.{name}.")
    return schema


def _is_default(value: Any, default: Any) -> bool:
    return (tuple(value) if isinstance(value, list) else value) == default


def _format_value(value: Any) -> str:
    """Format a value as `--set` and hyperparameters parse it."""
    return value if isinstance(value, str) else format_value(value)


def _check_required(job: Job, options: SageMakerOptions) -> None:
    required = {
        "sagemaker.role": (options.role, "the ARN of a role with the rights in containers/iam/sagemaker-job.json"),
        "sagemaker.output_path": (options.output_path, "s3://BUCKET/FOLDER for the trained model"),
        "sagemaker.image or sagemaker.algorithm": (
            options.image or options.algorithm,
            "an image in ECR or the ARN of a subscribed algorithm",
        ),
        "job.resources.instance_type": (job.resources.instance_type, "one such as ml.p5.48xlarge"),
    }
    for name, (value, remedy) in required.items():
        if not value:
            raise SageMakerError(f"{name} is not set; set it in the run file or profile to {remedy}")


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
    sources = parse_pairs(options.channels, "sagemaker.channels")
    paths = {name: value for name, value in flatten(recipe).items() if value and channel_for_field(name)}
    for name, address in paths.items():
        if str(address).startswith("s3://"):
            sources.setdefault(channel_for_field(name), address)
    if "train" not in sources:
        raise SageMakerError(
            'sagemaker.channels has no channel "train"; add "train=s3://BUCKET/STORE" (send the store there with '
            "`lt data upload`), or give data.store an s3:// address"
        )
    for name, address in paths.items():
        if channel_for_field(name) not in sources:
            raise SageMakerError(
                f'{name} = {address!r} needs a channel; add "{channel_for_field(name)}=s3://BUCKET/FOLDER" to '
                "sagemaker.channels"
            )
    return [_channel(name, source, options) for name, source in sources.items()]


def _channel(name: str, source: str, options: SageMakerOptions) -> dict[str, Any]:
    scheme, separator, rest = source.partition("://")
    if not separator:
        raise SageMakerError(
            f"sagemaker.channels, {name}={source}: a folder of this machine; send it to S3 with `lt data upload`, and "
            f'write "{name}=s3://BUCKET/FOLDER"'
        )
    if scheme not in ("s3", *FILE_SYSTEMS):
        raise SageMakerError(
            f"sagemaker.channels, {name}={source}: write it as s3://BUCKET/FOLDER, fsx://FILE_SYSTEM_ID/FOLDER or "
            "efs://FILE_SYSTEM_ID/FOLDER"
        )
    if scheme in FILE_SYSTEMS:
        rest, _, mode = rest.partition("?")
        identifier, _, path = rest.partition("/")
        if mode not in ("", "ro", "rw"):
            raise SageMakerError(f"sagemaker.channels, {name}={source}: write ro or rw after ?")
        system = {
            "FileSystemId": identifier,
            "FileSystemAccessMode": mode or "ro",
            "FileSystemType": FILE_SYSTEMS[scheme],
            "DirectoryPath": f"/{path}",
        }
        return {"ChannelName": name, "DataSource": {"FileSystemDataSource": system}, "InputMode": "File"}
    if source.endswith(("?ro", "?rw")):
        raise SageMakerError(
            f"sagemaker.channels, {name}={source}: S3 is copied or streamed, never written; leave out what follows ?, "
            "or name a file system, fsx://FILE_SYSTEM_ID/FOLDER?rw"
        )
    s3 = {"S3DataType": "S3Prefix", "S3Uri": source, "S3DataDistributionType": "FullyReplicated"}
    return {"ChannelName": name, "DataSource": {"S3DataSource": s3}, "InputMode": options.input_mode}


def _stopping(job: Job, options: SageMakerOptions) -> dict[str, int]:
    run = job.time_limit_s or options.max_run_s
    condition = {"MaxRuntimeInSeconds": run}
    if options.use_spot_instances or options.max_wait_s:
        condition["MaxWaitTimeInSeconds"] = options.max_wait_s or WAIT_FACTOR * run
    if options.max_pending_s:
        condition["MaxPendingTimeInSeconds"] = options.max_pending_s
    return condition


def _environment(recipe: Mapping[str, Any], job: Job) -> dict[str, str]:
    overrides = {f"{OVERRIDE_PREFIX}{at:02}": text for at, text in enumerate(recipe_overrides(recipe))}
    processes = {"LT_PROCS_PER_NODE": str(job.procs_per_node)} if job.procs_per_node > 1 else {}
    return {**job.env, **overrides, **processes}


def _without_empty(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in ("", 0)}
