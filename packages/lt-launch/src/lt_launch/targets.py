"""The table of targets: where each is made and what it needs. It imports nothing, so that everything may import it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["BACKENDS", "KnownBackend"]


@dataclass(frozen=True, kw_only=True)
class KnownBackend:
    """Where a backend is made, and the profile table that is its own."""

    factory: str
    """`module:function`; the function takes nothing."""
    profile_table: str
    help: str
    needs: str = ""
    """What `pip install` brings it."""


BACKENDS: Mapping[str, KnownBackend] = {
    "local": KnownBackend(factory="lt_launch.local:backend", profile_table="local", help="processes on this machine"),
    "ssh": KnownBackend(factory="lt_launch.ssh:backend", profile_table="ssh", help="hosts that ssh reaches"),
    "slurm": KnownBackend(factory="lt_launch.slurm:backend", profile_table="slurm", help="sbatch on a Slurm cluster"),
    "sagemaker": KnownBackend(
        factory="lt_launch.sagemaker:backend",
        profile_table="sagemaker",
        help="a SageMaker training job",
        needs="lt-launch[sagemaker]",
    ),
    "sagemaker-local": KnownBackend(
        factory="lt_launch.sagemaker:local_backend",
        profile_table="sagemaker",
        help="SageMaker's contract on this machine, without docker",
    ),
    "k8s": KnownBackend(
        factory="lt_launch.k8s:backend",
        profile_table="k8s",
        help="Kubernetes YAML (render only)",
        needs="lt-launch[k8s]",
    ),
}
