"""The client against moto: create, describe, logs and S3; what becomes of a description."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lt_launch.errors import LaunchError
from lt_launch.launch_dir import load_launch
from lt_launch.launcher import launch
from lt_launch.profile import Profile
from lt_launch.run_file import RunOverrides, read_run_file
from lt_launch.sagemaker.client import LOG_GROUP, SageMakerClient
from lt_launch.sagemaker.doctor import sagemaker_findings
from lt_launch.sagemaker.options import SageMakerOptions
from lt_launch.sagemaker.target import SageMakerTarget, to_stage_status
from lt_launch.status import status_rows
from lt_launch.target import Launch
from lt_test_helpers.s3_server import run_s3_server

JOB = """
[job]
name = "train"
recipe = "recipe.toml"
resources = {{ instance_type = "ml.p5.48xlarge" }}
[profile.sagemaker]
region = "us-east-1"
endpoint_url = "{endpoint}"
role = "arn:aws:iam::123456789012:role/trainer"
image = "123456789012.dkr.ecr.us-east-1.amazonaws.com/lt:1"
channels = ["train=s3://data/store"]
output_path = "s3://data/out"
checkpoint_s3_uri = "s3://data/checkpoints"
"""
RECIPE = '[data]\nstore = "store"\n[schedule]\nmax_steps = 1000\n'


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a moto server."""
    with run_s3_server(tmp_path_factory.mktemp("moto")) as bucket:
        yield bucket.client.meta.endpoint_url


@pytest.fixture
def submit(tmp_path: Path, credentials: None) -> Callable[[str], Launch]:
    def go(endpoint: str) -> Launch:
        (tmp_path / "recipe.toml").write_text(RECIPE)
        (tmp_path / "job.toml").write_text(JOB.format(endpoint=endpoint))
        file = read_run_file("job.toml", Profile(), RunOverrides())
        assert launch(file.pipeline, file.profile, "sagemaker") == 0
        return load_launch(file.pipeline.out)

    return go


def aws(endpoint: str) -> SageMakerClient:
    return SageMakerClient(SageMakerOptions(region="us-east-1", endpoint_url=endpoint))


def test_a_job_is_created_described_and_read(moto: str, submit: Callable[[str], Launch]) -> None:
    made = submit(moto)
    name = made.job_ids["train"]
    assert name.startswith("train-20")
    client = aws(moto)
    found = client.describe_training_job(name)
    sent = json.loads((made.directory / "rendered" / "request.json").read_bytes())
    for field in ("HyperParameters", "InputDataConfig", "CheckpointConfig", "EnableNetworkIsolation", "RoleArn"):
        assert found[field] == sent[field]
    assert found["HyperParameters"] == {"MAX_STEPS": "1000", "NUM_NODES": "1"}
    (status,) = SageMakerTarget().status(made)
    assert (status.state, status.job_id, status.exit_code) == ("completed", name, 0)
    assert name in [one.job_id for one in SageMakerTarget().list(made.profile)]
    assert list(SageMakerTarget().logs(made, stage="", rank=0, follow=False)) == [], "no log group is no error"
    logs = client._client("logs")
    logs.create_log_group(logGroupName=LOG_GROUP)
    assert list(SageMakerTarget().logs(made, stage="", rank=0, follow=False)) == []
    for host in ("algo-1", "algo-10"):
        logs.create_log_stream(logGroupName=LOG_GROUP, logStreamName=f"{name}/{host}-1700000000")
        events = [{"timestamp": int(time.time() * 1000) + i, "message": f"{host} line {i}"} for i in range(120)]
        logs.put_log_events(logGroupName=LOG_GROUP, logStreamName=f"{name}/{host}-1700000000", logEvents=events)
    lines = list(SageMakerTarget().logs(made, stage="", rank=0, follow=True))
    assert lines == [f"algo-1 line {i}" for i in range(120)]
    stream = f"{name}/algo-1-1700000000"
    metrics = ["step=30 loss=2.5 tokens_per_sec=100.5 mfu=0.25", "step=30 val_loss=3", "# a note"]
    events = [{"timestamp": int(time.time() * 1000) + 500 + i, "message": text} for i, text in enumerate(metrics)]
    logs.put_log_events(logGroupName=LOG_GROUP, logStreamName=stream, logEvents=events)
    assert client.tail_log_stream(stream)[-3:] == metrics
    (row,) = status_rows(made.directory.parent)
    shown = row["progress"]
    assert (shown.step, shown.max_steps, shown.loss, shown.tokens_per_sec, shown.mfu) == (30, 1000, 2.5, 100.5, 0.25)


def test_doctor_tries_the_buckets(moto: str, submit: Callable[[str], Launch]) -> None:
    made = submit(moto)
    client = aws(moto)
    before = {one.check: (one.level, one.detail) for one in sagemaker_findings(made.profile, made.pipeline, client)}
    assert before["request"][0] == "ok"
    assert before["channel train"][0] == "error"
    assert "NoSuchBucket" in before["channel train"][1]
    assert before["output"][0] == "error"
    assert "put_object" in before["output"][1]
    s3 = client._client("s3")
    s3.create_bucket(Bucket="data")
    assert {one.check: one.detail for one in sagemaker_findings(made.profile, None, client)}[
        "channel train"
    ] == "no object there"
    s3.put_object(Bucket="data", Key="store/manifest.json", Body=b"{}")
    after = {one.check: one.level for one in sagemaker_findings(made.profile, None, client)}
    assert after == {"channel train": "ok", "output": "ok", "checkpoints": "ok"}
    assert s3.list_objects_v2(Bucket="data")["KeyCount"] == 1, "what was tried is gone again"


def test_a_service_that_cannot_be_reached_is_one_sentence(submit: Callable[[str], Launch]) -> None:
    with pytest.raises(LaunchError, match=r"CreateTrainingJob train-.*127\.0\.0\.1:9"):
        submit("http://127.0.0.1:9")


def test_a_description_is_a_status() -> None:
    found = {
        "TrainingJobName": "a-job",
        "TrainingJobStatus": "InProgress",
        "SecondaryStatus": "Training",
        "SecondaryStatusTransitions": [{"Status": "Training", "StartTime": 5.0, "StatusMessage": "in progress"}],
        "FinalMetricDataList": [{"MetricName": "loss", "Value": "2.5"}],
        "ResourceConfig": {"InstanceCount": 2},
    }
    status = to_stage_status("x", found)
    assert (status.state, status.job_id, status.nodes, status.since) == ("running", "a-job", ("algo-1", "algo-2"), 5.0)
    assert status.reason == "Training, in progress, loss=2.5"
    assert to_stage_status("x", {**found, "SecondaryStatus": "Restarting"}).state == "requeued"
    assert to_stage_status("x", {**found, "SecondaryStatus": "Pending"}).state == "pending"
