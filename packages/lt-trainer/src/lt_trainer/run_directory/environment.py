"""Environment of a run: interpreter, machine, package versions, and selected environment variables.

Of lt's own packages the files are hashed, too: a version alone does not tell two commits apart. That takes about 20 ms.
Only the variables in `RECORDED_VARIABLES` are recorded, because environments contain secrets. Nothing heavy is
imported: versions are read from package metadata.
"""

import hashlib
import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lt_trainer.constants import GIB

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

RECORDED_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUDA_VISIBLE_DEVICES",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MKL_NUM_THREADS",
    "NEURON_CC_FLAGS",
    "NEURON_RT_NUM_CORES",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES",
    "TRAINING_JOB_NAME",
    "WORLD_SIZE",
)


def describe_environment(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the environment of this process as plain values for JSON."""
    environ = os.environ if environ is None else environ
    return {
        "python": sys.version.split()[0],
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "hostname": platform.node(),
        "cpu": _cpu_model(),
        "cpu_capability": _cpu_capability(),
        "cpus": os.cpu_count(),
        "memory_gib": _memory_gib(),
        "packages": {name: text for name in PACKAGES if (text := _version(name))},
        "sources": {name: digest for name in PACKAGES if name.startswith("lt-") and (digest := hash_package(name))},
        "variables": {name: environ[name] for name in RECORDED_VARIABLES if name in environ},
    }


def hash_package(package: str) -> str:
    """Return the SHA-256 over the files of an installed package of lt; "" if it is not installed."""
    digest = hashlib.sha256()
    files = list_package_files(package)
    for name, path in files.items():
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest() if files else ""


def list_package_files(package: str) -> dict[str, Path]:
    """Return the files of an installed package of lt but compiled ones, by name within its folder; sorted."""
    spec = find_spec(package.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        return {}
    root = Path(next(iter(spec.submodule_search_locations)))
    paths = (path for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc")
    named = {path.relative_to(root).as_posix(): path for path in paths if "__pycache__" not in path.parts}
    return dict(sorted(named.items()))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor name if the system reports it, otherwise the architecture."""
    if cpuinfo.exists():
        for row in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = row.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


VECTOR_FLAGS = {
    "AVX512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"},
    "AVX2": {"avx2", "fma"},
}
"""Instruction sets for which torch has kernels of its own: results differ between them in the last bits."""


def _cpu_capability(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the best of `VECTOR_FLAGS` that the processor has; "DEFAULT" for none, "" if unknown."""
    if cpuinfo.exists():
        for row in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = row.partition(":")
            if name.strip() == "flags":
                flags = set(value.split())
                return next((kind for kind, needed in VECTOR_FLAGS.items() if needed <= flags), "DEFAULT")
    return ""


def _memory_gib() -> float:
    """Return the memory of the machine in GiB."""
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB, 2)
