"""Supported instance types with the number and kind of their devices."""

from dataclasses import dataclass

__all__ = ["INSTANCE_TYPES", "PUBLISHED_INSTANCE_TYPES", "InstanceType", "device_count"]


@dataclass(frozen=True)
class InstanceType:
    """Devices of one instance type."""

    devices: int
    """Ranks per host: GPUs or logical NeuronCores."""
    engine: str


INSTANCE_TYPES = {
    "ml.g5.xlarge": InstanceType(1, "gpu"),
    "ml.g5.12xlarge": InstanceType(4, "gpu"),
    "ml.g5.48xlarge": InstanceType(8, "gpu"),
    "ml.g6.xlarge": InstanceType(1, "gpu"),
    "ml.g6.12xlarge": InstanceType(4, "gpu"),
    "ml.g6.48xlarge": InstanceType(8, "gpu"),
    "ml.p4d.24xlarge": InstanceType(8, "gpu"),
    "ml.p4de.24xlarge": InstanceType(8, "gpu"),
    "ml.p5.4xlarge": InstanceType(1, "gpu"),
    "ml.p5.48xlarge": InstanceType(8, "gpu"),
    "ml.p5e.48xlarge": InstanceType(8, "gpu"),
    "ml.p5en.48xlarge": InstanceType(8, "gpu"),
    "ml.p6-b200.48xlarge": InstanceType(8, "gpu"),
    "ml.trn1.2xlarge": InstanceType(2, "neuron"),
    "ml.trn1.32xlarge": InstanceType(32, "neuron"),
    "ml.trn1n.32xlarge": InstanceType(32, "neuron"),
    "ml.trn2.48xlarge": InstanceType(64, "neuron"),
}
"""From AWS's instance pages, 2026-11; trn2 with two physical cores per logical core, Neuron's default."""

PUBLISHED_INSTANCE_TYPES = {
    "gpu": ("ml.p4de.24xlarge", "ml.p5.48xlarge", "ml.p5e.48xlarge", "ml.p5en.48xlarge"),
    "neuron": ("ml.trn1.2xlarge", "ml.trn1.32xlarge", "ml.trn1n.32xlarge"),
}
"""Instance types of the published algorithm, by the engine in its image."""


def device_count(instance_type: str) -> int:
    """Return the devices of one instance; 0 for an unknown type."""
    known = INSTANCE_TYPES.get(instance_type)
    return known.devices if known else 0
