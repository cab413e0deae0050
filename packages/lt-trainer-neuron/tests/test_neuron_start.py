"""Each rank gets a NeuronCore of its own, however it is started, by a stand-in for torch-xla and the runtime."""

import json
import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lt_test_helpers.neuron_start import START, recipe

RANKS = 2  # of the recipe
STARTED = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"]


@pytest.fixture
def node(tmp_path: Path) -> dict[str, str]:
    """The environment of a Trainium node, and a recipe in its folder."""
    (tmp_path / "run.toml").write_text(recipe("runs/run", nodes=1))
    clean = {name: value for name, value in os.environ.items() if name not in STARTED}
    return clean | {"PYTHONPATH": str(START), "NEURON_NODE": str(tmp_path), "OMP_NUM_THREADS": "1"}


def reserved(node: dict[str, str]) -> dict[str, str]:
    """The rank that each core has."""
    return {path.name: path.read_text() for path in sorted(Path(node["NEURON_NODE"]).glob("core-*"))}


def run_ranks(node: dict[str, str]) -> None:
    """Start each rank with the variables of a launcher that is not torchrun, such as srun's wrapper."""
    ranks = []
    for rank in range(RANKS):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
        place |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(RANKS))
        command = [sys.executable, "-m", "lt_trainer", "run", "run.toml"]
        cwd = node["NEURON_NODE"]
        ranks.append(subprocess.Popen(command, env=node | place, cwd=cwd, stderr=subprocess.PIPE, text=True))
    told = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * RANKS, told


@pytest.mark.parametrize("visible", ["", "4-5"])
def test_ranks_that_torchrun_did_not_start_have_a_core_each(node: dict[str, str], visible: str) -> None:
    run_ranks(node | ({"NEURON_RT_VISIBLE_CORES": visible} if visible else {}))
    first = int(visible[:1] or 0)
    assert reserved(node) == {f"core-{first + rank}": f"{rank} of {RANKS}" for rank in range(RANKS)}


@pytest.mark.slow
def test_ranks_of_torchrun_have_a_core_each(node: dict[str, str]) -> None:
    command = [sys.executable, "-m", "lt_trainer", "torchrun", "run.toml", "--nproc-per-node", str(RANKS)]
    done = subprocess.run(command, env=node, cwd=node["NEURON_NODE"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert reserved(node) == {f"core-{rank}": f"{rank} of {RANKS}" for rank in range(RANKS)}


PLACE = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"}
ENVIRONMENTS = [
    {},
    PLACE,
    PLACE | {"TORCHELASTIC_RUN_ID": "x"},
    PLACE | {"TORCHELASTIC_RUN_ID": "x", "NEURON_RT_VISIBLE_CORES": "1,8-10", "NEURON_RT_NUM_CORES": "4"},
    PLACE | {"TORCHELASTIC_RUN_ID": "x", "NEURON_PJRT_PROCESSES_NUM_DEVICES": "1,1"},
    {"TORCHELASTIC_RUN_ID": "x", "NEURON_RT_VISIBLE_CORES": "3", "NEURON_RT_ROOT_COMM_ID": "mine:1"},
]
REAL = """
import json, os, sys
import torch_xla  # without libneuronxla it sets none of these
from torch_xla._internal import neuron
found = []
for environ in json.loads(sys.argv[1]):
    os.environ.clear()
    os.environ.update(environ)
    neuron.configure_pjrt_environment()
    found.append(dict(os.environ))
print(json.dumps(found))
"""


@pytest.mark.skipif(find_spec("_XLAC") is None, reason="torch-xla is not installed (extra xla-cpu)")
def test_the_stand_in_sets_what_torch_xla_sets() -> None:
    configure = runpy.run_path(str(START / "neuron_rules.py"))["configure"]
    command = [sys.executable, "-c", REAL, json.dumps(ENVIRONMENTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PJRT_DEVICE": "CPU"})
    for given, real in zip(ENVIRONMENTS, json.loads(done.stdout.splitlines()[-1]), strict=True):
        made = dict(given)
        configure(made)
        assert made == real
