"""Kubernetes target: YAML of a training job of Kubeflow, JobSet or HyperPod; kubectl submits it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lt_launch.k8s.target import KubernetesTarget

__all__ = ["make_target"]


def make_target() -> "KubernetesTarget":
    """Return the target."""
    from lt_launch.k8s.target import KubernetesTarget

    return KubernetesTarget()
