"""SM_* variables, and the rest of the contract, against sagemaker-training-toolkit's own code."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lt_launch.sagemaker.contract import read_contract
from lt_launch.sagemaker.failure import FAILURE_REASON_LIMIT, failure_text, write_failure
from lt_launch.sagemaker.toolkit import toolkit_environment

HOSTS = [f"algo-{number}" for number in (1, 10, 2)]
RESOURCES: dict[str, Any] = {
    "current_host": "algo-2",
    "current_instance_type": "ml.trn1.32xlarge",
    "current_group_name": "homogeneousCluster",
    "hosts": HOSTS,
    "instance_groups": [
        {"instance_group_name": "homogeneousCluster", "instance_type": "ml.trn1.32xlarge", "hosts": HOSTS}
    ],
    "network_interface_name": "eth0",
}
HYPERPARAMETERS = {
    "LEARNING_RATE": "3e-4",
    "MAX_STEPS": "10",
    "TOKENIZER": "a/b c",
    "x": "null",
    "TABLE": '{"b": [1, true], "a": "é"}',
    "EMPTY": "",
    "sagemaker_program": "train.py",
    "sagemaker_torch_distributed_enabled": "true",
    "sagemaker_job_name": "job",
}


@pytest.fixture
def opt_ml(tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder that stands for /opt/ml."""

    def make(resources: dict[str, Any], hyperparameters: dict[str, str]) -> Path:
        config = tmp_path / "ml" / "input" / "config"
        config.mkdir(parents=True)
        for channel in ("train", "validation-en.1"):
            (tmp_path / "ml" / "input" / "data" / channel).mkdir(parents=True)
        inputs = {name: {"TrainingInputMode": "File"} for name in ("validation-en.1", "train")}
        (config / "hyperparameters.json").write_text(json.dumps(hyperparameters))
        (config / "resourceconfig.json").write_text(json.dumps(resources))
        (config / "inputdataconfig.json").write_text(json.dumps(inputs))
        return tmp_path / "ml"

    return make


def test_devices_are_those_of_the_machine_and_hosts_in_the_order_of_the_service(
    opt_ml: Callable[..., Path], tmp_path: Path
) -> None:
    """The number of GPUs is not the number of processes, and no GPU is no process."""
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    contract = read_contract(opt_ml({**RESOURCES, "current_instance_type": "ml.g5.12xlarge"}, {}), {})
    found = toolkit_environment(contract, {"LT_PROCS_PER_NODE": "7"}, tmp_path / "dev")
    assert (found["SM_NUM_GPUS"], found["SM_NUM_NEURONS"]) == ("2", "0")
    assert json.loads(found["SM_HOSTS"]) == HOSTS
    assert toolkit_environment(contract, {}, tmp_path)["SM_NUM_GPUS"] == "0"


def test_neuron_cores_are_counted_by_instance_type(opt_ml: Callable[..., Path], tmp_path: Path) -> None:
    found = toolkit_environment(read_contract(opt_ml(RESOURCES, HYPERPARAMETERS), {}), {}, tmp_path)
    assert (found["SM_NUM_GPUS"], found["SM_NUM_NEURONS"]) == ("0", "32")
    assert found["SM_HP_LEARNING_RATE"] == "0.0003"
    assert "SM_HP_SAGEMAKER_PROGRAM" not in found
    assert json.loads(found["SM_TRAINING_ENV"])["current_host"] == "algo-2"


@pytest.fixture(scope="module")
def toolkit_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with sagemaker-training."""
    if shutil.which("uv") is None:
        pytest.skip("uv, which makes the environment with the toolkit, is not installed")
    environment = tmp_path_factory.mktemp("toolkit") / "environment"
    subprocess.run(["uv", "venv", "-q", "--python", sys.executable, environment], check=True)
    command = ["uv", "pip", "install", "-q", "--python", environment / "bin" / "python", "sagemaker-training"]
    installed = subprocess.run(command, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"sagemaker-training cannot be installed here: {installed.stderr[-300:]}")
    return environment / "bin" / "python"


ASK = """
import json, sys
from sagemaker_training import environment, errors, files, process, trainer
env = environment.Environment()
asked = json.load(sys.stdin)
files.write_failure_file("a later failure")
answer = {"variables": env.to_env_vars(), "channels": env.channel_input_dirs, "ends": {}}
answer["failure"] = files.read_file(asked["failure"])
for code in asked["codes"]:
    command = [sys.executable, "-c", f"raise SystemExit({code})"]
    try:
        process.check_error(command, errors.ExecuteUserScriptError, 1, cwd="/")
        answer["ends"][code] = "ended"
    except errors.ExecuteUserScriptError as exc:
        answer["ends"][code] = exc.return_code
print("ANSWER" + json.dumps(answer))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "resources", [RESOURCES, {"current_host": "algo-1", "hosts": ["algo-1"]}], ids=["full", "least"]
)
def test_the_toolkit_reads_the_contract_as_we_do(
    opt_ml: Callable[..., Path], toolkit_python: Path, resources: dict[str, Any]
) -> None:
    """Variables, channels, the failure file and exit codes, by the code of SageMaker's own containers."""
    root = opt_ml(resources, HYPERPARAMETERS if len(resources) > 2 else {})
    ours = {"SAGEMAKER_BASE_DIR": str(root), "TRAINING_JOB_NAME": "job-1", "AWS_DEFAULT_REGION": "us-east-1"}
    environ = {**os.environ, **ours}
    contract = read_contract(root, environ)
    first = failure_text("rank 3 on algo-2 was the first to fail", ["é" * 2000])
    assert write_failure(contract.failure_file, first)
    codes = [0, 64, 70, 75]
    asked = json.dumps({"failure": str(contract.failure_file), "codes": codes})
    done = subprocess.run(
        [toolkit_python, "-c", ASK], input=asked, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.partition("ANSWER")[2])
    theirs, found = answer["variables"], toolkit_environment(contract, environ)
    no_driver = {"SM_NUM_NEURONS": "0", "SM_TRAINING_ENV": None}  # it asks neuron-ls, which is not here
    assert set(found) == set(theirs)
    assert {name: found[name] for name in found if name not in no_driver} == {
        name: theirs[name] for name in theirs if name not in no_driver
    }
    described, expected = json.loads(found["SM_TRAINING_ENV"]), json.loads(theirs["SM_TRAINING_ENV"])
    assert described | {"num_neurons": 0} == expected
    assert answer["channels"] == {name: str(path) for name, path in contract.channels.items()}
    assert answer["failure"] == first, "the first failure stays"
    assert len(first) <= FAILURE_REASON_LIMIT
    assert answer["ends"] == {str(code): str(code) if code else "ended" for code in codes}
