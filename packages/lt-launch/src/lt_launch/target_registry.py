"""Table of targets with their factories and requirements; imports no target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["TARGETS", "TargetInfo"]


@dataclass(frozen=True, kw_only=True)
class TargetInfo:
    """Factory and profile table of a target."""

    factory: str
    """`module:function`; the function has no parameters."""
    profile_table: str
    help: str
    install: str = ""
    """Requirement to install for it with pip."""


TARGETS: Mapping[str, TargetInfo] = {
    "local": TargetInfo(factory="lt_launch.local:make_target", profile_table="local", help="processes on this machine"),
    "ssh": TargetInfo(factory="lt_launch.ssh:make_target", profile_table="ssh", help="hosts that ssh reaches"),
    "slurm": TargetInfo(factory="lt_launch.slurm:make_target", profile_table="slurm", help="sbatch on a Slurm cluster"),
    "sagemaker": TargetInfo(
        factory="lt_launch.sagemaker:make_target",
        profile_table="sagemaker",
        help="a SageMaker training job",
        install="lt-launch[sagemaker]",
    ),
    "sagemaker-local": TargetInfo(
        factory="lt_launch.sagemaker:make_local_target",
        profile_table="sagemaker",
        help="SageMaker's contract on this machine, without docker",
    ),
    "k8s": TargetInfo(
        factory="lt_launch.k8s:make_target",
        profile_table="k8s",
        help="Kubernetes YAML (render only)",
        install="lt-launch[k8s]",
    ),
}
