"""CreateTrainingJob request of a job and a profile: pure, deterministic, checked before use.

The recipe travels in two ways. Hyperparameters of the published algorithm are sent as such, so that the console shows
them; NUM_NODES is always sent and equals the number of instances. Every other field that differs from its default is
sent as an environment variable LT_SET_nn = "section.field=value". Paths are not sent: the container has its own.

Besides the service's model (`service_model`), what the service accepts and the container cannot run is refused, since
instances cost money from their start:

    instance type    the recipe's engine trains on it
    channel run      several instances share one writable folder; it is the run directory of a single one, too
    spot             an interrupted job starts from its checkpoints, so it needs a place for them
    grace period     the service kills everything 120 s after its signal
    isolation        a mirror cannot be reached
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from lt_launch.errors import LaunchError
from lt_launch.job import Job
from lt_launch.sagemaker.contract import GRACE_PERIOD_S, RUN_CHANNEL, engine_of
from lt_launch.sagemaker.options import SageMakerOptions
from lt_launch.sagemaker.service_model import check_request
from lt_trainer.config.hyperparameters import hyperparameter_fields
from lt_trainer.config.section import default_value, flatten, leaves
from lt_trainer.config.sections import DERIVED_DEFAULTS, FaultToleranceOptions, Recipe
from lt_trainer.engine import engine_names, engine_spec
from lt_trainer.run_directory.records import METRIC_DEFINITIONS
from lt_trainer.toml import format_value

OVERRIDE_PREFIX = "LT_SET_"
LAUNCHER_ONLY_FIELDS = ("run.dir", "model.preset", "parallel.n_nodes")
"""Fields that have no meaning in the container or reach it in another way."""
FIELD_CHANNELS = {"data.store": "train", "data.validation": "validation", "model.init_from": "init"}
VALIDATION_CHANNEL_PREFIX = "validation-"
VALIDATION_STORE_FIELD = re.compile(r"data\.validation_sets\.([A-Za-z0-9._-]+)\.store")
WAIT_FACTOR = 2
DEFAULT_VOLUME_GB = 1
"""Smallest volume; channels in File mode need more, file systems and FastFile do not."""
FILE_SYSTEMS = {"fsx": "FSxLustre", "efs": "EFS"}
"""Type of a file system, by the scheme of its addresses."""
ADDRESS = re.compile(
    r"(?:(?P<s3>s3://[^?]*)|(?P<scheme>fsx|efs)://(?P<id>[^/?]+)(?P<path>/[^?]*)?(?:\?(?P<mode>r[ow]))?)"
)
RUN_REMEDY = 'add a writable file system, "run=fsx://FILE_SYSTEM_ID/FOLDER?rw", to sagemaker.channels'


def create_training_job_request(job: Job, options: SageMakerOptions) -> dict[str, Any]:
    """Return the request of one training job.

    Args:
        job: the job; used are its recipe, nodes (instances), resources.instance_type and volume_gib, time limit and
            environment.
        options: options of the profile.

    Raises:
        LaunchError: a value is missing, or the service would reject it; names field, value and limit.
    """
    if not job.recipe:
        raise LaunchError(f"job {job.name}: only a training job can run here; choose it with --stage")
    recipe, run_s = tomllib.loads(job.recipe), job.time_limit_s or options.max_run_s
    _check_required(job, options)
    spot = options.use_spot_instances
    request: dict[str, Any] = {
        "TrainingJobName": job.name,
        "RoleArn": options.role,
        "AlgorithmSpecification": {
            **({"AlgorithmName": options.algorithm} if options.algorithm else {"TrainingImage": options.image}),
            "TrainingInputMode": options.input_mode,
            **({} if options.algorithm else {"MetricDefinitions": [dict(one) for one in METRIC_DEFINITIONS]}),
            "EnableSageMakerMetricsTimeSeries": True,
        },
        "HyperParameters": hyperparameters(recipe, job.nodes),
        "InputDataConfig": _channels(recipe, options),
        "OutputDataConfig": {"S3OutputPath": options.output_path, "CompressionType": "GZIP"},
        "ResourceConfig": {
            "InstanceType": job.resources.instance_type,
            "InstanceCount": job.nodes,
            "VolumeSizeInGB": job.resources.volume_gib or DEFAULT_VOLUME_GB,
            **({"KeepAlivePeriodInSeconds": options.keep_alive_period_s} if options.keep_alive_period_s else {}),
        },
        "StoppingCondition": {
            "MaxRuntimeInSeconds": run_s,
            **({"MaxWaitTimeInSeconds": WAIT_FACTOR * run_s} if spot else {}),
        },
        "EnableNetworkIsolation": options.network_isolation,
        **({"EnableManagedSpotTraining": True} if spot else {}),
    }
    if options.checkpoint_s3_uri:
        request["CheckpointConfig"] = {"S3Uri": options.checkpoint_s3_uri, "LocalPath": "/opt/ml/checkpoints"}
    if options.subnets or options.security_groups:
        request["VpcConfig"] = {"Subnets": list(options.subnets), "SecurityGroupIds": list(options.security_groups)}
    overrides = {f"{OVERRIDE_PREFIX}{at:02}": text for at, text in enumerate(recipe_overrides(recipe))}
    processes = {"LT_PROCS_PER_NODE": str(job.procs_per_node)} if job.procs_per_node > 1 else {}
    if environment := {**job.env, **overrides, **processes}:
        request["Environment"] = environment
    request = _merged(request, options.request)
    check_request("CreateTrainingJob", request)
    for problem in _contradictions(flatten(recipe), request):
        raise LaunchError(problem)
    return request


def _merged(request: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request with further fields, tables merged."""
    tables = {k: _merged(request[k], v) for k, v in more.items() if isinstance(v, dict) and k in request}
    return {**request, **more, **tables}


