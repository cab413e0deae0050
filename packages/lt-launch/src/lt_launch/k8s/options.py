"""The table `[k8s]` of a profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lt_trainer.errors import RecipeError
from lt_trainer.fields import check_types, option

__all__ = ["KubernetesOptions"]


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """What a manifest needs beside the job itself."""

    kind: Literal["trainjob", "hyperpod"] = option(
        "trainjob", "trainjob = Kubeflow Trainer's TrainJob, hyperpod = HyperPodPyTorchJob of SageMaker HyperPod on EKS"
    )
    namespace: str = option("default", "namespace")
    runtime: str = option("torch-distributed", "trainjob: the ClusterTrainingRuntime")
    claim: str = option("", "PersistentVolumeClaim of the file system that all pods share")
    mount: str = option("/fsx", "where pods see it")
    image: str = option("", "the image in a registry, where job.container.image is a file for pyxis or enroot")
    efa_per_node: int = option(0, "EFA devices of a pod")
    queue: str = option("", "hyperpod: the Kueue queue of the task governance")
    service_account: str = option("", "service account of the pods")

    def __post_init__(self) -> None:
        check_types(self, "k8s")
        if self.efa_per_node < 0:
            raise RecipeError("must be at least 0", values={"k8s.efa_per_node": self.efa_per_node})
        if not self.mount.startswith("/"):
            raise RecipeError(
                "is not an absolute path", values={"k8s.mount": self.mount}, remedy="write it with / in front"
            )
