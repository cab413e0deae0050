"""Whole jobs with real processes: two hosts trained, stopped, restored, finished; failures as the service has them."""

import json
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lt_launch.errors import LaunchError
from lt_launch.launch_dir import load_launch
from lt_launch.launcher import launch
from lt_launch.profile import Profile
from lt_launch.run_file import RunOverrides, read_run_file
from lt_launch.sagemaker.client import SageMakerClient
from lt_launch.sagemaker.options import SageMakerOptions
from lt_launch.sagemaker.target import SageMakerTarget
from lt_launch.status import status_rows
from lt_launch.target import Launch
from lt_test_helpers.sagemaker import Service, TrainingJob, run_service

RECIPE = """
[model]
hidden_size = 64
intermediate_size = 128
n_heads = 4
n_kv_heads = 2
n_layers = 2
tie_word_embeddings = true
[data]
store = "store"
seq_len = 64
[batch]
global_batch_size = 8
micro_batch_size = 2
[optimizer]
lr = 3e-3
[schedule]
max_steps = {steps}
warmup_steps = 3
min_lr = 3e-4
[checkpoint]
interval = 10
[metrics]
log_interval = 1
[engine.gpu]
device = "cpu"
dtype = "float32"
"""
JOB = """
[job]
name = "train"
recipe = "recipe.toml"
nodes = {nodes}
env = {{ OMP_NUM_THREADS = "1" }}
time_limit = "1h"
resources = {{ instance_type = "ml.m5.xlarge" }}
[profile.sagemaker]
region = "us-east-1"
endpoint_url = "{url}"
role = "arn:aws:iam::123456789012:role/trainer"
image = "123456789012.dkr.ecr.us-east-1.amazonaws.com/lt:1"
channels = [{channels}]
output_path = "s3://data/out"
checkpoint_s3_uri = "s3://data/checkpoints"
subnets = ["subnet-0a1b2c3d"]
security_groups = ["sg-0a1b2c3d"]
"""
RUN = "fsx://fs-0123456789abcdef0/abcdefgh/run"


@pytest.fixture
def service(data: Path, tmp_path: Path) -> Iterator[Service]:
    for name in ("kept", "run"):
        (tmp_path / name).mkdir()
    folders = {"s3://data/store": data / "store", "s3://data/text": data / "text"}
    with run_service(
        tmp_path / "jobs", {**folders, "s3://data/checkpoints": tmp_path / "kept", RUN: tmp_path / "run"}
    ) as running:
        yield running


@pytest.fixture
def submit(service: Service, tmp_path: Path, credentials: None) -> Callable[..., Launch]:
    def go(nodes: int = 1, steps: int = 20, **channels: str) -> Launch:
        (tmp_path / "recipe.toml").write_text(RECIPE.format(steps=steps))
        given = {"train": "s3://data/store", **({"run": f"{RUN}?rw"} if nodes > 1 else {}), **channels}
        pairs = ", ".join(f'"{name}={address}"' for name, address in given.items())
        text = JOB.format(nodes=nodes, url=service.url, channels=pairs)
        (tmp_path / "job.toml").write_text(text)
        file = read_run_file("job.toml", Profile(), RunOverrides())
        assert launch(file.pipeline, file.profile, "sagemaker") == 0
        return load_launch(file.pipeline.out)

    return go


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + 240
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return found


def until_over(service: Service, made: Launch) -> TrainingJob:
    job = service.jobs[made.job_ids["train"]]
    job.join(240)
    assert not job.is_alive()
    return job


def losses(folder: Path) -> dict[int, float]:
    """Loss by step, as trainers wrote it."""
    file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def test_two_hosts_are_stopped_restored_and_finish(
    service: Service, submit: Callable[..., Launch], tmp_path: Path
) -> None:
    pytest.importorskip("lt_trainer_gpu", reason="needs an engine: pip install lt-trainer-gpu")
    made = submit(nodes=2, steps=60)
    target, run, name = SageMakerTarget(), tmp_path / "run", made.job_ids["train"]
    until(lambda: len(losses(run)) >= 4, "step 4")
    (status,) = target.status(made)
    assert (status.state, status.nodes) == ("running", ("algo-1", "algo-2"))
    (row,) = until(lambda: [one for one in status_rows(made.directory.parent) if one["progress"]], "a line of metrics")
    shown = row["progress"]
    assert 1 <= shown.step <= 60
    assert shown.max_steps == 60
    assert shown.loss == pytest.approx(losses(run)[shown.step], rel=1e-5)
    assert shown.tokens_per_sec > 0
    with pytest.raises(LaunchError, match=f"{name} of an earlier launch is still running; wait for it, or lt launch c"):
        submit(nodes=2, steps=60)
    assert list(target.cancel(made)) == [f"{name} was signaled to save and stop; it has 120 s"]
    job = until_over(service, made)
    steps = [one["Status"] for one in job.description["SecondaryStatusTransitions"]]
    assert steps == ["Starting", "Training", "Stopping", "Stopped"]
    stopped_at = max(losses(run))
    assert stopped_at < 60
    assert not (job.folder / "model.tar.gz").exists()
    (status,) = target.status(made)
    assert status.state == "cancelled"
    with pytest.raises(LaunchError, match=r"ResourceInUse"):
        SageMakerClient(made.profile.options("sagemaker", SageMakerOptions)).call(
            "sagemaker", "create_training_job", **job.request
        )

    time.sleep(1.1)  # the name of a job has the second
    made = submit(nodes=2, steps=60)
    job = until_over(service, made)
    assert job.description["TrainingJobStatus"] == "Completed", job.description
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "resume"] == [stopped_at]
    assert sorted(losses(run)) == list(range(1, 61))
    with tarfile.open(job.folder / "model.tar.gz") as archive:
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(archive.getnames())
    names = {"batches_per_sec", "flops_per_sec", "loss", "samples_per_sec", "mfu", "tokens_per_sec"}
    assert {metric for _, metric, _ in job.metrics} == names
    scraped = [float(value) for _, metric, value in job.metrics if metric == "loss"]
    wanted = [loss for step, loss in sorted(losses(run).items()) if step > stopped_at]
    assert scraped == pytest.approx(wanted, rel=1e-5)
    (status,) = target.status(made)
    assert (status.state, status.exit_code) == ("completed", 0)
    lines = list(target.logs(made, stage="train", rank=1, follow=False))
    assert any("host algo-2, 2 of 2" in line for line in lines)
    assert not any(line.startswith("step=") for line in lines), "rank 0's host alone reports steps"


