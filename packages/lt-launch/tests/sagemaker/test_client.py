"""The client against moto: create, describe, logs and S3; what becomes of a description."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lt_launch.errors import LaunchError
from lt_launch.sagemaker.client import LOG_GROUP, SageMakerClient
from lt_launch.sagemaker.options import SageMakerOptions
from lt_launch.sagemaker.target import SageMakerTarget, to_stage_status
from lt_launch.status import status_rows
from lt_launch.target import Launch
from lt_test_helpers.s3_server import run_s3_server


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a moto server."""
    with run_s3_server(tmp_path_factory.mktemp("moto")) as bucket:
        yield bucket.client.meta.endpoint_url


def found_by_doctor(made: Launch) -> dict[str, tuple[str, str]]:
    found = SageMakerTarget().doctor(made.profile, made.pipeline)
    return {one.check: (one.level, one.detail) for one in found}


def test_a_job_is_created_described_read_and_its_buckets_are_tried(moto: str, submit: Callable[..., Launch]) -> None:
    made, target = submit(moto), SageMakerTarget()
    name, client = made.job_ids["train"], SageMakerClient(SageMakerOptions(region="us-east-1", endpoint_url=moto))
    assert name.startswith("train-20")
    found = client.call("sagemaker", "describe_training_job", TrainingJobName=name)
    sent = json.loads((made.directory / "rendered" / "request.json").read_bytes())
    for field in ("HyperParameters", "InputDataConfig", "CheckpointConfig", "EnableNetworkIsolation", "RoleArn"):
        assert found[field] == sent[field]
    assert found["HyperParameters"]["MAX_STEPS"] == "1000"
    (status,) = target.status(made)
    assert (status.state, status.job_id, status.exit_code) == ("completed", name, 0)
    assert list(target.logs(made, stage="", rank=0, follow=False)) == [], "no log group is no error"

    logs = client.boto3("logs")
    logs.create_log_group(logGroupName=LOG_GROUP)

    def write(host: str, texts: list[str], at: int = 0) -> None:
        now = int(time.time() * 1000) + at
        events = [{"timestamp": now + i, "message": text} for i, text in enumerate(texts)]
        logs.put_log_events(logGroupName=LOG_GROUP, logStreamName=f"{name}/{host}-17", logEvents=events)

    for host in ("algo-1", "algo-10"):
        logs.create_log_stream(logGroupName=LOG_GROUP, logStreamName=f"{name}/{host}-17")
        write(host, [f"{host} line {i}" for i in range(120)])
    assert list(target.logs(made, stage="", rank=0, follow=True)) == [f"algo-1 line {i}" for i in range(120)]
    write("algo-1", ["step=30 loss=2.5 tokens_per_sec=100.5 mfu=0.25", "step=30 val_loss=3", "# a note"], 500)
    (row,) = status_rows(made.directory.parent)
    shown = row["progress"]
    assert (shown.step, shown.max_steps, shown.loss, shown.tokens_per_sec, shown.mfu) == (30, 1000, 2.5, 100.5, 0.25)

    before = found_by_doctor(made)
    assert (before["channel train"][0], before["output"][0]) == ("error", "error")
    assert "NoSuchBucket" in before["channel train"][1]
    assert "PutObject" in before["output"][1]
    s3 = client.boto3("s3")
    s3.create_bucket(Bucket="data")
    assert found_by_doctor(made)["channel train"] == ("error", "no object there")
    s3.put_object(Bucket="data", Key="store/manifest.json", Body=b"{}")
    assert {level for level, _ in found_by_doctor(made).values()} == {"ok"}
    assert s3.list_objects_v2(Bucket="data")["KeyCount"] == 1, "what was tried is gone again"


def test_a_service_that_cannot_be_reached_is_one_sentence(submit: Callable[..., Launch]) -> None:
    with pytest.raises(LaunchError, match=r"create_training_job: .*127\.0\.0\.1:9"):
        submit("http://127.0.0.1:9")


def test_a_description_is_a_status() -> None:
    found: dict[str, Any] = {
        "TrainingJobName": "a-job",
        "TrainingJobStatus": "InProgress",
        "SecondaryStatus": "Training",
        "SecondaryStatusTransitions": [{"Status": "Training", "StartTime": 5.0, "StatusMessage": "in progress"}],
        "ResourceConfig": {"InstanceCount": 2},
    }
    status = to_stage_status("x", found)
    assert (status.state, status.job_id, status.nodes, status.since) == ("running", "a-job", ("algo-1", "algo-2"), 5.0)
    assert status.reason == "Training, in progress"
    for secondary, state in (("Restarting", "requeued"), ("Pending", "pending"), ("MaxRuntimeExceeded", "requeued")):
        assert to_stage_status("x", {**found, "SecondaryStatus": secondary}).state == state
