"""Bad training jobs: each is refused before anything is sent, with field, value and remedy."""

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest

from lt_launch.job import Job, Resources
from lt_launch.sagemaker.algorithm import create_algorithm_request
from lt_launch.sagemaker.constraints import check_request
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
    Case(
        id="role-of-china",
        options={"role": f"arn:aws-cn:iam::{ACCOUNT}:role/trainer"},
        field="RoleArn",
        value="aws-cn",
        remedy="sagemaker.region",
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
        id="image-with-a-space",
        options={"image": f"{IMAGE} latest"},
        field="AlgorithmSpecification.TrainingImage",
        value="lt:1 latest",
        remedy="sagemaker.image",
    ),
    Case(
        id="image-of-docker-hub",
        options={"image": "pytorch/pytorch:2.9"},
        field="AlgorithmSpecification.TrainingImage",
        value="'pytorch/pytorch:2.9'",
        remedy="ACCOUNT.dkr.ecr.REGION.amazonaws.com/REPOSITORY:TAG",
    ),
    Case(
        id="image-of-github",
        options={"image": "ghcr.io/somebody/lt:1"},
        field="AlgorithmSpecification.TrainingImage",
        value="'ghcr.io/somebody/lt:1'",
        remedy="docker push",
    ),
    Case(
        id="image-of-public-ecr",
        options={"image": "public.ecr.aws/somebody/lt:1"},
        field="AlgorithmSpecification.TrainingImage",
        value="public.ecr.aws",
        remedy="docker push",
    ),
    Case(
        id="image-file",
        options={"image": "/fsx/lt.sqsh"},
        field="AlgorithmSpecification.TrainingImage",
        value="'/fsx/lt.sqsh'",
        remedy="docker push",
    ),
    Case(
        id="image-with-a-scheme",
        options={"image": f"https://{IMAGE}"},
        field="AlgorithmSpecification.TrainingImage",
        value="https://",
        remedy="sagemaker.image",
    ),
    Case(
        id="image-of-a-short-account",
        options={"image": "12345.dkr.ecr.us-east-1.amazonaws.com/lt:1"},
        field="AlgorithmSpecification.TrainingImage",
        value="'12345.dkr",
        remedy="sagemaker.image",
    ),
    Case(
        id="image-in-capitals",
        options={"image": f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/LT:1"},
        field="AlgorithmSpecification.TrainingImage",
        value="/LT:1",
        remedy="sagemaker.image",
    ),
    Case(
        id="image-of-another-region",
        options={"image": f"{ACCOUNT}.dkr.ecr.eu-west-1.amazonaws.com/lt:1"},
        field="AlgorithmSpecification.TrainingImage",
        value="eu-west-1",
        remedy="sagemaker.region",
    ),
    Case(
        id="image-too-long",
        options={"image": f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/{'a' * 250}:1"},
        field="AlgorithmSpecification.TrainingImage",
        value="255",
        remedy="sagemaker.image",
    ),
    Case(
        id="algorithm-of-another-region",
        options={"image": "", "algorithm": ALGORITHM.replace("us-east-1", "eu-west-1")},
        field="AlgorithmSpecification.AlgorithmName",
        value="eu-west-1",
        remedy="sagemaker.region",
    ),
    Case(
        id="model-as-algorithm",
        options={"image": "", "algorithm": f"arn:aws:sagemaker:us-east-1:{ACCOUNT}:model/llama"},
        field="AlgorithmSpecification.AlgorithmName",
        value="model/llama",
        remedy="algorithm/NAME",
    ),
    Case(
        id="model-package-as-algorithm",
        options={"image": "", "algorithm": f"arn:aws:sagemaker:us-east-1:{ACCOUNT}:model-package/llama"},
        field="AlgorithmSpecification.AlgorithmName",
        value="model-package/llama",
        remedy="algorithm/NAME",
    ),
    Case(
        id="algorithm-with-a-space",
        options={"image": "", "algorithm": "lite spark"},
        field="AlgorithmSpecification.AlgorithmName",
        value="'lite spark'",
        remedy="sagemaker.algorithm",
    ),
    Case(
        id="zone-as-region",
        options={"region": "us-east-1a"},
        field="sagemaker.region",
        value="'us-east-1a'",
        remedy="us-east-1",
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
        id="bucket-in-capitals",
        options=channel("s3://Bucket/store"),
        field="InputDataConfig[0].DataSource.S3DataSource.S3Uri",
        value="'Bucket'",
        remedy="lower-case",
    ),
    Case(
        id="bucket-with-underscore",
        options=channel("s3://my_bucket/store"),
        field="InputDataConfig[0].DataSource.S3DataSource.S3Uri",
        value="'my_bucket'",
        remedy="lower-case",
    ),
    Case(
        id="bucket-too-short",
        options=channel("s3://ab/store"),
        field="InputDataConfig[0].DataSource.S3DataSource.S3Uri",
        value="'ab'",
        remedy="3 to 63",
    ),
    Case(
        id="bucket-too-long",
        options=channel(f"s3://{'a' * 64}/store"),
        field="InputDataConfig[0].DataSource.S3DataSource.S3Uri",
        value="aaaa",
        remedy="3 to 63",
    ),
    Case(
        id="bucket-with-two-dots",
        options=channel("s3://my..bucket/store"),
        field="InputDataConfig[0].DataSource.S3DataSource.S3Uri",
        value="'my..bucket'",
        remedy="sagemaker.channels",
    ),
    Case(
        id="bucket-with-a-dash-at-its-end",
        options=channel("s3://bucket-/store"),
        field="InputDataConfig[0].DataSource.S3DataSource.S3Uri",
        value="'bucket-'",
        remedy="sagemaker.channels",
    ),
    Case(
        id="bucket-like-an-ip-address",
        options=channel("s3://10.0.0.1/store"),
        field="InputDataConfig[0].DataSource.S3DataSource.S3Uri",
        value="'10.0.0.1'",
        remedy="sagemaker.channels",
    ),
    Case(
        id="bucket-of-the-manual",
        options=channel("s3://amzn-s3-demo-bucket/store"),
        field="InputDataConfig[0].DataSource.S3DataSource.S3Uri",
        value="'amzn-s3-demo-bucket'",
        remedy="sagemaker.channels",
    ),
    Case(
        id="output-bucket-in-capitals",
        options={"output_path": "s3://BUCKET/out"},
        field="OutputDataConfig.S3OutputPath",
        value="'BUCKET'",
        remedy="sagemaker.output_path",
    ),
    Case(
        id="checkpoint-bucket-in-capitals",
        options={"checkpoint_s3_uri": "s3://BUCKET/checkpoints"},
        field="CheckpointConfig.S3Uri",
        value="'BUCKET'",
        remedy="sagemaker.checkpoint_s3_uri",
    ),
    Case(
        id="output-to-a-path",
        options={"output_path": "/data/out"},
        field="OutputDataConfig.S3OutputPath",
        value="'/data/out'",
        remedy="sagemaker.output_path",
    ),
    Case(
        id="output-over-https",
        options={"output_path": "https://bucket/out"},
        field="OutputDataConfig.S3OutputPath",
        value="'https://bucket/out'",
        remedy="s3://BUCKET/FOLDER",
    ),
    Case(
        id="channel-with-a-blank-at-its-end",
        options=channel("s3://bucket/store "),
        field="InputDataConfig[0].DataSource.S3DataSource.S3Uri",
        value="'s3://bucket/store '",
        remedy="sagemaker.channels",
    ),
    Case(
        id="channel-with-a-pattern",
        options=channel("s3://bucket/store/*.bin"),
        field="InputDataConfig[0].DataSource.S3DataSource.S3Uri",
        value="'s3://bucket/store/*.bin'",
        remedy="folder",
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
        id="file-system-without-vpc",
        options=channel(f"fsx://{FSX}/abcdefgh/store"),
        field="VpcConfig",
        value="InputDataConfig[0]",
        remedy="sagemaker.subnets",
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
        id="lustre-without-its-mount-name",
        options=channel(f"fsx://{FSX}", **VPC),
        field="InputDataConfig[0].DataSource.FileSystemDataSource.DirectoryPath",
        value="'/'",
        remedy="mount name",
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
        id="subnet-as-security-group",
        options={"subnets": ("subnet-0a1b2c3d",), "security_groups": ("subnet-0a1b2c3d",)},
        field="VpcConfig.SecurityGroupIds[0]",
        value="'subnet-0a1b2c3d'",
        remedy="sagemaker.security_groups",
    ),
    Case(
        id="security-group-as-subnet",
        options={"subnets": ("sg-0a1b2c3d",), "security_groups": ("sg-0a1b2c3d",)},
        field="VpcConfig.Subnets[0]",
        value="'sg-0a1b2c3d'",
        remedy="sagemaker.subnets",
    ),
    Case(
        id="vpc-as-subnet",
        options={"subnets": ("vpc-0a1b2c3d",), "security_groups": ("sg-0a1b2c3d",)},
        field="VpcConfig.Subnets[0]",
        value="'vpc-0a1b2c3d'",
        remedy="sagemaker.subnets",
    ),
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
    Case(id="no-instance-type", job=on(""), field="ResourceConfig.InstanceType", remedy="job.resources.instance_type"),
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
        id="volume-of-an-ebs-instance",
        job=on("ml.p3.16xlarge", volume_gib=16385),
        field="ResourceConfig.VolumeSizeInGB",
        value="16385",
        remedy="job.resources.volume_gib",
    ),
    Case(
        id="volume-beyond-the-local-disks",
        job=on("ml.g5.xlarge", volume_gib=251),
        field="ResourceConfig.VolumeSizeInGB",
        value="251",
        remedy="250",
    ),
    Case(
        id="volume-key-on-local-disks",
        options={"volume_kms_key": KEY},
        field="ResourceConfig.VolumeKmsKeyId",
        value=KEY,
        remedy="sagemaker.volume_kms_key",
    ),
    Case(
        id="volume-key-on-trainium",
        options={"volume_kms_key": KEY},
        job=on("ml.trn1.32xlarge"),
        recipe={"run": {"engine": "neuron"}},
        field="ResourceConfig.VolumeKmsKeyId",
        value=KEY,
        remedy="sagemaker.volume_kms_key",
    ),
    Case(
        id="output-key-is-none",
        options={"output_kms_key": "my-key"},
        field="OutputDataConfig.KmsKeyId",
        value="'my-key'",
        remedy="alias/NAME",
    ),
    Case(
        id="output-key-of-another-region",
        options={"output_kms_key": f"arn:aws:kms:eu-west-1:{ACCOUNT}:key/{KEY}"},
        field="OutputDataConfig.KmsKeyId",
        value="eu-west-1",
        remedy="sagemaker.region",
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
        id="more-processes-than-gpus",
        job={"procs_per_node": 8, **on("ml.g5.xlarge")},
        field="job.procs_per_node",
        value="8",
        remedy="at most 1",
    ),
    Case(
        id="more-processes-than-cores",
        job={"procs_per_node": 32, **on("ml.trn1.2xlarge")},
        recipe={"run": {"engine": "neuron"}},
        field="job.procs_per_node",
        value="32",
        remedy="at most 2",
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
        id="longer-than-28-days",
        job={"time_limit_s": 2419201},
        field="StoppingCondition.MaxRuntimeInSeconds",
        value="2419201",
        remedy="job.time_limit",
    ),
    Case(
        id="longer-than-28-days-by-the-profile",
        options={"max_run_s": 2419201},
        field="StoppingCondition.MaxRuntimeInSeconds",
        value="2419201",
        remedy="sagemaker.max_run_s",
    ),
    Case(
        id="pending-too-short",
        options={"max_pending_s": 60},
        field="StoppingCondition.MaxPendingTimeInSeconds",
        value="60",
        remedy="sagemaker.max_pending_s",
    ),
    Case(
        id="wait-without-spot",
        options={"max_wait_s": 90000},
        field="StoppingCondition.MaxWaitTimeInSeconds",
        value="90000",
        remedy="sagemaker.use_spot_instances",
    ),
    Case(
        id="wait-shorter-than-the-run",
        options={"use_spot_instances": True, "max_wait_s": 10},
        field="StoppingCondition.MaxWaitTimeInSeconds",
        value="10",
        remedy="sagemaker.max_wait_s",
    ),
    Case(
        id="spot-without-checkpoints",
        options={"use_spot_instances": True, "checkpoint_s3_uri": ""},
        field="sagemaker.use_spot_instances",
        value="True",
        remedy="sagemaker.checkpoint_s3_uri",
    ),
    Case(
        id="spot-that-stays-warm",
        options={"use_spot_instances": True, "keep_alive_period_s": 60},
        field="ResourceConfig.KeepAlivePeriodInSeconds",
        value="60",
        remedy="sagemaker.keep_alive_period_s",
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
    *(
        Case(
            id=f"checkpoints-in-{path}",
            options={"checkpoint_local_path": path},
            field="CheckpointConfig.LocalPath",
            value=f"'{path}'",
            remedy="sagemaker.checkpoint_local_path",
        )
        for path in (
            "/opt/ml",
            "/opt/ml/model",
            "/opt/ml/model/checkpoints",
            "/opt/ml/input/data/train",
            "/opt/ml/output",
            "/opt/ml/output/data/checkpoints",
            "/opt/ml/code",
            "/opt/ml/checkpoints/../model",
            "/",
            "checkpoints",
        )
    ),
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
    Case(
        id="tag-of-aws",
        options={"tags": ("aws:project=lt",)},
        field="Tags[0].Key",
        value="'aws:project'",
        remedy="sagemaker.tags",
    ),
    Case(
        id="tag-of-aws-in-capitals",
        options={"tags": ("AWS:project=lt",)},
        field="Tags[0].Key",
        value="'AWS:project'",
        remedy="sagemaker.tags",
    ),
    Case(
        id="tag-value-of-aws",
        options={"tags": ("project=aws:lt",)},
        field="Tags[0].Value",
        value="'aws:lt'",
        remedy="sagemaker.tags",
    ),
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
    "another-region-all-over": {
        "region": "eu-west-1",
        "image": f"{ACCOUNT}.dkr.ecr.eu-west-1.amazonaws.com/team/lt:1",
        "output_kms_key": f"arn:aws:kms:eu-west-1:{ACCOUNT}:key/{KEY}",
    },
    "no-region-given": {"region": "", "image": f"{ACCOUNT}.dkr.ecr.eu-west-1.amazonaws.com/lt:1"},
    "china": {
        "region": "cn-north-1",
        "image": f"{ACCOUNT}.dkr.ecr.cn-north-1.amazonaws.com.cn/lt:1",
        "role": f"arn:aws-cn:iam::{ACCOUNT}:role/trainer",
    },
    "government": {
        "region": "us-gov-west-1",
        "image": f"{ACCOUNT}.dkr.ecr-fips.us-gov-west-1.amazonaws.com/lt:1",
        "role": f"arn:aws-us-gov:iam::{ACCOUNT}:role/trainer",
    },
    "digest": {"image": f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/a/b_c/lt@sha256:{'0' * 64}"},
    "tag-and-digest": {"image": f"{IMAGE}@sha256:{'0' * 64}"},
    "two-stack-registry": {"image": f"{ACCOUNT}.dkr-ecr.us-east-1.on.aws/lt:1"},
    "algorithm-by-name": {"image": "", "algorithm": "litespark"},
    "algorithm-by-arn": {"image": "", "algorithm": ALGORITHM},
    "bucket-with-dots": {"output_path": "s3://my.bucket.2026/out/"},
    "bucket-alone": {"output_path": "s3://bucket"},
    "access-point": {"output_path": f"s3://arn:aws:s3:us-east-1:{ACCOUNT}:accesspoint/mine/out"},
    "access-point-alias": {"output_path": "s3://mine-abcdefghijklmnopqrstuvwxyz123456-s3alias/out"},
    "express-bucket": {"output_path": "s3://mine--use1-az4--x-s3/out"},
    "key-alias": {"output_kms_key": "alias/mine"},
    "multi-region-key": {"output_kms_key": "mrk-1234abcd12ab34cd56ef1234567890ab"},
    "checkpoints-elsewhere": {"checkpoint_local_path": "/tmp/checkpoints"},
    "checkpoints-beside": {"checkpoint_local_path": "/opt/ml/model-checkpoints"},
    "tag-with-aws-inside": {"tags": ("my-aws:project=lt", "awsome=1")},
    "fast-file-beside-a-file-system": {**RUN, "input_mode": "FastFile"},
    "spot-with-a-run-channel": {**RUN, "use_spot_instances": True, "checkpoint_s3_uri": ""},
    "efs-root": {"channels": (f"train=efs://{FSX}",), **VPC},
    "28-days": {"max_run_s": 2419200},
}


@pytest.mark.parametrize("name", GOOD)
def test_what_the_service_takes_is_accepted(name: str) -> None:
    make(GOOD[name])


@pytest.mark.parametrize(
    ("job", "recipe", "options"),
    [
        (on("ml.g5.xlarge", volume_gib=250), {}, {}),
        (on("ml.p3.16xlarge", volume_gib=16384), {}, {"volume_kms_key": KEY}),
        ({"procs_per_node": 128, **on("ml.trn2.48xlarge")}, {"run": {"engine": "neuron"}}, {}),
        ({"procs_per_node": 8}, {}, {}),
        ({"nodes": 2}, {}, RUN),
        ({}, {"fault_tolerance": {"grace_period_s": 100.0}}, {}),
        (on("ml.m5.xlarge"), {}, {}),
    ],
)
def test_a_job_at_its_limits_is_accepted(job: dict[str, Any], recipe: dict[str, Any], options: dict[str, Any]) -> None:
    make(options, job, recipe)


METRIC = ("AlgorithmSpecification", "MetricDefinitions", 0)
REQUESTS = {
    "metric-regex-is-none": ((*METRIC, "Regex"), "loss=([0-9]+", "AlgorithmSpecification.MetricDefinitions[0].Regex"),
    "metric-regex-without-group": ((*METRIC, "Regex"), "loss=[0-9]+", "MetricDefinitions[0].Regex"),
    "metric-name-twice": ((*METRIC, "Name"), "loss", "MetricDefinitions"),
    "tag-twice": (("Tags",), [{"Key": "a", "Value": "1"}, {"Key": "a", "Value": "2"}], "Tags[1].Key"),
    "fast-file-of-a-file-system": (("InputDataConfig", 1, "InputMode"), "FastFile", "InputDataConfig[1].InputMode"),
    "fast-file-of-all-channels": (
        ("AlgorithmSpecification", "TrainingInputMode"),
        "FastFile",
        "InputDataConfig[1].InputMode",
    ),
    "relative-folder-of-a-file-system": (
        ("InputDataConfig", 1, "DataSource", "FileSystemDataSource", "DirectoryPath"),
        "abcdefgh/run",
        "DirectoryPath",
    ),
    "no-instances": (("ResourceConfig", "InstanceCount"), 0, "ResourceConfig.InstanceCount"),
    "no-disk": (("ResourceConfig", "VolumeSizeInGB"), 0, "ResourceConfig.VolumeSizeInGB"),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_bad_request_is_refused_with_field_and_value(name: str) -> None:
    path, value, named = REQUESTS[name]
    request: Any = copy.deepcopy(make(RUN))
    del request["InputDataConfig"][1]["InputMode"]
    check_request("CreateTrainingJobRequest", request)
    inner = request
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    with pytest.raises(SageMakerError) as caught:
        check_request("CreateTrainingJobRequest", request)
    assert named in str(caught.value)
    assert str(value if not isinstance(value, list) else "'a'") in str(caught.value)


@pytest.mark.parametrize("image", ["pytorch/pytorch:2.9", f"{IMAGE} latest"])
def test_the_image_of_a_published_algorithm_is_in_ecr(image: str) -> None:
    with pytest.raises(SageMakerError, match=r"TrainingSpecification\.TrainingImage: .*--image"):
        create_algorithm_request(name="litespark", image=image)


def test_an_algorithm_brings_its_own_command() -> None:
    request = make({"algorithm": ALGORITHM, "image": ""})
    request["AlgorithmSpecification"]["ContainerEntrypoint"] = ["train"]
    with pytest.raises(SageMakerError, match=r"AlgorithmSpecification\.ContainerEntrypoint: must be left out"):
        check_request("CreateTrainingJobRequest", request)


def test_metrics_of_a_published_algorithm_have_a_group() -> None:
    request = create_algorithm_request(name="litespark", image=IMAGE)
    check_request("CreateAlgorithmInput", request)
    request["TrainingSpecification"]["MetricDefinitions"][0]["Regex"] = "loss=[0-9]+"
    with pytest.raises(SageMakerError, match=r"TrainingSpecification\.MetricDefinitions\[0\]\.Regex: .* has no group"):
        check_request("CreateAlgorithmInput", request)


def test_the_list_is_long_and_every_case_is_its_own() -> None:
    assert len({case.id for case in JOBS}) == len(JOBS)
    assert len(JOBS) + len(REQUESTS) >= 75


def test_a_small_volume_for_copied_channels_is_told() -> None:
    notes = request_notes(make({}, on("ml.m5.xlarge")))
    assert len(notes) == 1
    assert "ml.m5.xlarge has no local disks" in notes[0]
    assert "job.resources.volume_gib" in notes[0]
    assert request_notes(make({}, on("ml.m5.xlarge", volume_gib=100))) == ()
    assert request_notes(make({"input_mode": "FastFile"}, on("ml.m5.xlarge"))) == ()
    assert request_notes(make({}, on("ml.p5.48xlarge"))) == ()
