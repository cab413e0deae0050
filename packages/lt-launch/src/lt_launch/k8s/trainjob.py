"""TrainJob of Kubeflow Trainer, in the form of each version of its CRD.

The versions agree on the trainer (image, command, environment, resources) and differ in what they take for its pods,
which the runtime's template describes otherwise:

    2.0    spec.podSpecOverrides[]
    2.1    spec.podTemplateOverrides[].spec
    2.2    spec.runtimePatches[].trainingRuntimeSpec.template.spec.replicatedJobs[].template.spec.template.spec
    2.3    the same, and the grace period in it, which the others leave to the runtime

The API server drops fields that its CRD does not have, without a word. The operator sets PET_MASTER_ADDR,
PET_MASTER_PORT and PET_NODE_RANK in each pod.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lt_launch.job import Job
from lt_launch.k8s.options import KubernetesOptions
from lt_launch.k8s.pod import (
    environment,
    image_of,
    metadata,
    resources,
    termination_grace_period,
    torchrun_command,
    volumes_and_mounts,
)

REPLICATED_JOB = CONTAINER = "node"
"""Names in the runtimes of Kubeflow Trainer: the replicated job of the trainer, and its container."""
MANAGER = "lt-launch/render"
DEFAULT_GRACE_PERIOD_S = 30
"""Grace period of a pod whose template names none, by Kubernetes."""


@dataclass(frozen=True, kw_only=True)
class TrainerVersion:
    """Differences of one version of the CRD."""

    wrap: Callable[[dict[str, Any]], dict[str, Any]]
    """Makes the part of the job's spec that holds a pod's fields."""
    has_grace_period: bool = False
    """True if a pod's fields may include terminationGracePeriodSeconds."""
    has_deadline: bool = False
    """True if the job's spec may include activeDeadlineSeconds."""


def _pod_spec_overrides(pod: dict[str, Any]) -> dict[str, Any]:
    return {"podSpecOverrides": [{"targetJobs": [{"name": REPLICATED_JOB}], **pod}]}


def _pod_template_overrides(pod: dict[str, Any]) -> dict[str, Any]:
    return {"podTemplateOverrides": [{"targetJobs": [{"name": REPLICATED_JOB}], "spec": pod}]}


def _runtime_patches(pod: dict[str, Any]) -> dict[str, Any]:
    patched_job = {"name": REPLICATED_JOB, "template": {"spec": {"template": {"spec": pod}}}}
    template = {"spec": {"replicatedJobs": [patched_job]}}
    return {"runtimePatches": [{"manager": MANAGER, "trainingRuntimeSpec": {"template": template}}]}


TRAINER_VERSIONS: Mapping[str, TrainerVersion] = {
    "2.0": TrainerVersion(wrap=_pod_spec_overrides),
    "2.1": TrainerVersion(wrap=_pod_template_overrides),
    "2.2": TrainerVersion(wrap=_runtime_patches, has_deadline=True),
    "2.3": TrainerVersion(wrap=_runtime_patches, has_deadline=True, has_grace_period=True),
}
"""Versions of Kubeflow Trainer by `k8s.trainer_version`."""


def train_job(job: Job, options: KubernetesOptions, python: str) -> dict[str, Any]:
    """Return the manifest.

    Args:
        job: the training job.
        options: options of the profile; `trainer_version` decides the form.
        python: interpreter in the image.
    """
    version = TRAINER_VERSIONS[options.trainer_version]
    volumes, mounts = volumes_and_mounts(job, options)
    pod: dict[str, Any] = {"volumes": volumes, "containers": [{"name": CONTAINER, "volumeMounts": mounts}]}
    if version.has_grace_period:
        pod["terminationGracePeriodSeconds"] = termination_grace_period(job)
    if options.service_account:
        pod["serviceAccountName"] = options.service_account
    spec: dict[str, Any] = {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "ClusterTrainingRuntime",
            "name": options.runtime,
        },
        "trainer": {
            "image": image_of(job, options),
            "command": torchrun_command(
                job,
                python,
                node_rank="$(PET_NODE_RANK)",
                master_addr="$(PET_MASTER_ADDR)",
                master_port="$(PET_MASTER_PORT)",
            ),
            "numNodes": job.nodes,
            "numProcPerNode": job.procs_per_node,
            "env": environment(job),
            "resourcesPerNode": resources(job, options),
        },
        **version.wrap(pod),
    }
    if version.has_deadline and job.time_limit_s:
        spec["activeDeadlineSeconds"] = job.time_limit_s
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata(job, options),
        "spec": spec,
    }
