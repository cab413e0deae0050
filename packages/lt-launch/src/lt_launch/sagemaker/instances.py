"""The instance types that lt trains on: how many devices each has, and of which kind."""

from dataclasses import dataclass

__all__ = ["INSTANCES", "PUBLISHED", "Instance", "devices_of"]


@dataclass(frozen=True)
class Instance:
    """One instance type."""

    devices: int
    """Ranks that one host runs: GPUs, or NeuronCores."""
    engine: str


INSTANCES = {
    "ml.g5.xlarge": Instance(1, "gpu"),
    "ml.g5.12xlarge": Instance(4, "gpu"),
    "ml.g5.48xlarge": Instance(8, "gpu"),
    "ml.g6.xlarge": Instance(1, "gpu"),
    "ml.g6.12xlarge": Instance(4, "gpu"),
    "ml.g6.48xlarge": Instance(8, "gpu"),
    "ml.p4d.24xlarge": Instance(8, "gpu"),
    "ml.p4de.24xlarge": Instance(8, "gpu"),
    "ml.p5.4xlarge": Instance(1, "gpu"),
    "ml.p5.48xlarge": Instance(8, "gpu"),
    "ml.p5e.48xlarge": Instance(8, "gpu"),
    "ml.p5en.48xlarge": Instance(8, "gpu"),
    "ml.p6-b200.48xlarge": Instance(8, "gpu"),
    "ml.trn1.2xlarge": Instance(2, "neuron"),
    "ml.trn1.32xlarge": Instance(32, "neuron"),
    "ml.trn1n.32xlarge": Instance(32, "neuron"),
    "ml.trn2.48xlarge": Instance(64, "neuron"),
}
"""AWS's instance pages, 2026-11; trn2 with two physical cores to a logical one, which is Neuron's default."""

PUBLISHED = {
    "gpu": ("ml.p4de.24xlarge", "ml.p5.48xlarge", "ml.p5e.48xlarge", "ml.p5en.48xlarge"),
    "neuron": ("ml.trn1.2xlarge", "ml.trn1.32xlarge", "ml.trn1n.32xlarge"),
}
"""What the published algorithm offers, by the engine in its image."""


def devices_of(instance_type: str) -> int:
    """Devices of one instance; 0 for a type that is not in the table."""
    found = INSTANCES.get(instance_type)
    return found.devices if found else 0