def hyperparameters(recipe: Mapping[str, Any], instance_count: int) -> dict[str, str]:
    """Return the hyperparameters that differ from their defaults, as strings, and NUM_NODES.

    Those whose default follows from other fields are always sent.
    """
    values = flatten(recipe)
    nodes = values.get("parallel.n_nodes", 1)
    if nodes not in (1, instance_count):
        raise LaunchError(
            f"parallel.n_nodes (NUM_NODES) = {nodes} and the job has {instance_count} instances; leave one of them out"
        )
    schema = leaves(Recipe)
    changed = {
        name: _format_value(values[field])
        for name, field in hyperparameter_fields().items()
        if field in values
        and (field in DERIVED_DEFAULTS or values[field] != default_value(schema[field]))
        and name != "NUM_NODES"
    }
    return {**changed, "NUM_NODES": str(instance_count)}


def recipe_overrides(recipe: Mapping[str, Any]) -> list[str]:
    """Return the other fields that differ from their defaults, as `section.field=value` for `--set`.

    Of an engine that is not installed here all options are sent.
    """
    schema: dict[str, FieldInfo] = leaves(Recipe)
    for name in {*recipe.get("engine", {})} & {*engine_names()}:
        schema |= leaves(engine_spec(name).options, f"engine.{name}.")
    sent = {*hyperparameter_fields().values(), *LAUNCHER_ONLY_FIELDS}
    defaults = {name: default_value(field) for name, field in schema.items()}
    defaults = {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}
    return [
        f"{name}={_format_value(value)}"
        for name, value in flatten(recipe).items()
        if name not in sent and not channel_for_field(name) and value not in (defaults.get(name, {}), {})
    ]


def channel_for_field(name: str) -> str:
    """Return the channel of a path field of the recipe; empty for fields that are not paths."""
    match = VALIDATION_STORE_FIELD.fullmatch(name)
    return VALIDATION_CHANNEL_PREFIX + match[1] if match else FIELD_CHANNELS.get(name, "")


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
            raise LaunchError(f"{name} is not set; set it in the run file or profile to {remedy}")


