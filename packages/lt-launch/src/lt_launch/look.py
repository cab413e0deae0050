"""What a machine has, for `doctor` and the number of processes; imports nothing of ours, so that it can be sent alone.

Devices are counted in /dev, as far as the variables that hide some of them allow.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("lt-launch", "lt-trainer", "lt-trainer-gpu", "lt-trainer-neuron", "torch", "numpy", "neuronx-distributed")
CORES_PER_CHIP = 2
"""NeuronCores of a Trainium1 chip, where its driver does not say how many it has."""


def count_devices(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> int:
    """Count the processes that this machine has devices for: GPUs, else NeuronCores.

    CUDA_VISIBLE_DEVICES, NEURON_RT_VISIBLE_CORES ("0-3,8") and NEURON_RT_NUM_CORES are respected.

    Args:
        root: folder with `dev` and `sys`.
        environ: environment.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([word for word in visible.split(",") if word.strip() and not word.strip().startswith("-")])
    gpus, chips = _numbered_devices("nvidia", root), _numbered_devices("neuron", root)
    if gpus or not chips:
        return len(gpus)
    if cores := environ.get("NEURON_RT_VISIBLE_CORES"):
        spans = (word.partition("-") for word in cores.split(","))
        return sum(int(last or first) - int(first) + 1 for first, _, last in spans)
    if cores := environ.get("NEURON_RT_NUM_CORES"):
        return int(cores)
    return sum(_neuron_cores(root, chip) for chip in chips)


def _numbered_devices(kind: str, root: Path) -> list[str]:
    return sorted(path.name for path in (root / "dev").glob(f"{kind}*") if path.name.removeprefix(kind).isdigit())


def _neuron_cores(root: Path, chip: str) -> int:
    """Return the logical NeuronCores of a chip: two physical cores of Trainium2 are one by default."""
    file = root / "sys" / "class" / "neuron_device" / chip / "core_count"
    cores = int(file.read_text(encoding="ascii")) if file.exists() else CORES_PER_CHIP
    return cores // 2 if cores > CORES_PER_CHIP else cores


def look(folder: str, token: str = "") -> dict[str, Any]:
    """Describe this machine as plain values.

    Args:
        folder: where the run will write; its nearest parent that exists is looked at.
        token: name of a file that another host has just made in that folder.
    """
    place = os.path.abspath(folder)
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    driver = ""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
        driver = lines[0] if lines else ""
    return {
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "executable": sys.executable,
        "devices": count_devices(),
        "driver": driver,
        "folder": place,
        "writable": os.access(place, os.W_OK),
        "free_gib": shutil.disk_usage(place).free / 2**30,
        "sees_token": bool(token) and os.path.exists(os.path.join(folder, token)),
        "packages": packages,
    }
