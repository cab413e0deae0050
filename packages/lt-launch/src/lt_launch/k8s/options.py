"""Options in the table `[k8s]` of a profile."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from lt_launch.job import check_one_line
from lt_trainer.config.fields import check_types, option
from lt_trainer.errors import RecipeError

__all__ = ["KubernetesOptions"]

SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*")
NAMES = {
    "namespace": True,
    "runtime": True,
    "persistent_volume_claim": False,
    "queue_name": False,
    "service_account": False,
}
"""Options that name an object of the cluster, and whether one must be named."""


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """Options of a manifest beyond the job itself."""

    kind: Literal["trainjob", "pytorchjob", "jobset", "hyperpod"] = option(
        "trainjob",
        "trainjob = Kubeflow Trainer's TrainJob, pytorchjob = PyTorchJob of Kubeflow's training operator, "
        "jobset = JobSet of Kubernetes, hyperpod = HyperPodPyTorchJob of SageMaker HyperPod on EKS",
    )
    namespace: str = option("default", "namespace")
    trainer_version: Literal["2.0", "2.1", "2.2", "2.3"] = option(
        "2.3", "trainjob: version of Kubeflow Trainer in the cluster; each takes the fields of pods elsewhere"
    )
    runtime: str = option("torch-distributed", "trainjob: the ClusterTrainingRuntime")
    persistent_volume_claim: str = option(
        "", "PersistentVolumeClaim of the file system that all pods share", former_name="claim"
    )
    mount_path: str = option("/fsx", "its mount path in the pods", former_name="mount")
    image: str = option("", "image in a registry, if job.container.image is a file for pyxis or enroot")
    efa_per_node: int = option(0, "EFA devices per pod")
    queue_name: str = option("", "queue of Kueue (with hyperpod: of task governance)", former_name="queue")
    service_account: str = option("", "service account of the pods")

    def __post_init__(self) -> None:
        check_types(self, "k8s")
        check_one_line("k8s", self)
        if self.efa_per_node < 0:
            raise RecipeError("must be at least 0", values={"k8s.efa_per_node": self.efa_per_node})
        for name, is_required in NAMES.items():
            value = getattr(self, name)
            if (value or is_required) and not SUBDOMAIN.fullmatch(value):
                raise RecipeError(
                    "is not a valid Kubernetes name",
                    values={f"k8s.{name}": value},
                    remedy="use lowercase letters, digits, '-' and '.', starting and ending with a letter or digit",
                )
        if not self.mount_path.startswith("/") or ":" in self.mount_path:
            raise RecipeError(
                "is not an absolute path", values={"k8s.mount_path": self.mount_path}, remedy="start it with /"
            )
