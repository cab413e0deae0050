"""Kubernetes: YAML for Kubeflow's TrainJob or HyperPod's PyTorchJob on EKS. Rendered only; kubectl sends it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lt_launch.k8s.target import KubernetesBackend

__all__ = ["backend"]


def backend() -> "KubernetesBackend":
    """The target."""
    from lt_launch.k8s.target import KubernetesBackend

    return KubernetesBackend()
