"""Bad training jobs: each is refused before anything is sent, with field, value and remedy."""

from typing import Any

import pytest

from lt_launch.job import Job, Resources
from lt_launch.sagemaker.errors import SageMakerError
from lt_launch.sagemaker.options import SageMakerOptions
from lt_launch.sagemaker.recipe_rules import request_notes
from lt_launch.sagemaker.request import create_training_job_request
from lt_trainer.config.recipe import load, to_toml
from lt_trainer.errors import RecipeError

ACCOUNT = "123456789012"
IMAGE = f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/lt:1"
ALGORITHM = f"arn:aws:sagemaker:us-east-1:{ACCOUNT}:algorithm/litespark"
FSX = "fs-0123456789abcdef0"
VPC: dict[str, Any] = {"subnets": ("subnet-0a1b2c3d",), "security_groups": ("sg-0a1b2c3d",)}
TRAIN = "train=s3://bucket/store"
RUN = {"channels": (TRAIN, f"run=fsx://{FSX}/abcdefgh/run?rw"), **VPC}
READ_ONLY_RUN = {**RUN, "channels": (TRAIN, f"run=fsx://{FSX}/abcdefgh/run")}
OPTIONS: dict[str, Any] = {
    "region": "us-east-1",
    "role": f"arn:aws:iam::{ACCOUNT}:role/trainer",
    "image": IMAGE,
    "channels": (TRAIN,),
    "output_path": "s3://bucket/out",
    "checkpoint_s3_uri": "s3://bucket/checkpoints",
}


def on(instance_type: str, **more: Any) -> dict[str, Any]:
    return {"resources": Resources(instance_type=instance_type, **more)}


def make(
    options: dict[str, Any], job: dict[str, Any] | None = None, recipe: dict[str, Any] | None = None
) -> dict[str, Any]:
    base = {"data": {"store": "store"}, **(recipe or {})}
    fields: dict[str, Any] = {
        "name": "a-job",
        "argv": ("python", "-P", "-m", "lt_trainer", "run", "run.toml"),
        "recipe": to_toml(load(base=base).recipe),
        "resources": Resources(instance_type="ml.p5.48xlarge"),
    }
    return create_training_job_request(Job(**{**fields, **(job or {})}), SageMakerOptions(**{**OPTIONS, **options}))


def channel(source: str, **more: Any) -> dict[str, Any]:
    return {"channels": (f"train={source}",), **more}


VALIDATED = {"data": {"store": "store", "validation": "val"}, "metrics": {"validation_interval": 5}}
BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [  # options, and words of the refusal parted by |
    ({"role": ""}, "sagemaker.role|the ARN of a role"),
    ({"role": "trainer"}, "RoleArn|'trainer'|sagemaker.role"),
    ({"image": ""}, "sagemaker.image|an image in ECR"),
    ({"algorithm": ALGORITHM}, f"sagemaker.algorithm|{ALGORITHM}|leave one of them out"),
    ({"image": f"{IMAGE}{'1' * 250}"}, "AlgorithmSpecification.TrainingImage|255|sagemaker.image"),
    ({"image": "", "algorithm": "lite spark"}, "AlgorithmSpecification.AlgorithmName|'lite spark'"),
    ({"channels": ()}, "sagemaker.channels|train=s3://BUCKET/STORE"),
    (channel("/data/store"), "train|/data/store|lt data upload"),
    (channel("gs://bucket/store"), "train|gs://bucket/store|s3://BUCKET/FOLDER"),
    (channel("s3://bucket/store?rw"), "train|s3://bucket/store?rw|fsx://"),
    ({"channels": (TRAIN, TRAIN)}, "sagemaker.channels|train|twice"),
    ({"channels": (TRAIN, "my data=s3://bucket/b")}, "InputDataConfig[1].ChannelName|'my data'|sagemaker.channels"),
    ({"channels": (TRAIN, *(f"c{at}=s3://b/c" for at in range(20)))}, "InputDataConfig|21|sagemaker.channels"),
    (channel("fsx://my-fs/abcdefgh/store", **VPC), "FileSystemDataSource.FileSystemId|'my-fs'|sagemaker.channels"),
    (channel(f"fsx://{FSX}/abcdefgh/store?write", **VPC), "sagemaker.channels|?write|ro or rw"),
    (channel(f"fsx://{FSX}/a/store", input_mode="FastFile", **VPC), "sagemaker.input_mode|'FastFile'|File"),
    ({"output_path": "/data/out"}, "OutputDataConfig.S3OutputPath|'/data/out'|sagemaker.output_path"),
    ({"subnets": VPC["subnets"]}, "VpcConfig.SecurityGroupIds|at least 1|sagemaker.security_groups"),
    ({"keep_alive_period_s": 21601}, "ResourceConfig.KeepAlivePeriodInSeconds|21601|sagemaker.keep_alive_period_s"),
    ({"max_pending_s": 60}, "StoppingCondition.MaxPendingTimeInSeconds|60|sagemaker.max_pending_s"),
    ({"max_retry_attempts": 31}, "RetryStrategy.MaximumRetryAttempts|31|sagemaker.max_retry_attempts"),
    ({"use_spot_instances": True, "checkpoint_s3_uri": ""}, "sagemaker.use_spot_instances|sagemaker.checkpoint_s3_uri"),
    (
        {"checkpoint_s3_uri": "", "checkpoint_local_path": "/opt/ml/mine"},
        "sagemaker.checkpoint_local_path|'/opt/ml/mine'|sagemaker.checkpoint_s3_uri",
    ),
    (READ_ONLY_RUN, "channel run|'ro'|?rw"),
    ({"tags": ("a=1", "a=2")}, "sagemaker.tags|'a=2'|twice"),
    ({"tags": ("a#=1",)}, "Tags[0].Key|'a#'|sagemaker.tags"),
]
BAD_JOBS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    ({"name": "a_job"}, {}, {}, "TrainingJobName|'a_job'|job.name"),
    ({"recipe": ""}, {}, {}, "job a-job|--stage"),
    (on("ml.p9.48xlarge"), {}, {}, "ResourceConfig.InstanceType|'ml.p9.48xlarge'|job.resources.instance_type"),
    (on("p5.48xlarge"), {}, {}, "ResourceConfig.InstanceType|'p5.48xlarge'|ml.p5.48xlarge"),
    (on("ml.trn1.32xlarge"), {}, {}, "run.engine|'gpu'|neuron"),
    ({"nodes": 2}, {}, {}, "2 instances|run=fsx://FILE_SYSTEM_ID/FOLDER?rw"),
    ({"nodes": 2}, {}, {"channels": (TRAIN, "run=s3://bucket/run")}, "channel run|s3://bucket/run|?rw"),
    ({"nodes": 2}, {"parallel": {"n_nodes": 3}}, RUN, "parallel.n_nodes|3|leave one of them out"),
    ({"env": {"LONG": "x" * 513}}, {}, {}, "Environment.LONG|513|job.env"),
    ({"env": {"LT_SET_00": "optimizer.eps=1"}}, {}, {}, "job.env.LT_SET_00|optimizer.eps=1|the recipe"),
    ({"env": {"LT_PROCS_PER_NODE": "4"}}, {}, {}, "LT_PROCS_PER_NODE|'4'|job.procs_per_node"),
    ({"env": {"SM_NUM_GPUS": "4"}}, {}, {}, "job.env.SM_NUM_GPUS|'4'|by the container"),
    ({}, VALIDATED, {}, "data.validation|'val'|validation=s3://BUCKET/FOLDER"),
    ({}, {"run": {"engine": "neuron"}}, {}, "run.engine|'neuron'|gpu"),
    ({}, {"fault_tolerance": {"grace_period_s": 300.0}}, {}, "fault_tolerance.grace_period_s|300|at most 115"),
    (
        {},
        {"checkpoint": {"mirror_url": "s3://bucket/m"}},
        {},
        "checkpoint.mirror_url|'s3://bucket/m'|network_isolation",
    ),
]


