"""Environment of a run: interpreter, machine, package versions, lt's git commit, and selected environment variables.

Only the variables in `RECORDED_VARIABLES` are recorded, because environments contain secrets. Nothing heavy is
imported: versions are read from package metadata. Cost: about 20 ms, of which two calls of git.
"""

import os
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lt_trainer.constants import GIB

PACKAGES = """lt-ckpt lt-data lt-launch lt-model lt-trainer lt-trainer-gpu lt-trainer-neuron flash-attn fsspec
neuronx-cc neuronx-distributed numpy pydantic safetensors tokenizers torch torch-neuronx torch-xla
transformers xxhash"""
RECORDED_VARIABLES = """ATEN_CPU_CAPABILITY CUDA_VISIBLE_DEVICES LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
MKL_NUM_THREADS NEURON_CC_FLAGS NEURON_RT_NUM_CORES OMP_NUM_THREADS PYTORCH_ALLOC_CONF
PYTORCH_CUDA_ALLOC_CONF SLURM_JOB_ID SLURM_JOB_NUM_NODES TRAINING_JOB_NAME WORLD_SIZE"""


def describe_environment(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the environment of this process as plain values for JSON; "commit" only in a git checkout of lt."""
    environ = os.environ if environ is None else environ
    packages: dict[str, str] = {}
    for name in PACKAGES.split():
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    commit = _commit()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hostname": platform.node(),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB, 2),
        "packages": packages,
        "variables": {name: environ[name] for name in RECORDED_VARIABLES.split() if name in environ},
    } | ({"commit": commit} if commit else {})


def _commit() -> str:
    """Return the commit of the checkout that has this file; "" if git does not track it."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", Path(__file__).name], check=True, capture_output=True)
        return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor name if the system reports it, otherwise the architecture."""
    rows = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    names = [row.partition(":")[2].strip() for row in rows if row.startswith("model name")]
    return names[0] if names else platform.machine()
