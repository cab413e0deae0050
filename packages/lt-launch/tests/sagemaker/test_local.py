"""Whole jobs with real processes: two hosts trained, stopped, restored, finished; failures as the service has them."""

import json
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lt_launch.errors import LaunchError
from lt_launch.launch_dir import load_launch
from lt_launch.launcher import launch
from lt_launch.profile import Profile
from lt_launch.run_file import RunOverrides, read_run_file
from lt_launch.sagemaker.emulator import network_isolation_prefix
from lt_launch.sagemaker.local import SageMakerLocalTarget
from lt_launch.status import status_rows
from lt_launch.target import Launch

RECIPE = """
[run]
dir = "run"
[model]
hidden_size = 64
intermediate_size = 128
n_heads = 4
n_kv_heads = 2
n_layers = 2
tie_word_embeddings = true
[data]
store = "{store}"
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
procs_per_node = 1
env = {{ OMP_NUM_THREADS = "1" }}
"""


@pytest.fixture
def submit(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Launch]:
    """Start a job in the background."""
    monkeypatch.setenv("LT_LAUNCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def go(nodes: int = 1, steps: int = 20, more: str = "") -> Launch:
        (tmp_path / "recipe.toml").write_text(RECIPE.format(store=data / "store", steps=steps))
        (tmp_path / "job.toml").write_text(JOB.format(nodes=nodes) + more)
        file = read_run_file("job.toml", Profile(), RunOverrides())
        assert launch(file.pipeline, file.profile, "sagemaker-local", detach=True) == 0
        return load_launch(tmp_path / "run")

    return go


def job(made: Launch, number: int) -> tuple[Path, dict[str, Any]]:
    folder = made.directory / "sagemaker" / f"job-{number:03}"
    file = folder / "job.json"
    return folder, json.loads(file.read_bytes()) if file.exists() else {}


def until(made: Launch, condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + 240
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return found


def until_over(made: Launch, number: int) -> tuple[Path, dict[str, Any]]:
    def over() -> bool:
        return job(made, number)[1].get("TrainingJobStatus") in ("Completed", "Failed", "Stopped")

    until(made, over, "the end of the job")
    return job(made, number)


def losses(folder: Path) -> dict[int, float]:
    """Loss by step, as trainers wrote it."""
    file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def test_two_hosts_are_stopped_restored_and_finish(submit: Callable[..., Launch]) -> None:
    pytest.importorskip("lt_trainer_gpu", reason="needs an engine: pip install lt-trainer-gpu")
    made = submit(nodes=2, steps=60)
    target, run = SageMakerLocalTarget(), made.directory / "sagemaker" / "run"
    until(made, lambda: len(losses(run)) >= 4, "step 4")
    (status,) = target.status(made)
    assert (status.state, status.nodes) == ("running", ("algo-1", "algo-2"))
    (row,) = until(made, lambda: [one for one in status_rows("run") if one["progress"]], "a line of metrics")
    shown = row["progress"]
    assert 1 <= shown.step <= 60
    assert shown.max_steps == 60
    assert shown.loss == pytest.approx(losses(run)[shown.step], rel=1e-5)
    assert shown.tokens_per_sec > 0
    with pytest.raises(
        LaunchError, match="job-000 of an earlier launch is still running; wait for it, or lt launch can"
    ):
        submit(nodes=2, steps=60)
    assert "loss=" not in status.reason
    assert list(target.cancel(made)) == ["job-000 was signaled to save and stop; it has 120 s"]
    folder, found = until_over(made, 0)
    assert [one["Status"] for one in found["SecondaryStatusTransitions"]] == [
        "Starting",
        "Downloading",
        "Training",
        "Stopping",
        "Uploading",
        "Stopped",
    ]
    stopped_at = max(losses(run))
    assert stopped_at < 60
    assert not (folder / "output" / "model.tar.gz").exists()
    (status,) = target.status(made)
    assert status.state == "cancelled"

    made = submit(nodes=2, steps=60)
    folder, found = until_over(made, 1)
    assert found["TrainingJobStatus"] == "Completed", found
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "resume"] == [stopped_at]
    assert sorted(losses(run)) == list(range(1, 61))
    with tarfile.open(folder / "output" / "model.tar.gz") as archive:
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(archive.getnames())
    points = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {point["MetricName"] for point in points} == {
        "batches_per_sec",
        "flops_per_sec",
        "loss",
        "samples_per_sec",
        "mfu",
        "tokens_per_sec",
    }
    scraped = [float(point["Value"]) for point in points if point["MetricName"] == "loss"]
    wanted = [loss for step, loss in sorted(losses(run).items()) if step > stopped_at]
    assert scraped == pytest.approx(wanted, rel=1e-5)
    (status,) = target.status(made)
    assert (status.state, status.exit_code) == ("completed", 0)
    lines = list(target.logs(made, stage="train", rank=1, follow=False))
    assert any("host algo-2, 2 of 2" in line for line in lines)
    assert not any(line.startswith("step=") for line in lines), "rank 0's host alone reports steps"


def test_a_failure_is_told_as_the_service_would(submit: Callable[..., Launch], data: Path) -> None:
    """A store without the pack that is wanted: the cause is the first thing in FailureReason."""
    more = f'[profile.sagemaker]\nchannels = ["train={data}/store", "tokenizer={data}/text"]\n'
    made = submit(more=more)
    folder, found = until_over(made, 0)
    assert found["TrainingJobStatus"] == "Failed"
    assert found["FailureReason"].startswith("AlgorithmError: channel tokenizer holds 0 files named tokenizer.json")
    assert found["FailureReason"].endswith("exit code: 64")
    assert found["SecondaryStatus"] == "Failed"
    (status,) = SageMakerLocalTarget().status(made)
    assert status.state == "failed"
    assert "channel tokenizer" in status.reason
    assert (folder / "hosts" / "algo-1" / "input" / "config" / "hyperparameters.json").exists()


def test_the_time_limit_is_a_stop(submit: Callable[..., Launch]) -> None:
    made = submit(more="time_limit = 1\n", steps=100000)
    _, found = until_over(made, 0)
    assert found["TrainingJobStatus"] == "Stopped"
    assert found["SecondaryStatus"] == "MaxRuntimeExceeded"
    (status,) = SageMakerLocalTarget().status(made)
    assert status.state == "requeued"


def test_an_isolated_container_has_itself_alone() -> None:
    front = network_isolation_prefix()
    if not front:
        pytest.skip("this system lets us make no network of its own")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        program = (
            "import socket, sys\n"
            "own = socket.socket(); own.bind(('127.0.0.1', 0)); own.listen()\n"
            "socket.create_connection(own.getsockname(), 5)\n"
            f"try: socket.create_connection(('127.0.0.1', {port}), 5)\n"
            "except OSError: sys.exit(0)\n"
            "sys.exit(1)\n"
        )
        assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 1
        assert subprocess.run([*front, sys.executable, "-c", program], check=False).returncode == 0
