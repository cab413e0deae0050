"""Requests: golden, the same recipe on both sides, and what cannot work refused before anything is sent."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_launch.job import Job, Pipeline, Resources
from lt_launch.profile import Profile
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


def test_file_systems_vpc_checkpoints_and_all_the_rest(golden: Any) -> None:
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
    golden("everything.json", json.dumps(found, indent=1) + "\n")


def test_spot_waits_twice_as_long_as_it_runs() -> None:
    found = made(
        options={"use_spot_instances": True, "checkpoint_s3_uri": "s3://bucket/checkpoints"}, time_limit_s=1000
    )
    assert found["EnableManagedSpotTraining"] is True
    assert found["StoppingCondition"] == {"MaxRuntimeInSeconds": 1000, "MaxWaitTimeInSeconds": 2000}


def test_the_store_in_the_recipe_may_be_the_channel() -> None:
    found = made({"data": {"store": "s3://bucket/other"}}, {"channels": ()})
    assert found["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"] == "s3://bucket/other"


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
