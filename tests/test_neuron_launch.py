"""Trainium ranks of `lt launch` get a NeuronCore each, by a stand-in for torch-xla and the runtime."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

START = Path(__file__).parents[1] / "packages" / "lt-trainer-neuron" / "tests" / "neuron_start"
RECIPE = """
[run]
engine = "neuron"
dir = "trained"
[model]
preset = "llama2-7b"
vocab_size = 32000
[data]
synthetic = true
document_mask = false
seq_len = 4096
[batch]
global_batch_size = 2
micro_batch_size = 1
[parallel]
tp = 2
[engine.neuron]
num_neuroncores = 2
"""


@pytest.mark.guarantee("neuron-cores")
def test_a_launched_rank_has_its_own_core(tmp_path: Path) -> None:
    """The ranks end where they have loaded torch-xla."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "run.toml").write_text(
        '[job]\nargv = ["python", "-m", "lt_trainer", "run", "recipe.toml"]\nprocs_per_node = 2\n'
        f'[job.env]\nPYTHONPATH = "{START}"\nNEURON_NODE = "{tmp_path}"\n'
    )
    command = [sys.executable, "-m", "lt_launch", "launch", "run", "run.toml"]
    environ = os.environ | {"LT_LAUNCH_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name: path.read_text() for path in tmp_path.glob("core-*")} == {"core-0": "0 of 2", "core-1": "1 of 2"}