@pytest.mark.parametrize(
    ("job", "recipe", "options", "words"), [*(({}, {}, options, words) for options, words in BAD_OPTIONS), *BAD_JOBS]
)
def test_a_bad_job_is_refused_with_field_value_and_remedy(
    job: dict[str, Any], recipe: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises((SageMakerError, RecipeError)) as caught:
        make(options, job, recipe)
    assert [word for word in words.split("|") if word not in str(caught.value)] == []


CHINA = {
    "region": "cn-north-1",
    "image": f"{ACCOUNT}.dkr.ecr.cn-north-1.amazonaws.com.cn/lt:1",
    "role": f"arn:aws-cn:iam::{ACCOUNT}:role/trainer",
}


@pytest.mark.parametrize(
    ("job", "recipe", "options"),
    [
        ({}, {}, {}),
        ({}, {}, CHINA),
        ({}, {}, {"image": "", "algorithm": ALGORITHM}),
        ({}, {}, {"output_path": f"s3://arn:aws:s3:us-east-1:{ACCOUNT}:accesspoint/mine/out"}),
        ({}, {}, {**RUN, "input_mode": "FastFile"}),
        ({}, {}, {**RUN, "use_spot_instances": True, "checkpoint_s3_uri": ""}),
        ({}, {}, {"channels": (f"train=efs://{FSX}",), **VPC}),
        ({"procs_per_node": 128, **on("ml.trn2.48xlarge")}, {"run": {"engine": "neuron"}}, {}),
        ({"nodes": 2}, {}, RUN),
        ({}, {"checkpoint": {"mirror_url": "s3://bucket/m"}}, {"network_isolation": False}),
        ({}, {"fault_tolerance": {"grace_period_s": 100.0}}, {}),
    ],
)
def test_what_the_service_takes_is_accepted(
    job: dict[str, Any], recipe: dict[str, Any], options: dict[str, Any]
) -> None:
    make(options, job, recipe)


def test_a_small_volume_for_copied_channels_is_told() -> None:
    (note,) = request_notes(make({}, on("ml.m5.xlarge")))
    assert "ml.m5.xlarge has no local disks" in note
    assert "job.resources.volume_gib" in note
    assert request_notes(make({}, on("ml.m5.xlarge", volume_gib=100))) == ()
    assert request_notes(make({"input_mode": "FastFile"}, on("ml.m5.xlarge"))) == ()
    assert request_notes(make({}, on("ml.p5.48xlarge"))) == ()
