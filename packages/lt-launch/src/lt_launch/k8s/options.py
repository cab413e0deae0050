"""Options in the table `[k8s]` of a profile."""

from typing import Annotated, Literal

from pydantic import StringConstraints

from lt_launch.job import Line
from lt_trainer.config.section import Section, option

SUBDOMAIN = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
Name = Annotated[str, StringConstraints(pattern=f"^{SUBDOMAIN}$", max_length=253)]
OptionalName = Annotated[str, StringConstraints(pattern=f"^({SUBDOMAIN})?$", max_length=253)]


class KubernetesOptions(Section, table="k8s"):
    """Options of a manifest beyond the job itself."""

    kind: Literal["trainjob", "jobset", "hyperpod"] = option(
        "trainjob",
        "trainjob = Kubeflow Trainer's TrainJob, "
        "jobset = JobSet of Kubernetes, hyperpod = HyperPodPyTorchJob of SageMaker HyperPod on EKS",
    )
    namespace: Name = option("default", "namespace")
    trainer_version: Literal["2.0", "2.1", "2.2", "2.3"] = option(
        "2.3", "trainjob: version of Kubeflow Trainer in the cluster; each takes the fields of pods elsewhere"
    )
    runtime: Name = option("torch-distributed", "trainjob: the ClusterTrainingRuntime")
    persistent_volume_claim: OptionalName = option("", "PersistentVolumeClaim of the file system that all pods share")
    mount_path: str = option("/fsx", "its mount path in the pods", pattern=r"^/[^:\p{Cc}\p{Zl}\p{Zp}]*$")
    image: Line = option("", "image in a registry, if job.container.image is a file for pyxis or enroot")
    efa_per_node: int = option(0, "EFA devices per pod", ge=0)
    queue_name: OptionalName = option("", "queue of Kueue (with hyperpod: of task governance)")
    service_account: OptionalName = option("", "service account of the pods")
