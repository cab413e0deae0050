"""Trainium ranks of hosts reached over ssh get a NeuronCore each, by a stand-in for torch-xla and the runtime."""

import json
import sys

import pytest

from lt_test_helpers.neuron_start import START, recipe

PROCESSES = f"argv = {json.dumps([sys.executable, '-m', 'lt_trainer', 'run', 'recipe.toml'])}"


@pytest.mark.slow
@pytest.mark.parametrize(("what", "code"), [(PROCESSES, 0), ('recipe = "recipe.toml"', 70)])
def test_each_rank_has_its_own_core_of_its_host(net, what: str, code: int) -> None:
    """As plain processes, and under torchrun, where the end of a run that has not trained is a failure."""
    (net.folder / "recipe.toml").write_text(recipe("runs/run", nodes=2))
    (net.folder / "run.toml").write_text(
        f'[job]\nname = "x"\n{what}\nnodes = 2\nprocs_per_node = 2\n'
        f'[job.env]\nPYTHONPATH = "{START}"\nOMP_NUM_THREADS = "1"\n'
    )
    for name in "ab":
        (net.folder / name).mkdir()
    net.profile('setup = ["export NEURON_NODE=$PWD/$(hostname)"]')
    net.lt("run", "run.toml", "--on", "ssh", "--hostfile", net.hostfile("a", "b"), code=code)
    found = {f"{path.parent.name}/{path.name}": path.read_text() for path in net.folder.glob("[ab]/core-*")}
    assert found == {f"{'ab'[rank // 2]}/core-{rank % 2}": f"{rank} of 4" for rank in range(4)}
