"""Trainium ranks of every launch target get a NeuronCore each, by a stand-in for torch-xla and the runtime.

A node is a folder; the ranks end where they have loaded torch-xla. Slurm is tested in lt-launch, which has nodes for
it; over ssh the commands are those of this machine.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lt_launch.launcher import format_rendered
from lt_launch.profile import Profile
from lt_launch.run_file import RunOverrides, read_run_file
from lt_launch.target import get_target
from lt_test_helpers.neuron_start import START, recipe
from lt_test_helpers.stores import make_stores

PROCESSES = 'argv = ["python", "-m", "lt_trainer", "run", "recipe.toml"]'


@pytest.fixture
def node(tmp_path: Path) -> dict[str, str]:
    """The environment of a Trainium node."""
    home = {"LT_LAUNCH_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    return os.environ | home | {"PYTHONPATH": str(START), "NEURON_NODE": str(tmp_path)}


def cores(folder: Path) -> dict[str, str]:
    """The rank that each core of a node has."""
    return {path.name: path.read_text() for path in folder.glob("core-*")}


@pytest.mark.parametrize(("what", "code"), [(PROCESSES, 0), ('recipe = "recipe.toml"', 70)])
def test_ranks_of_this_machine(what: str, code: int, tmp_path: Path, node: dict[str, str]) -> None:
    """As plain processes, and under torchrun, where the end of a run that has not trained is a failure."""
    (tmp_path / "recipe.toml").write_text(recipe(f"{tmp_path}/trained", nodes=1))
    (tmp_path / "run.toml").write_text(f"[job]\n{what}\nprocs_per_node = 2\n")
    command = [sys.executable, "-m", "lt_launch", "launch", "run", "run.toml"]
    done = subprocess.run(command, cwd=tmp_path, env=node, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert cores(tmp_path) == {"core-0": "0 of 2", "core-1": "1 of 2"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_ranks_of_pods(kind: str, tmp_path: Path, node: dict[str, str]) -> None:
    """The command of the manifest, with the variables that the kind's controller sets, in two pods."""
    (tmp_path / "recipe.toml").write_text(recipe(f"{tmp_path}/trained", nodes=2))
    (tmp_path / "run.toml").write_text(
        '[job]\nname = "llama"\nrecipe = "recipe.toml"\nnodes = 2\nprocs_per_node = 2\n[profile]\n'
        f'python = "{sys.executable}"\n[profile.k8s]\nkind = "{kind}"\nimage = "registry/lt:1"\n'
        f'persistent_volume_claim = "fsx"\nmount_path = "{tmp_path}"\n'
    )
    file = read_run_file(str(tmp_path / "run.toml"), Profile(), RunOverrides())
    rendered = get_target("k8s").render(file.pipeline, file.profile)
    assert "llama.yaml" in format_rendered(rendered)
    config, made = yaml.safe_load_all(rendered.files["llama.yaml"])
    (tmp_path / "run.toml").write_text(config["data"]["run.toml"])
    pods = []
    for number in range(2):
        folder = tmp_path / f"pod-{number}"
        folder.mkdir()
        given = controller_variables(kind, number)
        words = [re.sub(r"\$\((\w+)\)", lambda found: given[found[1]], word) for word in command_of(made)]  # noqa: B023
        words = [
            word.replace("llama-node-0-0.llama", "127.0.0.1") for word in words
        ]  # a host name of the cluster's DNS
        words = [str(tmp_path / "run.toml") if word == "/etc/lt/run.toml" else word for word in words]
        pods.append(subprocess.Popen(words, cwd=folder, env=node | given | {"NEURON_NODE": str(folder)}))
    assert [pod.wait(120) for pod in pods] == [0, 0]
    for number in range(2):
        expected = {f"core-{local}": f"{2 * number + local} of 4" for local in range(2)}
        assert cores(tmp_path / f"pod-{number}") == expected


def command_of(made: dict[str, Any]) -> list[str]:
    spec = made["spec"]
    if made["kind"] == "TrainJob":
        return spec["trainer"]["command"]
    return spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["command"]


def controller_variables(kind: str, number: int) -> dict[str, str]:
    """What a controller sets in pod `number` of two with two processes each."""
    if kind == "jobset":
        return {"JOB_COMPLETION_INDEX": str(number)}
    pet = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": str(number)}
    pet |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": "29411"}
    return pet


HYPERPARAMETERS = {
    "HIDDEN_SIZE": "64",
    "INTERMEDIATE_SIZE": "128",
    "N_HEADS": "4",
    "N_KV_HEADS": "2",
    "N_LAYERS": "2",
    "SEQ_LEN": "64",
    "GLOBAL_BATCH_SIZE": "8",
    "MICRO_BATCH_SIZE": "2",
    "MAX_STEPS": "20",
    "WARMUP_STEPS": "3",
}


@pytest.mark.slow
def test_ranks_of_a_sagemaker_container(tmp_path: Path, node: dict[str, str]) -> None:
    """The container of a trn1.2xlarge with two processes; its recipe is made of hyperparameters."""
    make_stores(tmp_path, {"store": 60})
    root = tmp_path / "ml"
    config, data = root / "input" / "config", root / "input" / "data"
    for folder in (config, data):
        folder.mkdir(parents=True)
    (data / "train").symlink_to(tmp_path / "store")
    (config / "hyperparameters.json").write_text(json.dumps(HYPERPARAMETERS))
    (config / "inputdataconfig.json").write_text(json.dumps({"train": {"TrainingInputMode": "File"}}))
    host = {"current_host": "algo-1", "hosts": ["algo-1"], "current_instance_type": "ml.trn1.2xlarge"}
    (config / "resourceconfig.json").write_text(json.dumps(host))
    command = [sys.executable, "-m", "lt_launch", "launch", "sagemaker-entrypoint", "--root", str(root)]
    env = node | {"LT_PROCS_PER_NODE": "2"}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert cores(tmp_path) == {"core-0": "0 of 2", "core-1": "1 of 2"}, done.stdout + done.stderr