def _channels(recipe: Mapping[str, Any], options: SageMakerOptions) -> list[dict[str, Any]]:
    sources = options.sources
    paths = {name: value for name, value in flatten(recipe).items() if value and channel_for_field(name)}
    for name, address in paths.items():
        if str(address).startswith("s3://"):
            sources.setdefault(channel_for_field(name), address)
    for name, address in {"data.store": "", **paths}.items():
        if (channel := channel_for_field(name)) not in sources:
            raise LaunchError(
                f'{name} = {address!r} needs a channel; add "{channel}=s3://BUCKET/FOLDER" to sagemaker.channels '
                "(send a store there with `lt data upload`)"
            )
    return [_channel(name, source, options.input_mode) for name, source in sources.items()]


def _channel(name: str, source: str, input_mode: str) -> dict[str, Any]:
    match = ADDRESS.fullmatch(source)
    if match is None:
        raise LaunchError(
            f"sagemaker.channels, {name}={source}: write it as s3://BUCKET/FOLDER (send a folder there with "
            "`lt data upload`), fsx://FILE_SYSTEM_ID/FOLDER or efs://FILE_SYSTEM_ID/FOLDER; ?rw after a file system "
            "makes it writable"
        )
    if match["s3"]:
        s3 = {"S3DataType": "S3Prefix", "S3Uri": source, "S3DataDistributionType": "FullyReplicated"}
        return {"ChannelName": name, "DataSource": {"S3DataSource": s3}, "InputMode": input_mode}
    system = {
        "FileSystemId": match["id"],
        "FileSystemAccessMode": match["mode"] or "ro",
        "FileSystemType": FILE_SYSTEMS[match["scheme"]],
        "DirectoryPath": match["path"] or "/",
    }
    return {"ChannelName": name, "DataSource": {"FileSystemDataSource": system}, "InputMode": "File"}


def _contradictions(values: Mapping[str, Any], request: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence with field, value and remedy for each thing that the container could not run."""
    if (mirror := values.get("checkpoint.mirror_url")) and request["EnableNetworkIsolation"]:
        yield (
            f"checkpoint.mirror_url = {mirror!r} cannot be reached from an isolated container; leave it out and set "
            "sagemaker.checkpoint_s3_uri, or set sagemaker.network_isolation to false"
        )
    kind, instances = request["ResourceConfig"]["InstanceType"], request["ResourceConfig"]["InstanceCount"]
    engine = values.get("run.engine", "gpu")
    if engine != engine_of(kind) and values.get(f"engine.{engine}.device") != "cpu":
        yield (
            f"run.engine = {engine!r} and job.resources.instance_type = {kind!r}, which the engine {engine_of(kind)} "
            "trains on; change one of them"
        )
    grace_s = values.get("fault_tolerance.grace_period_s", 0)
    if grace_s > GRACE_PERIOD_S and grace_s != FaultToleranceOptions().grace_period_s:
        yield (
            f"fault_tolerance.grace_period_s = {grace_s:g}: SageMaker kills all processes 120 s after its signal; set "
            f"it to at most {GRACE_PERIOD_S:g}, or leave it out"
        )
    inputs = {channel["ChannelName"]: channel["DataSource"] for channel in request["InputDataConfig"]}
    run = inputs.get(RUN_CHANNEL)
    if run is None and instances > 1:
        yield f"{instances} instances need one folder that all of them write checkpoints to; {RUN_REMEDY}"
    elif run and "S3DataSource" in run:
        address = run["S3DataSource"]["S3Uri"]
        yield f"channel {RUN_CHANNEL} = {address!r} is each host's own copy: checkpoints would be lost; {RUN_REMEDY}"
    elif run and (mode := run["FileSystemDataSource"]["FileSystemAccessMode"]) != "rw":
        yield f"channel {RUN_CHANNEL} has the access mode {mode!r}; end its address with ?rw to write checkpoints"
    if request.get("EnableManagedSpotTraining") and not run and "CheckpointConfig" not in request:
        yield (
            "sagemaker.use_spot_instances = True: an interrupted job would start at step 0; set "
            "sagemaker.checkpoint_s3_uri to s3://BUCKET/FOLDER, or add a writable channel run"
        )
