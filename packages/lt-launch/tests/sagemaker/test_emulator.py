"""The service's side alone, with containers of a few lines: stop, grace, one host that fails, metrics, output."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lt_launch.policy import write_table
from lt_launch.sagemaker.emulator import GRACE_PERIOD_S
from lt_trainer.run_directory.records import METRIC_DEFINITIONS

PROGRAM = """
import sys
from pathlib import Path
from lt_launch.sagemaker.emulator import TrainingJobEmulator
class Scripted(TrainingJobEmulator):
    def container_command(self, root):
        return ["bash", "-c", sys.argv[3], "container", str(root), root.name]
sys.exit(Scripted(Path(sys.argv[1]), float(sys.argv[2])).run())
"""


def start(
    tmp_path: Path, script: str, *, hosts: int = 1, grace_period_s: float = 30, **more: Any
) -> subprocess.Popen[bytes]:
    request = {
        "TrainingJobName": "job",
        "AlgorithmSpecification": {"MetricDefinitions": list(METRIC_DEFINITIONS)},
        "HyperParameters": {"MAX_STEPS": "5"},
        "ResourceConfig": {"InstanceCount": hosts},
        "StoppingCondition": {"MaxRuntimeInSeconds": 100},
        "OutputDataConfig": {"S3OutputPath": "s3://local/out", "CompressionType": "NONE"},
        "CheckpointConfig": {"S3Uri": "s3://local/kept"},
        **more,
    }
    write_table(tmp_path / "job" / "request.json", request)
    folders = {"s3://local/kept": str(tmp_path / "kept"), "s3://bucket/out": str(tmp_path / "out")}
    write_table(tmp_path / "job" / "addresses.json", folders)
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path / "job"), str(grace_period_s), script])


def job(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "job" / "job.json").read_bytes())


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.02)


def test_what_a_container_finds_and_what_becomes_of_what_it_leaves(tmp_path: Path) -> None:
    (tmp_path / "kept" / "run").mkdir(parents=True)
    (tmp_path / "kept" / "run" / "old").write_text("restored")
    script = """
cat $1/input/config/resourceconfig.json > $1/output/data/seen; cat $1/checkpoints/run/old >> $1/output/data/seen
echo new > $1/checkpoints/run/new; [ $2 = algo-1 ] && echo weights > $1/model/weights
echo "step=1 loss=2.5 learning_rate=1e-3"; echo "step=2 loss=nan tokens_per_sec=1.5e+06"; echo "val_loss=9 xloss=8"
"""
    assert start(tmp_path, script, hosts=11).wait(60) == 0
    found = job(tmp_path)
    assert (found["TrainingJobStatus"], found["SecondaryStatus"]) == ("Completed", "Completed")
    seen = (tmp_path / "job" / "output" / "data" / "algo-10" / "seen").read_text()
    resources, _ = json.JSONDecoder().raw_decode(seen)
    assert resources["current_host"] == "algo-10"
    assert resources["hosts"][:3] == ["algo-1", "algo-10", "algo-11"], "as text, like the service"
    (group,) = resources["instance_groups"]
    assert (group["instance_group_name"], group["hosts"]) == (resources["current_group_name"], resources["hosts"])
    assert seen.endswith("restored")
    assert (tmp_path / "kept" / "run" / "new").read_text() == "new\n"
    assert (tmp_path / "job" / "output" / "model" / "weights").read_text() == "weights\n"
    points = [json.loads(line) for line in (tmp_path / "job" / "metrics.jsonl").read_text().splitlines()]
    of_one = [(point["MetricName"], point["Value"]) for point in points if point["Host"] == "algo-3"]
    assert of_one == [("loss", "2.5"), ("loss", "nan"), ("tokens_per_sec", "1.5e+06")]
    assert {one["MetricName"]: one["Value"] for one in found["FinalMetricDataList"]}["loss"] == "nan"


@pytest.mark.parametrize("compression", ["NONE", "GZIP"])
def test_results_are_in_the_folder_that_stands_for_the_output_path(tmp_path: Path, compression: str) -> None:
    output = {"S3OutputPath": "s3://bucket/out", "CompressionType": compression}
    script = "echo weights > $1/model/weights; echo other > $1/output/data/other"
    assert start(tmp_path, script, OutputDataConfig=output).wait(60) == 0
    results = tmp_path / "out" / "job" / "output"
    model = results / ("model" if compression == "NONE" else "model.tar.gz")
    assert model.exists()
    assert (results / "data" / "algo-1" / "other").read_text() == "other\n"
    assert job(tmp_path)["ModelArtifacts"] == {"S3ModelArtifacts": str(model)}
    assert not (tmp_path / "job" / "output").exists()


def test_checkpoints_are_where_the_request_has_them(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "old").write_text("restored")
    config = {"S3Uri": "s3://local/kept", "LocalPath": "/opt/ml/mine"}
    script = """
