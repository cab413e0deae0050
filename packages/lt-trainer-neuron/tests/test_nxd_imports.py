"""NxD's real source beside transformers 5, 4.51 and none: it is imported, or what keeps it from that is told.

Needs torch-xla 2.9 and the source of neuronx-distributed 0.18, as `test_nxd_host.py` does, and the package index for
transformers 4.51.
"""

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

SOURCE = os.environ.get("LT_NXD_SOURCE", "")
HOST = Path(__file__).parent / "nxd_host"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path(SOURCE, "neuronx_distributed", "parallel_layers").is_dir(),
        reason="LT_NXD_SOURCE does not name a folder with the source of neuronx_distributed",
    ),
    pytest.mark.skipif(find_spec("torch_xla") is None, reason="torch-xla is not installed (extra xla-cpu)"),
]
ASK = """
import os, sys
if sys.argv[1] == "none":
    sys.modules["transformers"] = None  # an import of it fails as if it were not installed
import torch
from torch_xla.core import xla_env_vars
import stand_ins
sys.meta_path.insert(0, stand_ins.Finder())
torch.classes.__dict__.setdefault("neuron", stand_ins.Inert())
xla_env_vars.HOST_WORLD_SIZE = "HOST_WORLD_SIZE"
os.environ["HOST_WORLD_SIZE"] = "1"
from lt_trainer_neuron.sdk import NotInstalledError, require_installed
try:
    require_installed()
except NotInstalledError as error:
    print("TOLD", error)
else:
    from neuronx_distributed.utils import model_utils
    print("IMPORTED", sorted({"transformers"} & {name for name, module in sys.modules.items() if module}))
"""


def ask(*folders: Path, transformers: str = "") -> str:
    """Return what is printed with these folders before those of the environment."""
    path = os.pathsep.join(map(str, (*folders, HOST, SOURCE)))
    environment = {**os.environ, "PYTHONPATH": path, "PJRT_DEVICE": "CPU", "NXD_CPU_MODE": "1"}
    command = [sys.executable, "-c", ASK, transformers]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


def test_without_transformers_it_is_imported() -> None:
    assert ask(transformers="none") == "IMPORTED []"


def test_with_transformers_4_51_it_is_imported(tmp_path: Path) -> None:
    command = ["uv", "pip", "install", "-q", "--python", sys.executable, "--target", tmp_path, "transformers==4.51.*"]
    installed = subprocess.run(command, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"transformers 4.51 cannot be installed here: {installed.stderr[-300:]}")
    assert ask(tmp_path) == "IMPORTED ['transformers']"


@pytest.mark.skipif(
    find_spec("transformers") is None or not version("transformers").startswith("5."), reason="needs transformers 5"
)
def test_transformers_5_is_told() -> None:
    told = ask()
    assert told.startswith("TOLD neuronx-distributed, which trains on Trainium, cannot be imported")
    assert "transformers.utils.fx" in told
