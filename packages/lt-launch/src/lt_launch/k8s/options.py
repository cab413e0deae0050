"""Options in the table `[k8s]` of a profile."""

from typing import Literal

from lt_launch.job import Line, Word
from lt_trainer.config.section import Section, option


class KubernetesOptions(Section, table="k8s"):
    """Options of a manifest beyond the job itself; names are checked by the cluster."""

    kind: Literal["trainjob", "jobset"] = option(
        "trainjob", "trainjob = TrainJob of Kubeflow Trainer 2.3, jobset = JobSet of Kubernetes"
    )
    namespace: Word = option("default", "namespace")
    runtime: Word = option("torch-distributed", "trainjob: the ClusterTrainingRuntime")
    persistent_volume_claim: Word = option("", "PersistentVolumeClaim of the file system that all pods share")
    mount_path: Line = option("/fsx", "its mount path in the pods", pattern="^/")
    image: Line = option("", "image in a registry, if job.container.image is a file for pyxis or enroot")
    efa_per_node: int = option(0, "EFA devices per pod", ge=0)
    queue_name: Word = option("", "queue of Kueue")
    service_account: Word = option("", "service account of the pods")
