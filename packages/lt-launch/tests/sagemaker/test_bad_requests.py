"""Bad training jobs: each is refused before anything is sent, with field, value and remedy."""

from dataclasses import dataclass, field
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
RUN = {"channels": ("train=s3://bucket/store", f"run=fsx://{FSX}/abcdefgh/run?rw"), **VPC}
KEY = "1234abcd-12ab-34cd-56ef-1234567890ab"
OPTIONS: dict[str, Any] = {
    "region": "us-east-1",
    "role": f"arn:aws:iam::{ACCOUNT}:role/trainer",
    "image": IMAGE,
    "channels": ("train=s3://bucket/store",),
    "output_path": "s3://bucket/out",
    "checkpoint_s3_uri": "s3://bucket/checkpoints",
}


def on(instance_type: str, **more: Any) -> dict[str, Any]:
    """Job fields of an instance type."""
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


@dataclass(frozen=True, kw_only=True)
class Case:
    """One bad job: what is changed in a good one, and what the refusal must name."""

    id: str
    field: str
    value: str = ""
    remedy: str
    options: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)


def channel(source: str, **more: Any) -> dict[str, Any]:
    """Options with one channel."""
    return {"channels": (f"train={source}",), **more}


JOBS = [
    # --- names, roles, images, algorithms
    Case(id="name-dot", job={"name": "a.job"}, field="TrainingJobName", value="'a.job'", remedy="job.name"),
    Case(id="name-underscore", job={"name": "a_job"}, field="TrainingJobName", value="'a_job'", remedy="job.name"),
    Case(id="no-role", options={"role": ""}, field="sagemaker.role", remedy="the ARN of a role"),
    Case(id="role-name", options={"role": "trainer"}, field="RoleArn", value="'trainer'", remedy="sagemaker.role"),
    Case(
        id="role-of-a-user",
        options={"role": f"arn:aws:iam::{ACCOUNT}:user/somebody"},
        field="RoleArn",
        value="user/somebody",
        remedy="sagemaker.role",
    ),
    Case(id="no-image", options={"image": ""}, field="sagemaker.image", remedy="an image in ECR"),
    Case(
        id="image-and-algorithm",
        options={"algorithm": ALGORITHM},
        field="sagemaker.algorithm",
        value=ALGORITHM,
        remedy="leave one of them out",
    ),
    Case(
        id="image-too-long",
        options={"image": f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/{'a' * 250}:1"},
        field="AlgorithmSpecification.TrainingImage",
        value="255",
        remedy="sagemaker.image",
    ),
    Case(
        id="algorithm-with-a-space",
        options={"image": "", "algorithm": "lite spark"},
        field="AlgorithmSpecification.AlgorithmName",
        value="'lite spark'",
        remedy="sagemaker.algorithm",
    ),
    # --- channels
    Case(id="no-channel", options={"channels": ()}, field="sagemaker.channels", remedy="train=s3://BUCKET/STORE"),
    Case(
        id="channel-of-a-local-path",
        options=channel("/data/store"),
        field="train",
        value="/data/store",
        remedy="lt data upload",
    ),
    Case(
        id="channel-of-google",
        options=channel("gs://bucket/store"),
        field="train",
        value="gs://bucket/store",
        remedy="s3://BUCKET/FOLDER",
    ),
    Case(
        id="channel-over-https",
        options=channel("https://bucket.s3.amazonaws.com/store"),
        field="train",
        value="https://bucket.s3.amazonaws.com/store",
        remedy="s3://BUCKET/FOLDER",
    ),
    Case(
        id="output-to-a-path",
        options={"output_path": "/data/out"},
        field="OutputDataConfig.S3OutputPath",
        value="'/data/out'",
        remedy="sagemaker.output_path",
    ),
    Case(
        id="writable-s3",
        options=channel("s3://bucket/store?rw"),
        field="train",
        value="s3://bucket/store?rw",
        remedy="fsx://",
    ),
    Case(
        id="channel-twice",
        options={"channels": ("train=s3://bucket/a", "train=s3://bucket/b")},
        field="sagemaker.channels",
        value="train",
        remedy="twice",
    ),
    Case(
        id="channel-name-with-a-space",
        options={"channels": ("train=s3://bucket/a", "my data=s3://bucket/b")},
        field="InputDataConfig[1].ChannelName",
        value="'my data'",
        remedy="sagemaker.channels",
    ),
    Case(
        id="too-many-channels",
        options={"channels": ("train=s3://bucket/a", *(f"c{at}=s3://bucket/b" for at in range(20)))},
        field="InputDataConfig",
        value="21",
        remedy="sagemaker.channels",
    ),
    Case(
        id="file-system-with-a-wrong-id",
        options=channel("fsx://my-file-system/abcdefgh/store", **VPC),
        field="InputDataConfig[0].DataSource.FileSystemDataSource.FileSystemId",
        value="'my-file-system'",
        remedy="sagemaker.channels",
    ),
    Case(
        id="file-system-with-a-wrong-mode",
        options=channel(f"fsx://{FSX}/abcdefgh/store?write", **VPC),
        field="sagemaker.channels",
        value="?write",
        remedy="ro or rw",
    ),
    Case(
        id="fast-file-of-a-file-system",
        options=channel(f"fsx://{FSX}/abcdefgh/store", input_mode="FastFile", **VPC),
        field="sagemaker.input_mode",
        value="'FastFile'",
        remedy="File",
    ),
    Case(
        id="validation-without-channel",
        recipe={"data": {"store": "store", "validation": "val"}, "metrics": {"validation_interval": 5}},
        field="data.validation",
        value="'val'",
        remedy="validation=s3://BUCKET/FOLDER",
    ),
    # --- VPC
    Case(
        id="subnets-without-security-groups",
        options={"subnets": ("subnet-0a1b2c3d",)},
        field="VpcConfig.SecurityGroupIds",
        value="at least 1",
        remedy="sagemaker.security_groups",
    ),
    Case(
        id="six-security-groups",
        options={"subnets": VPC["subnets"], "security_groups": tuple(f"sg-0a1b2c3{at}" for at in range(6))},
        field="VpcConfig.SecurityGroupIds",
        value="6",
        remedy="sagemaker.security_groups",
    ),
    # --- machines and disks
    Case(
        id="unknown-instance-type",
        job=on("ml.p9.48xlarge"),
        field="ResourceConfig.InstanceType",
        value="'ml.p9.48xlarge'",
        remedy="job.resources.instance_type",
    ),
    Case(
        id="instance-type-without-ml",
        job=on("p5.48xlarge"),
        field="ResourceConfig.InstanceType",
        value="'p5.48xlarge'",
        remedy="ml.p5.48xlarge",
    ),
    Case(
        id="gpu-recipe-on-trainium",
        job=on("ml.trn1.32xlarge"),
        field="run.engine",
        value="'gpu'",
        remedy="neuron",
    ),
    Case(
        id="neuron-recipe-on-gpus",
        recipe={"run": {"engine": "neuron"}},
        field="run.engine",
        value="'neuron'",
        remedy="gpu",
    ),
    Case(
        id="warm-too-long",
        options={"keep_alive_period_s": 21601},
        field="ResourceConfig.KeepAlivePeriodInSeconds",
        value="21601",
        remedy="sagemaker.keep_alive_period_s",
    ),
    # --- several instances
    Case(id="no-run-channel", job={"nodes": 2}, field="2 instances", remedy="run=fsx://FILE_SYSTEM_ID/FOLDER?rw"),
    Case(
        id="read-only-run-channel",
        options={**RUN, "channels": (RUN["channels"][0], RUN["channels"][1].removesuffix("?rw"))},
        job={"nodes": 2},
        field="channel run",
        value="'ro'",
        remedy="?rw",
    ),
    Case(
        id="run-channel-in-s3",
        options={"channels": ("train=s3://bucket/store", "run=s3://bucket/run")},
        job={"nodes": 2},
        field="channel run",
        value="s3://bucket/run",
        remedy="?rw",
    ),
    Case(
        id="read-only-run-channel-of-one-instance",
        options={**RUN, "channels": (RUN["channels"][0], RUN["channels"][1].removesuffix("?rw"))},
        field="channel run",
        value="'ro'",
        remedy="?rw",
    ),
    Case(
        id="nodes-of-the-recipe",
        options=RUN,
        job={"nodes": 2},
        recipe={"parallel": {"n_nodes": 3}},
        field="parallel.n_nodes",
        value="3",
        remedy="leave one of them out",
    ),
    # --- time
    Case(
        id="pending-too-short",
        options={"max_pending_s": 60},
        field="StoppingCondition.MaxPendingTimeInSeconds",
        value="60",
        remedy="sagemaker.max_pending_s",
    ),
    Case(
        id="spot-without-checkpoints",
        options={"use_spot_instances": True, "checkpoint_s3_uri": ""},
        field="sagemaker.use_spot_instances",
        value="True",
        remedy="sagemaker.checkpoint_s3_uri",
    ),
    Case(
        id="too-many-retries",
        options={"max_retry_attempts": 31},
        field="RetryStrategy.MaximumRetryAttempts",
        value="31",
        remedy="sagemaker.max_retry_attempts",
    ),
    Case(
        id="grace-beyond-the-service",
        recipe={"fault_tolerance": {"grace_period_s": 300.0}},
        field="fault_tolerance.grace_period_s",
        value="300",
        remedy="at most 115",
    ),
    # --- checkpoints
    Case(
        id="checkpoint-folder-without-address",
        options={"checkpoint_s3_uri": "", "checkpoint_local_path": "/opt/ml/mine"},
        field="sagemaker.checkpoint_local_path",
        value="'/opt/ml/mine'",
        remedy="sagemaker.checkpoint_s3_uri",
    ),
    Case(
        id="mirror-of-an-isolated-job",
        recipe={"checkpoint": {"mirror_url": "s3://bucket/mirror"}},
        field="checkpoint.mirror_url",
        value="'s3://bucket/mirror'",
        remedy="sagemaker.network_isolation",
    ),
    # --- tags and variables
    Case(id="tag-twice", options={"tags": ("a=1", "a=2")}, field="sagemaker.tags", value="'a=2'", remedy="twice"),
    Case(id="tag-with-a-sign", options={"tags": ("a#=1",)}, field="Tags[0].Key", value="'a#'", remedy="sagemaker.tags"),
    Case(
        id="too-many-tags",
        options={"tags": tuple(f"key{at}=1" for at in range(51))},
        field="Tags",
        value="51",
        remedy="sagemaker.tags",
    ),
    Case(
        id="variable-too-long",
        job={"env": {"LONG": "x" * 513}},
        field="Environment.LONG",
        value="513",
        remedy="job.env",
    ),
    Case(
        id="variable-of-an-override",
        job={"env": {"LT_SET_00": "optimizer.eps=1"}},
        field="LT_SET_00",
        value="optimizer.eps=1",
        remedy="job.env",
    ),
    Case(
        id="variable-of-the-processes",
        job={"env": {"LT_PROCS_PER_NODE": "4"}},
        field="LT_PROCS_PER_NODE",
        value="'4'",
        remedy="job.procs_per_node",
    ),
    Case(
        id="variable-of-the-toolkit",
        job={"env": {"SM_NUM_GPUS": "4"}},
        field="SM_NUM_GPUS",
        value="'4'",
        remedy="job.env",
    ),
    Case(id="no-recipe", job={"recipe": ""}, field="job a-job", remedy="--stage"),
]


def test_a_good_job_is_accepted() -> None:
    make({})


@pytest.mark.parametrize("case", JOBS, ids=lambda case: case.id)
def test_a_bad_job_is_refused_with_field_value_and_remedy(case: Case) -> None:
    with pytest.raises((SageMakerError, RecipeError)) as caught:
        make(case.options, case.job, case.recipe)
    message = str(caught.value)
    for words in (case.field, case.value, case.remedy):
        assert words in message


GOOD = {
    "china": {
        "region": "cn-north-1",
        "image": f"{ACCOUNT}.dkr.ecr.cn-north-1.amazonaws.com.cn/lt:1",
        "role": f"arn:aws-cn:iam::{ACCOUNT}:role/trainer",
    },
    "two-stack-registry": {"image": f"{ACCOUNT}.dkr-ecr.us-east-1.on.aws/lt:1"},
    "algorithm-by-arn": {"image": "", "algorithm": ALGORITHM},
    "access-point": {"output_path": f"s3://arn:aws:s3:us-east-1:{ACCOUNT}:accesspoint/mine/out"},
    "fast-file-beside-a-file-system": {**RUN, "input_mode": "FastFile"},
    "spot-with-a-run-channel": {**RUN, "use_spot_instances": True, "checkpoint_s3_uri": ""},
    "efs-root": {"channels": (f"train=efs://{FSX}",), **VPC},
}


@pytest.mark.parametrize("name", GOOD)
def test_what_the_service_takes_is_accepted(name: str) -> None:
    make(GOOD[name])


@pytest.mark.parametrize(
    ("job", "recipe", "options"),
    [
        ({"procs_per_node": 128, **on("ml.trn2.48xlarge")}, {"run": {"engine": "neuron"}}, {}),
        ({"procs_per_node": 8}, {}, {}),
        ({"nodes": 2}, {}, RUN),
        ({}, {"fault_tolerance": {"grace_period_s": 100.0}}, {}),
        (on("ml.m5.xlarge"), {}, {}),
    ],
)
def test_a_job_at_its_limits_is_accepted(job: dict[str, Any], recipe: dict[str, Any], options: dict[str, Any]) -> None:
    make(options, job, recipe)


def test_a_small_volume_for_copied_channels_is_told() -> None:
    notes = request_notes(make({}, on("ml.m5.xlarge")))
    assert len(notes) == 1
    assert "ml.m5.xlarge has no local disks" in notes[0]
    assert "job.resources.volume_gib" in notes[0]
    assert request_notes(make({}, on("ml.m5.xlarge", volume_gib=100))) == ()
    assert request_notes(make({"input_mode": "FastFile"}, on("ml.m5.xlarge"))) == ()
    assert request_notes(make({}, on("ml.p5.48xlarge"))) == ()
    assert request_notes(make({}, on("ml.r5d.large"))) == ()
