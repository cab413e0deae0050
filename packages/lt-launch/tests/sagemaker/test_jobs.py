"""Whole jobs with real processes: two hosts trained, stopped, restored, finished; failures as the service has them."""

import json
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lt_launch.errors import LaunchError
from lt_launch.sagemaker.client import SageMakerClient
from lt_launch.sagemaker.options import SageMakerOptions
from lt_launch.sagemaker.target import SageMakerTarget
from lt_launch.status import status_rows
from lt_launch.target import Launch
from lt_test_helpers.sagemaker import Service, TrainingJob, run_service
from lt_trainer.run_directory.jsonl import read_jsonl

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
    return {row["step"]: row["loss"] for row in read_jsonl(file) if "loss" in row} if file.exists() else {}


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_job_is_stopped_restored_and_finishes(
    service: Service, submit: Callable[..., Launch], tmp_path: Path, nodes: int
) -> None:
    """One instance goes on with the checkpoints in S3, two with those on their file system."""
    pytest.importorskip("lt_trainer_gpu", reason="needs an engine: pip install lt-trainer-gpu")

    def go(steps: int = 100_000) -> Launch:
        return submit(service.url, nodes=nodes, steps=steps, **({"run": f"{RUN}?rw"} if nodes > 1 else {}))

    made, target, run = go(), SageMakerTarget(), tmp_path / ("run" if nodes > 1 else "kept/run")
    name, client = made.job_ids["train"], SageMakerClient(made.profile.options("sagemaker", SageMakerOptions))
    until(lambda: len(losses(run)) >= 4, "step 4")
    (status,) = target.status(made)
    assert (status.state, status.nodes) == ("running", ("algo-1", "algo-2")[:nodes])
    (row,) = until(lambda: [one for one in status_rows(made.directory.parent) if one["progress"]], "a line of metrics")
    shown = row["progress"]
    assert shown.max_steps == 100_000
    until(lambda: shown.step in losses(run), "its line in the run directory")
    assert shown.loss == pytest.approx(losses(run)[shown.step], rel=1e-5)
    assert shown.tokens_per_sec > 0
    with pytest.raises(LaunchError, match=f"{name} of an earlier launch is still running; wait for it, or lt launch c"):
        go()
    assert list(target.cancel(made)) == [f"{name} was signaled to save and stop; it has 120 s"]
    job = until_over(service, made)
    steps = [one["Status"] for one in job.description["SecondaryStatusTransitions"]]
    assert steps == ["Starting", "Training", "Stopping", "Stopped"]
    stopped_at = max(losses(run))
    assert not (job.folder / "model.tar.gz").exists()
    (status,) = target.status(made)
    assert status.state == "cancelled"
    with pytest.raises(LaunchError, match=r"ResourceInUse"):
        client.call("sagemaker", "create_training_job", **job.request)

    time.sleep(1.1)  # the name of a job has the second
    made = go(stopped_at + 5)
    job = until_over(service, made)
    assert job.description["TrainingJobStatus"] == "Completed", job.description
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "resume"] == [stopped_at]
    assert sorted(losses(run)) == list(range(1, stopped_at + 6))
    with tarfile.open(job.folder / "model.tar.gz") as archive:
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(archive.getnames())
    names = {"batches_per_sec", "flops_per_sec", "loss", "samples_per_sec", "mfu", "tokens_per_sec"}
    assert {metric for _, metric, _ in job.metrics} == names
    scraped = [float(value) for _, metric, value in job.metrics if metric == "loss"]
    wanted = [loss for step, loss in sorted(losses(run).items()) if step > stopped_at]
    assert scraped == pytest.approx(wanted, rel=1e-5)
    (status,) = target.status(made)
    assert (status.state, status.exit_code) == ("completed", 0)
    lines = list(target.logs(made, stage="train", rank=nodes - 1, follow=False))
    assert any(f"host algo-{nodes}, {nodes} of {nodes}" in line for line in lines)
    assert any(line.startswith("step=") for line in lines) == (nodes == 1), "rank 0's host alone reports steps"


def test_a_failure_is_told_as_the_service_would(service: Service, submit: Callable[..., Launch]) -> None:
    """A channel without what is wanted in it: the cause is the first thing in FailureReason."""
    made = submit(service.url, tokenizer="s3://data/text")
    job = until_over(service, made)
    reason = job.description["FailureReason"]
    assert reason.startswith("AlgorithmError: channel tokenizer holds 0 files named tokenizer.json")
    assert reason.endswith("exit code: 64")
    (status,) = SageMakerTarget().status(made)
    assert status.state == "failed"
    assert "channel tokenizer" in status.reason
