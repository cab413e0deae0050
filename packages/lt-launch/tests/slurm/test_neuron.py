"""Trainium ranks of a real cluster get a NeuronCore each, by a stand-in for torch-xla and the runtime."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lt_launch.slurm.target import SlurmTarget
from lt_launch.target import Launch
from lt_test_helpers.neuron_start import START, recipe

JOB = """
[job]
name = "cores"
recipe = "recipe.toml"
nodes = 2
procs_per_node = 2
env = {{ PYTHONPATH = "{start}" }}
[profile]
setup = [
    "export NEURON_NODE={folder}/$SLURMD_NODENAME; mkdir -p $NEURON_NODE",
    "echo root $NEURON_RT_ROOT_COMM_ID, not $MASTER_ADDR:$MASTER_PORT",
]
"""


def test_each_rank_has_its_own_core_of_its_node(cluster: Any, submit: Callable[..., Launch], tmp_path: Path) -> None:
    """The ranks end where they have loaded torch-xla, so the run is none that has finished."""
    (tmp_path / "recipe.toml").write_text(recipe("run", nodes=2))
    made = submit(JOB.format(start=START, folder=tmp_path))
    cluster.wait_for_end(made.job_ids["cores"])
    logs = ["\n".join(SlurmTarget().logs(made, stage="cores", rank=rank, follow=False)) for rank in range(4)]
    found = {path.parent.name + "/" + path.name: path.read_text() for path in tmp_path.glob("n?/core-*")}
    expected = {f"n{1 + rank // 2}/core-{rank % 2}": f"{rank} of 4" for rank in range(4)}
    assert found == expected, logs
    (root,) = {log.splitlines()[0] for log in logs}
    first, second = root.removeprefix("root ").split(", not ")
    assert first.startswith("127.0.0.2:")
    assert int(first.rpartition(":")[2]) == int(second.rpartition(":")[2]) + 1, "a port of its own at the same node"