@pytest.mark.slow
def test_one_host_goes_on_with_the_checkpoints_in_s3_after_its_time_limit(
    service: Service, submit: Callable[..., Launch], tmp_path: Path
) -> None:
    pytest.importorskip("lt_trainer_gpu", reason="needs an engine: pip install lt-trainer-gpu")
    made = submit(steps=100_000)
    until(lambda: list((tmp_path / "kept").rglob("manifest.json")), "a checkpoint in S3")
    service.jobs[made.job_ids["train"]].stop_reason = "limit"
    assert until_over(service, made).description["SecondaryStatus"] == "MaxRuntimeExceeded"
    (status,) = SageMakerTarget().status(made)
    assert status.state == "requeued"
    stopped_at = max(losses(tmp_path / "kept" / "run"))
    time.sleep(1.1)  # the name of a job has the second
    job = until_over(service, submit(steps=stopped_at + 5))
    assert job.description["TrainingJobStatus"] == "Completed", job.description
    assert sorted(losses(tmp_path / "kept" / "run")) == list(range(1, stopped_at + 6))


def test_a_failure_is_told_as_the_service_would(service: Service, submit: Callable[..., Launch]) -> None:
    """A channel without what is wanted in it: the cause is the first thing in FailureReason."""
    made = submit(tokenizer="s3://data/text")
    job = until_over(service, made)
    reason = job.description["FailureReason"]
    assert reason.startswith("AlgorithmError: channel tokenizer holds 0 files named tokenizer.json")
    assert reason.endswith("exit code: 64")
    (status,) = SageMakerTarget().status(made)
    assert status.state == "failed"
    assert "channel tokenizer" in status.reason


SAVES = """
import os, sys
from pathlib import Path
from lt_launch.attempt import Stop, handle_stop_signals
from lt_launch.sagemaker import entrypoint
from lt_launch.sagemaker.contract import read_contract
seconds, root = sys.argv[1], Path(sys.argv[2])
save = f"sleep {seconds}; echo saved >{root}/checkpoints/saved; exit 75"
argv = ["bash", "-c", f"trap '{save}' TERM; touch {root}/ready; sleep 600 & wait; wait"]
spec = {"argv": argv, "nodes": 1, "procs_per_node": 1, "env": {}, "cwd": "", "run_dir": "",
        "grace_s": entrypoint.GRACE_PERIOD_S, "completion": "exit", "restart": {"max_restarts": 0}}
stop = Stop()
with handle_stop_signals(stop):
    sys.exit(entrypoint.run_attempts(read_contract(root, {}), spec, os.environ, stop, print))
"""


@pytest.mark.parametrize("seconds", [1, pytest.param(110, marks=pytest.mark.slow)])
def test_a_save_may_take_110_of_the_120_seconds(tmp_path: Path, seconds: int) -> None:
    """Through all of it: the service's signal, the container's first process, the process that saves."""
    (tmp_path / "saves.py").write_text(SAVES)
    (tmp_path / "kept").mkdir()
    request = {
        "TrainingJobName": "job",
        "AlgorithmSpecification": {},
        "HyperParameters": {},
        "InputDataConfig": [],
        "ResourceConfig": {"InstanceCount": 1},
        "StoppingCondition": {"MaxRuntimeInSeconds": 200},
        "CheckpointConfig": {"S3Uri": "s3://data/kept"},
    }
    command = (sys.executable, str(tmp_path / "saves.py"), str(seconds))
    job = TrainingJob(request, tmp_path / "job", {"s3://data/kept": tmp_path / "kept"}, command)
    root = tmp_path / "job" / "hosts" / "algo-1"
    job.start()
    until((root / "ready").exists, "the process that saves")
    job.stop()
    job.join()
    assert job.description["SecondaryStatus"] == "Stopped"
    assert (tmp_path / "kept" / "saved").read_text() == "saved\n", "and it was sent to where checkpoints are kept"
    (ended,) = root.glob("output/data/lt/stages/train/attempt-*/exit.json")
    assert json.loads(ended.read_bytes())["reason"] == "stopped as requested"
    assert not (root / "output" / "failure").exists()
