"""Kubernetes target: YAML for Kubeflow's TrainJob or HyperPod's PyTorchJob; kubectl submits it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lt_launch.k8s.target import KubernetesTarget

__all__ = ["make_target"]


def make_target() -> "KubernetesTarget":
    """Return the target."""
    from lt_launch.k8s.target import KubernetesTarget

    return KubernetesTarget()
