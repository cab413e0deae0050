"""Requests: golden, the same recipe on both sides, and what cannot work refused before anything is sent."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_launch.job import Job, Pipeline, Resources
from lt_launch.profile import Profile
from lt_launch.sagemaker.errors import SageMakerError
from lt_launch.sagemaker.options import SageMakerOptions
from lt_launch.sagemaker.recipe_rules import OVERRIDE_PREFIX
from lt_launch.sagemaker.request import create_training_job_request
from lt_launch.sagemaker.target import REQUEST_FILE, SageMakerTarget
from lt_trainer.config.recipe import load, to_toml
from lt_trainer.errors import RecipeError

BASE: dict[str, Any] = {"data": {"store": "store"}}
OPTIONS: dict[str, Any] = {
    "role": "arn:aws:iam::123456789012:role/trainer",
    "image": "123456789012.dkr.ecr.us-east-1.amazonaws.com/lt:1",
    "channels": ("train=s3://bucket/store",),
    "output_path": "s3://bucket/out",
}


def job(base: dict[str, Any] | None = None, **changes: Any) -> Job:
    recipe = load(base={**BASE, **(base or {})}).recipe
    values = {
        "name": "a-job",
        "argv": ("python", "-P", "-m", "lt_trainer", "run", "run.toml"),
        "recipe": to_toml(recipe),
        "resources": Resources(instance_type="ml.p5.48xlarge"),
    }
    return Job(**{**values, **changes})


def made(base: dict[str, Any] | None = None, options: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return create_training_job_request(job(base, **changes), SageMakerOptions(**{**OPTIONS, **(options or {})}))


def test_the_default_job_says_only_what_differs() -> None:
    found = made()
    assert found["HyperParameters"] == {"NUM_NODES": "1"}
    assert "Environment" not in found, found["Environment"]
    assert found["ResourceConfig"] == {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 1, "VolumeSizeInGB": 1}
    assert found["EnableNetworkIsolation"] is True
    assert [definition["Name"] for definition in found["AlgorithmSpecification"]["MetricDefinitions"]] == [
        "batches_per_sec",
        "flops_per_sec",
        "loss",
        "samples_per_sec",
        "mfu",
        "tokens_per_sec",
    ]


def test_hyperparameters_are_strings_and_the_rest_of_the_recipe_are_variables() -> None:
    base = {"optimizer": {"lr": 5e-4}, "model": {"preset": "llama3.2-1b"}, "schedule": {"max_steps": 770}}
    found = made(base)
    assert found["Environment"].pop("LT_SET_00") == "model.max_position_embeddings=131072"
    assert found["Environment"]["LT_SET_01"] == "model.rope_theta=500000.0"
    assert found["HyperParameters"] == {
        "HIDDEN_SIZE": "2048",
        "INTERMEDIATE_SIZE": "8192",
        "N_HEADS": "32",
        "N_KV_HEADS": "8",
        "N_LAYERS": "16",
        "LEARNING_RATE": "0.0005",
        "MAX_STEPS": "770",
        "NUM_NODES": "1",
    }


@settings(max_examples=25, deadline=None)
@given(
    lr=st.floats(1e-6, 1e-2),
    steps=st.integers(500, 10**6),
    tie=st.booleans(),
    packing=st.sampled_from(["bfd", "concat"]),
    eps=st.floats(1e-12, 1e-3),
    theta=st.floats(1.0, 1e7),
)
def test_the_container_reads_the_recipe_that_was_sent(
    lr: float, steps: int, tie: bool, packing: str, eps: float, theta: float
) -> None:
    base = {
        "optimizer": {"lr": lr, "eps": eps},
        "schedule": {"max_steps": steps, "min_lr": 0.0},
        "model": {"tie_word_embeddings": tie, "rope_theta": theta},
        "data": {"store": "store", "packing": packing},
        "engine": {"gpu": {"device": "cpu"}},
    }
    found = made(base)
    sets = [value for name, value in sorted(found.get("Environment", {}).items()) if name.startswith(OVERRIDE_PREFIX)]
    there = load(hyperparameters=found["HyperParameters"], overrides=sets, base=BASE).recipe
    assert there == load(base={**BASE, **base}).recipe


def test_file_systems_vpc_checkpoints_and_all_the_rest() -> None:
    found = made(
        options={
            "channels": (
                "train=fsx://fs-0123456789abcdef0/fsx/store",
                "tokenizer=s3://bucket/tokenizer",
                "run=efs://fs-0123456789abcdef1/run?rw",
            ),
            "subnets": ("subnet-1",),
            "security_groups": ("sg-1",),
            "checkpoint_s3_uri": "s3://bucket/checkpoints",
            "output_kms_key": "alias/out",
            "volume_kms_key": "alias/disk",
            "keep_alive_period_s": 1800,
            "compress_output": False,
            "max_retry_attempts": 2,
            "tags": ("project=lt",),
            "max_pending_s": 7200,
        },
        nodes=2,
        time_limit_s=3600,
        resources=Resources(instance_type="ml.p3.16xlarge"),
    )
    train, tokenizer, run = found["InputDataConfig"]
    assert train["DataSource"] == {
        "FileSystemDataSource": {
            "FileSystemId": "fs-0123456789abcdef0",
            "FileSystemAccessMode": "ro",
            "FileSystemType": "FSxLustre",
            "DirectoryPath": "/fsx/store",
        }
    }
    assert tokenizer["DataSource"]["S3DataSource"]["S3DataDistributionType"] == "FullyReplicated"
    assert run["DataSource"]["FileSystemDataSource"]["FileSystemAccessMode"] == "rw"
    assert run["DataSource"]["FileSystemDataSource"]["FileSystemType"] == "EFS"
    assert found["HyperParameters"]["NUM_NODES"] == "2"
    assert found["ResourceConfig"]["InstanceCount"] == 2
    assert found["ResourceConfig"]["KeepAlivePeriodInSeconds"] == 1800
    assert found["ResourceConfig"]["VolumeKmsKeyId"] == "alias/disk"
    assert found["OutputDataConfig"] == {
        "S3OutputPath": "s3://bucket/out",
        "KmsKeyId": "alias/out",
        "CompressionType": "NONE",
    }
    assert found["VpcConfig"] == {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}
    assert found["CheckpointConfig"] == {"S3Uri": "s3://bucket/checkpoints", "LocalPath": "/opt/ml/checkpoints"}
    assert found["StoppingCondition"] == {"MaxRuntimeInSeconds": 3600, "MaxPendingTimeInSeconds": 7200}
    assert found["RetryStrategy"] == {"MaximumRetryAttempts": 2}
    assert found["Tags"] == [{"Key": "project", "Value": "lt"}]


def test_spot_waits_twice_as_long_as_it_runs() -> None:
    found = made(
        options={"use_spot_instances": True, "checkpoint_s3_uri": "s3://bucket/checkpoints"}, time_limit_s=1000
    )
    assert found["EnableManagedSpotTraining"] is True
    assert found["StoppingCondition"] == {"MaxRuntimeInSeconds": 1000, "MaxWaitTimeInSeconds": 2000}


def test_an_algorithm_brings_its_own_metrics() -> None:
    arn = "arn:aws:sagemaker:us-east-1:123456789012:algorithm/litespark"
    found = made(options={"image": "", "algorithm": arn})
    assert found["AlgorithmSpecification"] == {
        "AlgorithmName": arn,
        "TrainingInputMode": "File",
        "EnableSageMakerMetricsTimeSeries": True,
    }


def test_the_store_in_the_recipe_may_be_the_channel() -> None:
    found = made({"data": {"store": "s3://bucket/other"}}, {"channels": ()})
    assert found["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"] == "s3://bucket/other"


@pytest.mark.parametrize(
    ("options", "changes", "words"),
    [
        ({"role": ""}, {}, "sagemaker.role is not set"),
        ({"image": ""}, {}, "sagemaker.image or sagemaker.algorithm is not set"),
        ({"output_path": ""}, {}, "sagemaker.output_path is not set"),
        ({"channels": ()}, {}, 'no channel "train"'),
        ({"channels": ("train=fsx://fs-0123456789abcdef0/x?write",)}, {}, "ro or rw"),
        ({}, {"nodes": 2}, "2 instances need one folder"),
        ({}, {"name": "a.job"}, "TrainingJobName"),
        ({}, {"resources": Resources(instance_type="ml.p9.48xlarge")}, "ResourceConfig.InstanceType"),
        ({}, {"resources": Resources()}, "job.resources.instance_type is not set"),
        ({"keep_alive_period_s": 21601}, {}, "at most 21600, got 21601"),
        ({}, {"env": {"LONG": "x" * 513}}, "Environment.LONG: must be at most 512 characters, it has 513"),
        ({}, {"recipe": ""}, "only a training job"),
    ],
)
def test_what_cannot_be_sent_is_refused(options: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SageMakerError, match=words.replace(".", r"\.")):
        made(options=options, **changes)


def test_contradictions_of_recipe_and_job_are_refused() -> None:
    with pytest.raises(SageMakerError, match=r"NUM_NODES\) = 3 and the job has 1 instances"):
        made({"parallel": {"n_nodes": 3}})
    with pytest.raises(SageMakerError, match=r"checkpoint\.mirror_url = 's3://bucket/m' cannot be reached"):
        made({"checkpoint": {"mirror_url": "s3://bucket/m"}})
    assert made({"checkpoint": {"mirror_url": "s3://bucket/m"}}, {"network_isolation": False})["Environment"] == {
        "LT_SET_00": "checkpoint.mirror_url=s3://bucket/m"
    }
    with pytest.raises(SageMakerError, match="needs a channel"):
        made({"data": {"store": "store", "validation": "val"}, "metrics": {"validation_interval": 5}})
    with pytest.raises(RecipeError, match="either an image or an algorithm"):
        SageMakerOptions(**{**OPTIONS, "algorithm": "x"})
    with pytest.raises(RecipeError, match="twice"):
        SageMakerOptions(**{**OPTIONS, "channels": ("train=s3://a/b", "train=s3://a/c")})


def test_golden(golden: Any) -> None:
    recipe = load(
        base={
            **BASE,
            "data": {"store": "store", "seq_len": 2048},
            "model": {"preset": "llama-160m"},
            "optimizer": {"eps": 1e-9},
        }
    ).recipe
    golden("request.json", json.dumps(made(None, recipe=to_toml(recipe)), indent=1) + "\n")


def test_variables_of_the_profile_travel_and_those_by_name_are_refused() -> None:
    table = {f"sagemaker.{name}": value for name, value in OPTIONS.items()}
    profile = Profile().with_values({**table, "env.A": "profile", "env.B": "profile"}, "test")
    target = SageMakerTarget()
    text = target.render(Pipeline.from_job(job(env={"B": "job"})), profile).files[REQUEST_FILE]
    assert json.loads(text)["Environment"] == {"A": "profile", "B": "job"}
    with pytest.raises(RecipeError, match=r"job.pass_env = \['HF_TOKEN'\]: SageMaker passes no variables"):
        target.render(Pipeline.from_job(job(pass_env=("HF_TOKEN",))), profile)
    assert target.render(Pipeline.from_job(job()), profile).notes == ()
    told = target.render(Pipeline.from_job(job()), profile.with_values({"setup": ["module load x"]}, "test")).notes
    assert told == ("setup of the profile is not run in containers; put it into the image",)


def test_the_same_job_is_the_same_request(tmp_path: Path) -> None:
    assert json.dumps(made()) == json.dumps(made())
