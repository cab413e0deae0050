"""Accelerators that a process on this machine can use, from /dev and the variables that hide some of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

CORES_PER_DEVICE = 2
"""NeuronCores of a Trainium1 chip, where its driver does not say how many it has."""


def count_devices(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> int:
    """Count the processes that this machine has devices for: GPUs, else NeuronCores.

    CUDA_VISIBLE_DEVICES, NEURON_RT_VISIBLE_CORES ("0-3,8") and NEURON_RT_NUM_CORES are respected.

    Args:
        root: folder with `dev` and `sys`.
        environ: replacement of os.environ.
    """
    environ = os.environ if environ is None else environ
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([word for word in visible.split(",") if word.strip() and not word.strip().startswith("-")])
    gpus, chips = numbered_devices("nvidia", root), numbered_devices("neuron", root)
    if gpus or not chips:
        return len(gpus)
    if cores := environ.get("NEURON_RT_VISIBLE_CORES"):
        spans = (word.partition("-") for word in cores.split(","))
        return sum(int(last or first) - int(first) + 1 for first, _, last in spans)
    if cores := environ.get("NEURON_RT_NUM_CORES"):
        return int(cores)
    return sum(_neuron_cores(root, chip) for chip in chips)


def numbered_devices(kind: str, root: Path = Path("/")) -> list[str]:
    """Return the names of the devices /dev/KINDn."""
    return sorted(path.name for path in (root / "dev").glob(f"{kind}*") if path.name.removeprefix(kind).isdigit())


def _neuron_cores(root: Path, chip: str) -> int:
    """Return the logical NeuronCores of a chip: two physical cores of Trainium2 are one by default."""
    file = root / "sys" / "class" / "neuron_device" / chip / "core_count"
    cores = int(file.read_text(encoding="ascii")) if file.exists() else CORES_PER_DEVICE
    return cores // 2 if cores > CORES_PER_DEVICE else cores
