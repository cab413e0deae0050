"""Table of targets with their classes and requirements; imports no target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TargetInfo:
    """Class and profile table of a target."""

    factory: str
    """`module:class`; the class is made without arguments."""
    profile_table: str
    help: str
    install: str = ""
    """Requirement to install for it with pip."""


TARGETS: Mapping[str, TargetInfo] = {
    "local": TargetInfo(factory="lt_launch.local:LocalTarget", profile_table="local", help="processes on this machine"),
    "ssh": TargetInfo(factory="lt_launch.ssh:SshTarget", profile_table="ssh", help="hosts that ssh reaches"),
    "slurm": TargetInfo(
        factory="lt_launch.slurm.target:SlurmTarget", profile_table="slurm", help="sbatch on a Slurm cluster"
    ),
    "sagemaker": TargetInfo(
        factory="lt_launch.sagemaker.target:SageMakerTarget",
        profile_table="sagemaker",
        help="a SageMaker training job",
        install="lt-launch[sagemaker]",
    ),
    "k8s": TargetInfo(
        factory="lt_launch.k8s.target:KubernetesTarget",
        profile_table="k8s",
        help="Kubernetes YAML (render only)",
        install="lt-launch[k8s]",
    ),
}
