"""Pure, deterministic construction of Kubernetes manifests as plain values.

The resolved recipe travels as a ConfigMap. Each pod starts `lt train torchrun` with the rendezvous that the controller
of its kind sets, which grants ranks their full grace period and preserves exit code 75; with HyperPod its own agent
starts the ranks. What names may look like, kubectl says.
"""

from __future__ import annotations

import tomllib
from typing import Any

from lt_launch.job import Job
from lt_launch.k8s.kinds import hyperpod_job, job_set, train_job
from lt_launch.k8s.options import KubernetesOptions
from lt_launch.k8s.pod import RECIPE_MOUNT_PATH, SHM_PATH
from lt_trainer.errors import RecipeError

KINDS = {"trainjob": train_job, "jobset": job_set, "hyperpod": hyperpod_job}
CONTROLLER_VARIABLES = {"trainjob": "PET_", "jobset": "JOB_COMPLETION_INDEX"}
"""Beginning of the variables that the controller of a kind sets in its pods."""


def manifests(job: Job, options: KubernetesOptions, python: str) -> list[dict[str, Any]]:
    """Return the ConfigMap of the recipe and the manifest of its training job.

    Raises:
        RecipeError: no registry image, no recipe, no shared folder, or a variable that the controller sets.
    """
    _check(job, options)
    metadata: dict[str, Any] = {"name": job.name, "namespace": options.namespace}
    if options.queue_name:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": options.queue_name}
    config = {"name": f"{job.name}-recipe", "namespace": options.namespace}
    made = KINDS[options.kind](job, options, python)
    spec = made.pop("spec")
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": config, "data": {"run.toml": job.recipe}},
        {**made, "metadata": metadata, "spec": spec},
    ]


def _check(job: Job, options: KubernetesOptions) -> None:
    image, name = options.image or job.container.image, "k8s.image" if options.image else "job.container.image"
    if not image or image.startswith((".", "/")) or image.endswith(".sqsh"):
        remedy = "name one in k8s.image or job.container.image, such as REGISTRY/lt:1"
        raise RecipeError("a pod needs an image of a registry", values={name: image}, remedy=remedy)
    if not job.recipe:
        raise RecipeError("only a training job can be rendered", values={"job.name": job.name})
    claim, mount, out = options.persistent_volume_claim, options.mount_path, tomllib.loads(job.recipe)["run"]["dir"]
    if not claim or not out.startswith(f"{mount.rstrip('/')}/"):
        raise RecipeError(
            "pods share no folder for checkpoints",
            values={"k8s.persistent_volume_claim": claim, "k8s.mount_path": mount, "run.dir": out},
            remedy="name the PersistentVolumeClaim, and put run.dir below k8s.mount_path",
        )
    if mount.rstrip("/") in ("", RECIPE_MOUNT_PATH, SHM_PATH):
        remedy = "mount the file system elsewhere, such as at /fsx"
        raise RecipeError(
            "is the folder of something else in the pods", values={"k8s.mount_path": mount}, remedy=remedy
        )
    reserved = CONTROLLER_VARIABLES.get(options.kind)
    if taken := {f"job.env.{name}": value for name, value in job.env.items() if reserved and name.startswith(reserved)}:
        raise RecipeError(f"is set by the controller of a {options.kind}", values=taken, remedy="leave it out")