grep -q '"LocalPath": *"/opt/ml/mine"' $1/input/config/checkpointconfig.json || exit 1
cp $1/mine/old $1/mine/new
"""
    assert start(tmp_path, script, CheckpointConfig=config).wait(60) == 0, job(tmp_path)
    assert (tmp_path / "kept" / "new").read_text() == "restored"


def test_a_host_that_fails_ends_the_job_of_all_and_is_named(tmp_path: Path) -> None:
    script = """
if [ $2 = algo-2 ]; then sleep 0.5; printf 'this is why' > $1/output/failure; exit 7; fi
trap 'exit 75' TERM; sleep 60 & wait
"""
    assert start(tmp_path, script, hosts=3).wait(60) == 1
    found = job(tmp_path)
    assert found["TrainingJobStatus"] == "Failed"
    assert found["FailureReason"] == "AlgorithmError: this is why, exit code: 7"


@pytest.mark.parametrize(
    ("script", "killed"), [("trap '' TERM; sleep 60", True), ("trap 'exit 0' TERM; sleep 60 & wait", False)]
)
def test_a_stop_is_a_signal_a_grace_time_and_a_kill(tmp_path: Path, script: str, killed: bool) -> None:
    process = start(tmp_path, f"touch $1/ready; {script}", grace_period_s=1.0 if killed else 60.0)
    wait_for(tmp_path / "job" / "hosts" / "algo-1" / "ready", process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 1
    found = job(tmp_path)
    assert (found["TrainingJobStatus"], found["SecondaryStatus"]) == ("Stopped", "Stopped"), (
        "also where it ended with 0"
    )
    assert "Stopping" in [one["Status"] for one in found["SecondaryStatusTransitions"]]


SAVES = """
import os, sys
from pathlib import Path
from lt_launch.attempt import Stop, handle_stop_signals
from lt_launch.sagemaker import entrypoint
from lt_launch.sagemaker.contract import read_contract
root, seconds = Path(sys.argv[1]), sys.argv[2]
save = f"sleep {seconds}; echo saved >{root}/checkpoints/saved; exit 75"
argv = ["bash", "-c", f"trap '{save}' TERM; touch {root}/ready; sleep 600 & wait; wait"]
spec = {"argv": argv, "nodes": 1, "procs_per_node": 1, "env": {}, "cwd": "", "run_dir": "",
        "grace_s": entrypoint.GRACE_PERIOD_S, "completion": "exit", "restart": {"max_restarts": 0}}
stop = Stop()
with handle_stop_signals(stop):
    sys.exit(entrypoint._run_attempts(read_contract(root, {}), spec, root / "kept", os.environ, stop, print))
"""


@pytest.mark.parametrize("seconds", [1, pytest.param(110, marks=pytest.mark.slow)])
def test_a_save_may_take_110_of_the_120_seconds(tmp_path: Path, seconds: int) -> None:
    """Through all of it: the service's signal, the container's first process, the process that saves."""
    (tmp_path / "saves.py").write_text(SAVES)
    script = f"exec {sys.executable} {tmp_path}/saves.py $1 {seconds}"
    process = start(tmp_path, script, grace_period_s=GRACE_PERIOD_S)
    wait_for(tmp_path / "job" / "hosts" / "algo-1" / "ready", process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(150) == 1
    found = job(tmp_path)
    assert (found["TrainingJobStatus"], found["SecondaryStatus"]) == ("Stopped", "Stopped")
    assert (tmp_path / "kept" / "saved").read_text() == "saved\n", "and it was sent to where checkpoints are kept"
    root = tmp_path / "job" / "hosts" / "algo-1"
    (ended,) = (root / "kept" / "stages" / "train").glob("attempt-*/exit.json")
    assert json.loads(ended.read_bytes())["reason"] == "stopped as requested"
    assert not (root / "output" / "failure").exists()
    (stopping,) = [one for one in found["SecondaryStatusTransitions"] if one["Status"] == "Stopping"]
    assert stopping["EndTime"] - stopping["StartTime"] >= seconds


def test_the_first_1024_characters_are_the_reason(tmp_path: Path) -> None:
    assert start(tmp_path, "printf 'x%.0s' $(seq 2000) > $1/output/failure; exit 1").wait(60) == 1
    assert job(tmp_path)["FailureReason"] == f"AlgorithmError: {'x' * 1024}, exit code: 1"


def test_the_time_limit_is_a_stop_of_its_own(tmp_path: Path) -> None:
    process = start(tmp_path, "trap 'exit 75' TERM; sleep 60 & wait", StoppingCondition={"MaxRuntimeInSeconds": 1})
    assert process.wait(60) == 1
    assert job(tmp_path)["SecondaryStatus"] == "MaxRuntimeExceeded"
