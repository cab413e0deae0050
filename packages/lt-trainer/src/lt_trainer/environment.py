"""What a run ran on: interpreter, machine, package versions, and a short list of environment variables.

Only the variables in `VARIABLES` are recorded, because environments hold secrets. Nothing heavy is imported: versions
come from the packages' metadata.
"""

import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["PACKAGES", "VARIABLES", "environment"]

PACKAGES = (
    "lt-ckpt",
    "lt-data",
    "lt-launch",
    "lt-model",
    "lt-trainer",
    "lt-trainer-gpu",
    "lt-trainer-neuron",
    "flash-attn",
    "fsspec",
    "neuronx-cc",
    "neuronx-distributed",
    "numpy",
    "safetensors",
    "tokenizers",
    "torch",
    "torch-neuronx",
    "torch-xla",
    "transformers",
    "xxhash",
)

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NEURON_CC_FLAGS",
    "NEURON_RT_NUM_CORES",
    "OMP_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES",
    "TRAINING_JOB_NAME",
    "WORLD_SIZE",
)


def environment(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Describe this process's surroundings as plain values for JSON."""
    environ = os.environ if environ is None else environ
    return {
        "python": sys.version.split()[0],
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "hostname": platform.node(),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "memory_gib": _memory_gib(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "variables": {name: environ[name] for name in VARIABLES if name in environ},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name where the system tells it, otherwise its architecture."""
    if cpuinfo.exists():
        for row in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = row.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float:
    """Memory of the machine in GiB."""
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 2)
