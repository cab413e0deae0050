"""Requests: golden, the same recipe on both sides, and what cannot work refused before anything is sent."""

import json
from typing import Any

import pytest

from lt_launch.errors import LaunchError
from lt_launch.job import Job, Pipeline, Resources
from lt_launch.profile import Profile
from lt_launch.sagemaker.options import SageMakerOptions
from lt_launch.sagemaker.request import OVERRIDE_PREFIX, create_training_job_request
from lt_launch.sagemaker.target import REQUEST_FILE, SageMakerTarget
from lt_trainer.config.recipe import load, to_toml
from lt_trainer.errors import RecipeError

ACCOUNT = "123456789012"
IMAGE = f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/lt:1"
ALGORITHM = f"arn:aws:sagemaker:us-east-1:{ACCOUNT}:algorithm/litespark"
FSX = "fs-0123456789abcdef0"
TRAIN = "train=s3://bucket/store"
VPC: dict[str, Any] = {"subnets": ("subnet-1",), "security_groups": ("sg-1",)}
RUN: dict[str, Any] = {"channels": (TRAIN, f"run=fsx://{FSX}/abcdefgh/run?rw"), **VPC}
BASE: dict[str, Any] = {"data": {"store": "store"}}
OPTIONS: dict[str, Any] = {
    "role": f"arn:aws:iam::{ACCOUNT}:role/trainer",
    "image": IMAGE,
    "channels": (TRAIN,),
    "output_path": "s3://bucket/out",
}


def make_job(base: dict[str, Any] | None = None, **changes: Any) -> Job:
    values = {
        "name": "a-job",
        "argv": ("python", "-P", "-m", "lt_trainer", "run", "run.toml"),
        "recipe": to_toml(load(base={**BASE, **(base or {})}).recipe),
        "resources": Resources(instance_type="ml.p5.48xlarge"),
    }
    return Job(**{**values, **changes})


def make(
    options: dict[str, Any] | None = None, job: dict[str, Any] | None = None, recipe: dict[str, Any] | None = None
) -> dict[str, Any]:
    return create_training_job_request(
        make_job(recipe, **(job or {})), SageMakerOptions(**{**OPTIONS, **(options or {})})
    )


def on(instance_type: str) -> dict[str, Any]:
    return {"resources": Resources(instance_type=instance_type)}


@pytest.mark.parametrize(("small", "large"), [(1e-12, 1e7), (3.3e-5, 1.0), (0.1 + 0.2, 123456.789)])
def test_the_container_reads_the_recipe_that_was_sent(small: float, large: float) -> None:
    recipe = {
        "optimizer": {"lr": small, "eps": small},
        "schedule": {"max_steps": 10**6, "min_lr": 0.0},
        "model": {"tie_word_embeddings": True, "rope_theta": large},
        "data": {"store": "store", "packing": "concat"},
        "engine": {"gpu": {"device": "cpu"}},
    }
    found = make(recipe=recipe)
    sets = [value for name, value in sorted(found["Environment"].items()) if name.startswith(OVERRIDE_PREFIX)]
    there = load(hyperparameters=found["HyperParameters"], overrides=sets, base=BASE).recipe
    assert there == load(base={**BASE, **recipe}).recipe


EVERYTHING = {
    "channels": (
        "train=fsx://fs-0123456789abcdef0/fsx/store",
        "tokenizer=s3://bucket/tokenizer",
        "run=efs://fs-0123456789abcdef1/run?rw",
    ),
    **VPC,
    "checkpoint_s3_uri": "s3://bucket/checkpoints",
    "keep_alive_period_s": 1800,
    "use_spot_instances": True,
    "request": {
        "OutputDataConfig": {"KmsKeyId": "alias/out", "CompressionType": "NONE"},
        "RetryStrategy": {"MaximumRetryAttempts": 2},
        "Tags": [{"Key": "project", "Value": "lt"}],
    },
}


@pytest.mark.parametrize(
    ("name", "options", "job", "recipe"),
    [
        ("everything.json", EVERYTHING, {"nodes": 2, "time_limit_s": 3600, **on("ml.p3.16xlarge")}, {}),
        (
            "request.json",
            {},
            {},
            {
                "data": {"store": "store", "seq_len": 2048},
                "model": {"preset": "llama3.2-1b"},
                "optimizer": {"lr": 5e-4, "eps": 1e-9},
            },
        ),
    ],
)
def test_requests_are_as_they_were(
    golden: Any, name: str, options: dict[str, Any], job: dict[str, Any], recipe: dict[str, Any]
) -> None:
    golden(name, json.dumps(make(options, job, recipe), indent=1) + "\n")


def test_the_store_in_the_recipe_may_be_the_channel() -> None:
    found = make({"channels": ()}, recipe={"data": {"store": "s3://bucket/other"}})
    assert found["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"] == "s3://bucket/other"


def test_variables_of_the_profile_travel_and_those_by_name_are_refused() -> None:
    table = {f"sagemaker.{name}": value for name, value in OPTIONS.items()}
    table["sagemaker.request.RetryStrategy.MaximumRetryAttempts"] = 2
    profile = Profile().with_values(
        {**table, "env.A": "profile", "env.B": "profile", "setup": ["module load x"]}, "test"
    )
    rendered = SageMakerTarget().render(Pipeline.from_job(make_job(env={"B": "job"})), profile)
    request = json.loads(rendered.files[REQUEST_FILE])
    assert request["Environment"] == {"A": "profile", "B": "job"}
    assert request["RetryStrategy"] == {"MaximumRetryAttempts": 2}
    assert rendered.notes == ("setup of the profile is not run in containers; put it into the image",)
    with pytest.raises(RecipeError, match=r'job.pass_env = \["HF_TOKEN"\]: SageMaker passes no variables'):
        SageMakerTarget().render(Pipeline.from_job(make_job(pass_env=("HF_TOKEN",))), profile)


