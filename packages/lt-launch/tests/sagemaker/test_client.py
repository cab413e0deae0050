"""The client against servers: moto for create, describe, logs and S3; the emulator behind HTTP for stop."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lt_launch.errors import LaunchError
from lt_launch.launch_dir import load_launch
from lt_launch.launcher import launch
from lt_launch.policy import read_table, write_table
from lt_launch.profile import Profile
from lt_launch.run_file import RunOverrides, read_run_file
from lt_launch.sagemaker.client import LOG_GROUP, SageMakerClient
from lt_launch.sagemaker.doctor import sagemaker_findings
from lt_launch.sagemaker.options import SageMakerOptions
from lt_launch.sagemaker.target import SageMakerTarget
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
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Launch]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("LT_LAUNCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

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


# --- the emulator behind SageMaker's protocol


class Service(BaseHTTPRequestHandler):
    """CreateTrainingJob, DescribeTrainingJob and StopTrainingJob over JSON 1.1."""

    folder: Path
    folders: dict[str, str]

    def do_POST(self) -> None:
        action = self.headers["X-Amz-Target"].rpartition(".")[2]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            code, answer = 200, getattr(self, action)(body)
        except KeyError as exc:
            code, answer = 400, {"__type": str(exc.args[0]), "message": "refused"}
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/x-amz-json-1.1")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        return

    def CreateTrainingJob(self, body: dict[str, Any]) -> dict[str, Any]:
        job = self.folder / body["TrainingJobName"]
        if job.exists():
            raise KeyError("ResourceInUse")
        write_table(job / "request.json", body)
        write_table(job / "addresses.json", self.folders)
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "lt_launch.sagemaker.emulator", str(job)],
                env={**os.environ, "LT_PROCS_PER_NODE": "1"},
            )
        )
        (job / "pid").write_text(str(processes[-1].pid))
        while not (job / "job.json").exists():
            assert processes[-1].poll() is None
            time.sleep(0.02)
        return {"TrainingJobArn": f"arn:aws:sagemaker:us-east-1:123456789012:training-job/{job.name}"}

    def DescribeTrainingJob(self, body: dict[str, Any]) -> dict[str, Any]:
        job = self.folder / body["TrainingJobName"]
        found = read_table(job / "job.json") or {**json.loads((job / "request.json").read_bytes())}
        return {"TrainingJobStatus": "InProgress", "SecondaryStatus": "Starting", "CreationTime": 0, **found}

    def DescribeLogStreams(self, body: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("AccessDeniedException")

    def StopTrainingJob(self, body: dict[str, Any]) -> dict[str, Any]:
        os.kill(int((self.folder / body["TrainingJobName"] / "pid").read_text()), signal.SIGTERM)
        return {}


processes: list[subprocess.Popen[bytes]] = []


@pytest.fixture
def service(tmp_path: Path, data: Path) -> Iterator[str]:
    """The address of the emulator."""
    Service.folder = tmp_path / "service"
    Service.folders = {"s3://data/store": str(data / "store"), "s3://data/checkpoints": str(tmp_path / "kept")}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
            process.wait(180)
        processes.clear()
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_job_that_fails_and_one_that_is_stopped(service: str, submit: Callable[[str], Launch]) -> None:
    """The default recipe wants rows of 4096, for which the store has no pack: the trainer itself refuses."""
    made = submit(service)
    (status,) = SageMakerTarget().status(made)
    assert status.state in ("pending", "running", "failed")
    assert list(SageMakerTarget().cancel(made)) == [
        f"{made.job_ids['train']} was signaled to save and stop; it has 120 s"
    ]
    deadline = time.monotonic() + 120
    while SageMakerTarget().status(made)[0].state not in ("cancelled", "failed"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    found = aws(service).describe_training_job(made.job_ids["train"])
    assert found["TrainingJobStatus"] == "Stopped"
    assert found["SecondaryStatusTransitions"][-1]["Status"] == "Stopped"
    sent = json.loads((made.directory / "rendered" / "request.json").read_bytes())
    with pytest.raises(LaunchError, match=r"ResourceInUse.*give the job another name"):
        aws(service).create_training_job({**sent, "TrainingJobName": made.job_ids["train"]})
