"""Instance types with an accelerator or disks of their own: devices, engine, size of the disks.

From EC2's own description of its instance types, 2026-11; a test compares the tables with it.
"""

from dataclasses import dataclass

__all__ = ["INSTANCE_TYPES", "LOCAL_STORAGE_GB", "PUBLISHED_INSTANCE_TYPES", "InstanceType"]


@dataclass(frozen=True)
class InstanceType:
    """Devices of one instance type."""

    devices: int
    """Ranks per host: GPUs or logical NeuronCores."""
    engine: str
    max_processes: int
    """Most processes that a host has devices for; more than `devices` where a NeuronCore can be used by halves."""


_G5_SIZES = {"xlarge": 1, "2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "16xlarge": 1}
_G5_SIZES |= {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8}
_G7_SIZES = {"2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "12xlarge": 2, "24xlarge": 4, "48xlarge": 8}
_GPUS = {
    "p2": {"xlarge": 1, "8xlarge": 8, "16xlarge": 16},
    "p3": {"2xlarge": 1, "8xlarge": 4, "16xlarge": 8},
    "p3dn": {"24xlarge": 8},
    "g4dn": {"xlarge": 1, "2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "12xlarge": 4, "16xlarge": 1},
    "g5": _G5_SIZES,
    "g6": _G5_SIZES,
    "g6e": _G5_SIZES,
    "g7": _G7_SIZES,
    "g7e": _G7_SIZES,
    "p4d": {"24xlarge": 8},
    "p4de": {"24xlarge": 8},
    "p5": {"4xlarge": 1, "48xlarge": 8},
    "p5e": {"48xlarge": 8},
    "p5en": {"48xlarge": 8},
    "p6-b200": {"48xlarge": 8},
    "p6-b300": {"48xlarge": 8},
    "p6e-gb200": {"36xlarge": 4},
}
INSTANCE_TYPES = {
    f"ml.{family}.{size}": InstanceType(gpus, "gpu", gpus)
    for family, sizes in _GPUS.items()
    for size, gpus in sizes.items()
} | {
    "ml.trn1.2xlarge": InstanceType(2, "neuron", 2),
    "ml.trn1.32xlarge": InstanceType(32, "neuron", 32),
    "ml.trn1n.32xlarge": InstanceType(32, "neuron", 32),
    "ml.trn2.48xlarge": InstanceType(64, "neuron", 128),  # two physical cores per logical core, Neuron's default
}
"""Every instance type with an accelerator that SageMaker trains on."""

_G5_DISKS = {"xlarge": 250, "2xlarge": 450, "4xlarge": 600, "8xlarge": 900, "16xlarge": 1900}
_G5_DISKS |= {"12xlarge": 3800, "24xlarge": 3800, "48xlarge": 7600}
_DISKS_GB = {
    "g4dn": {"xlarge": 125, "2xlarge": 225, "4xlarge": 225, "8xlarge": 900, "12xlarge": 900, "16xlarge": 900},
    "g5": _G5_DISKS,
    "g6": _G5_DISKS | {"12xlarge": 3760, "16xlarge": 1880, "24xlarge": 3760, "48xlarge": 7520},
    "g6e": _G5_DISKS,
    "g7": {"2xlarge": 440, "4xlarge": 875, "8xlarge": 930, "12xlarge": 1900, "24xlarge": 3800, "48xlarge": 7600},
    "g7e": {"2xlarge": 1900, "4xlarge": 1900, "8xlarge": 1900, "12xlarge": 3800, "24xlarge": 7600, "48xlarge": 15200},
    "p3dn": {"24xlarge": 1800},
    "p4d": {"24xlarge": 8000},
    "p4de": {"24xlarge": 8000},
    "p5": {"4xlarge": 3800, "48xlarge": 30400},
    "p5e": {"48xlarge": 30400},
    "p5en": {"48xlarge": 30400},
    "p6-b200": {"48xlarge": 30400},
    "p6-b300": {"48xlarge": 30400},
    "p6e-gb200": {"36xlarge": 22500},
    "r5d": {"large": 75, "xlarge": 150, "2xlarge": 300, "4xlarge": 600, "8xlarge": 1200, "12xlarge": 1800}
    | {"16xlarge": 2400, "24xlarge": 3600},
    "trn1": {"2xlarge": 474, "32xlarge": 7600},
    "trn1n": {"32xlarge": 7600},
    "trn2": {"48xlarge": 7600},
}
LOCAL_STORAGE_GB = {f"ml.{family}.{size}": gb for family, sizes in _DISKS_GB.items() for size, gb in sizes.items()}
"""Size of the NVMe disks by instance type: SageMaker uses them instead of a volume, and encrypts them by itself."""

PUBLISHED_INSTANCE_TYPES = {
    "gpu": ("ml.p4de.24xlarge", "ml.p5.48xlarge", "ml.p5e.48xlarge", "ml.p5en.48xlarge"),
    "neuron": ("ml.trn1.2xlarge", "ml.trn1.32xlarge", "ml.trn1n.32xlarge"),
}
"""Instance types of the published algorithm, by the engine in its image."""
