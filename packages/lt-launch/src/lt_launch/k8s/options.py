"""Options in the table `[k8s]` of a profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lt_trainer.config import check_types, option
from lt_trainer.errors import RecipeError

__all__ = ["KubernetesOptions"]


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """Options of a manifest beyond the job itself."""

    kind: Literal["trainjob", "hyperpod"] = option(
        "trainjob", "trainjob = Kubeflow Trainer's TrainJob, hyperpod = HyperPodPyTorchJob of SageMaker HyperPod on EKS"
    )
    namespace: str = option("default", "namespace")
    runtime: str = option("torch-distributed", "trainjob: the ClusterTrainingRuntime")
    persistent_volume_claim: str = option(
        "", "PersistentVolumeClaim of the file system that all pods share", former_name="claim"
    )
    mount_path: str = option("/fsx", "its mount path in the pods", former_name="mount")
    image: str = option("", "image in a registry, if job.container.image is a file for pyxis or enroot")
    efa_per_node: int = option(0, "EFA devices per pod")
    queue_name: str = option("", "hyperpod: Kueue queue of task governance", former_name="queue")
    service_account: str = option("", "service account of the pods")

    def __post_init__(self) -> None:
        check_types(self, "k8s")
        if self.efa_per_node < 0:
            raise RecipeError("must be at least 0", values={"k8s.efa_per_node": self.efa_per_node})
        if not self.mount_path.startswith("/"):
            raise RecipeError(
                "is not an absolute path", values={"k8s.mount_path": self.mount_path}, remedy="start it with /"
            )