def channel(source: str, **more: Any) -> dict[str, Any]:
    return {"channels": (f"train={source}",), **more}


S3_RUN = {"channels": (TRAIN, "run=s3://bucket/run")}
READ_ONLY_RUN = {**RUN, "channels": (TRAIN, f"run=fsx://{FSX}/abcdefgh/run")}
VALIDATED = {"data": {"store": "store", "validation": "val"}, "metrics": {"validation_interval": 5}}
MIRROR = {"checkpoint": {"mirror_url": "s3://bucket/m"}}


@pytest.mark.parametrize(
    ("options", "job", "recipe", "words"),  # of the refusal, parted by |
    [
        ({"role": ""}, {}, {}, "sagemaker.role|the ARN of a role"),
        ({"role": "a" * 20}, {}, {}, "RoleArn|'aaaa|sagemaker.role"),
        ({"image": ""}, {}, {}, "sagemaker.image|an image in ECR"),
        ({"algorithm": ALGORITHM}, {}, {}, f"sagemaker.algorithm|{ALGORITHM}|leave one of them out"),
        ({"image": "", "algorithm": "lite spark"}, {}, {}, "AlgorithmSpecification.AlgorithmName|'lite spark'"),
        ({"channels": ()}, {}, {}, "sagemaker.channels|train=s3://BUCKET/FOLDER"),
        (channel("/data/store"), {}, {}, "train|/data/store|lt data upload"),
        (channel("gs://bucket/store"), {}, {}, "train|gs://bucket/store|s3://BUCKET/FOLDER"),
        (channel("s3://bucket/store?rw"), {}, {}, "train|s3://bucket/store?rw|fsx://"),
        (channel(f"fsx://{FSX}/abcdefgh/store?write"), {}, {}, "sagemaker.channels|?write|?rw"),
        ({"channels": (TRAIN, TRAIN)}, {}, {}, "sagemaker.channels|train|each name once"),
        ({"channels": (TRAIN, "my data=s3://bucket/b")}, {}, {}, "InputDataConfig[1].ChannelName|'my data'|.channels"),
        (channel("fsx://my-fs/abcdefgh/store", **VPC), {}, {}, "FileSystemDataSource.FileSystemId|sagemaker.channels"),
        ({"subnets": VPC["subnets"]}, {}, {}, "VpcConfig.SecurityGroupIds|sagemaker.security_groups"),
        ({"use_spot_instances": True}, {}, {}, "sagemaker.use_spot_instances|sagemaker.checkpoint_s3_uri"),
        (READ_ONLY_RUN, {}, {}, "channel run|'ro'|?rw"),
        ({"request": {"Tags": [{"Key": "a#", "Value": "1"}]}}, {}, {}, "Tags[0].Key|'a#'|sagemaker.request"),
        ({"request": {"Wrong": 1}}, {}, {}, "Wrong"),
        ({}, {"name": "a_job"}, {}, "TrainingJobName|'a_job'|job.name"),
        ({}, {"recipe": ""}, {}, "job a-job|--stage"),
        ({}, on("ml.p9.48xlarge"), {}, "ResourceConfig.InstanceType|'ml.p9.48xlarge'|job.resources.instance_type"),
        ({}, on("ml.trn1.32xlarge"), {}, "run.engine|'gpu'|neuron"),
        ({}, {}, {"run": {"engine": "neuron"}}, "run.engine|'neuron'|gpu"),
        ({}, {"nodes": 2}, {}, "2 instances|run=fsx://FILE_SYSTEM_ID/FOLDER?rw"),
        (S3_RUN, {"nodes": 2}, {}, "channel run|s3://bucket/run|?rw"),
        (RUN, {"nodes": 2}, {"parallel": {"n_nodes": 3}}, "parallel.n_nodes|3|leave one of them out"),
        ({}, {"env": {"LONG": "x" * 513}}, {}, "Environment.LONG|513|job.env"),
        ({}, {}, VALIDATED, "data.validation|'val'|validation=s3://BUCKET/FOLDER"),
        ({}, {}, {"fault_tolerance": {"grace_period_s": 300.0}}, "fault_tolerance.grace_period_s|300|at most 115"),
        ({}, {}, MIRROR, "checkpoint.mirror_url|'s3://bucket/m'|network_isolation"),
    ],
)
def test_a_bad_job_is_refused_with_field_value_and_remedy(
    options: dict[str, Any], job: dict[str, Any], recipe: dict[str, Any], words: str
) -> None:
    with pytest.raises((LaunchError, RecipeError)) as caught:
        make(options, job, recipe)
    assert [word for word in words.split("|") if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("options", "job", "recipe"),
    [
        ({"role": f"arn:aws-cn:iam::{ACCOUNT}:role/trainer"}, {}, {}),
        ({"image": "", "algorithm": ALGORITHM}, {}, {}),
        ({"output_path": f"s3://arn:aws:s3:us-east-1:{ACCOUNT}:accesspoint/mine/out"}, {}, {}),
        ({**RUN, "input_mode": "FastFile", "use_spot_instances": True}, {"nodes": 2}, {}),
        ({"channels": (f"train=efs://{FSX}",), **VPC}, {}, {}),
        ({}, {"procs_per_node": 128, **on("ml.trn2.48xlarge")}, {"run": {"engine": "neuron"}}),
        ({"network_isolation": False}, {}, MIRROR),
        ({}, {}, {"fault_tolerance": {"grace_period_s": 100.0}}),
    ],
)
def test_what_the_service_takes_is_accepted(
    options: dict[str, Any], job: dict[str, Any], recipe: dict[str, Any]
) -> None:
    make(options, job, recipe)
