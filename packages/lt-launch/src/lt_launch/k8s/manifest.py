"""Pure, deterministic construction of Kubernetes manifests as plain values, checked before use.

The resolved recipe travels as a ConfigMap. Each pod starts `lt train torchrun` with the rendezvous that the controller
of its kind sets, which grants ranks their full grace period and preserves exit code 75; with HyperPod (`hyperpod`) its
own agent starts the ranks.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

from lt_launch.job import Job
from lt_launch.k8s.hyperpod import hyperpod_job
from lt_launch.k8s.jobset import job_set
from lt_launch.k8s.options import KubernetesOptions
from lt_launch.k8s.pod import RECIPE_MOUNT_PATH, SHM_PATH, image_of, termination_grace_period
from lt_launch.k8s.trainjob import DEFAULT_GRACE_PERIOD_S, TRAINER_VERSIONS, train_job
from lt_trainer.errors import RecipeError

LABEL = re.compile(r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")
"""Names that Kubernetes takes as part of a host name (RFC 1035)."""
MAX_LABEL_CHARS = 63
IMAGE = re.compile(r"[a-z0-9][a-zA-Z0-9._:/@-]*[a-zA-Z0-9]")
POD_NAME_SUFFIXES = {"trainjob": "-node-0-{}-abcde", "jobset": "-node-0-{}-abcde"}
"""What follows a job's name in that of a pod: replicated job, its index, the pod's index, five letters."""
PET_VARIABLES = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
OPERATOR_VARIABLES = {"trainjob": PET_VARIABLES, "jobset": ("JOB_COMPLETION_INDEX",)}
MAX_VARIABLES = 128
"""Variables that a TrainJob takes."""


def manifests(job: Job, options: KubernetesOptions, python: str) -> list[dict[str, Any]]:
    """Return the ConfigMap of the recipe and the manifest of its training job.

    Raises:
        RecipeError: no registry image, no recipe, or a value that Kubernetes or the operator rejects.
    """
    _check_image(job, options)
    if not job.recipe:
        raise RecipeError("only a training job can be rendered", values={"job.name": job.name})
    _check_name(job, options)
    _check_folders(job, options)
    _check_variables(job, options)
    if options.kind == "hyperpod":
        return [_config_map(job, options), hyperpod_job(job, options)]
    make = {"trainjob": train_job, "jobset": job_set}[options.kind]
    return [_config_map(job, options), make(job, options, python)]


def manifest_notes(job: Job, options: KubernetesOptions) -> tuple[str, ...]:
    """Return what the chosen kind or version of the operator cannot do for this job."""
    if options.kind != "trainjob":
        return ()
    version, notes = TRAINER_VERSIONS[options.trainer_version], []
    needed = termination_grace_period(job)
    if not version.has_grace_period and needed > DEFAULT_GRACE_PERIOD_S:
        notes.append(
            f"Kubeflow Trainer {options.trainer_version} leaves the grace period of pods to the runtime "
            f"{options.runtime}: {DEFAULT_GRACE_PERIOD_S} s unless its pod template has terminationGracePeriodSeconds; "
            f"a save may take {job.grace_period_s:g} s, so set it to {needed} there"
        )
    if not version.has_deadline and job.time_limit_s:
        notes.append(f"Kubeflow Trainer {options.trainer_version} has no time limit; job.time_limit is not kept")
    return tuple(notes)


def _check_image(job: Job, options: KubernetesOptions) -> None:
    image = image_of(job, options)
    name = "k8s.image" if options.image else "job.container.image"
    remedy = "name one in k8s.image or job.container.image, such as REGISTRY/lt:1"
    if not image or image.startswith((".", "/")) or image.endswith(".sqsh"):
        raise RecipeError("a pod needs an image of a registry", values={name: image}, remedy=remedy)
    if not IMAGE.fullmatch(image):
        raise RecipeError("is not the name of an image", values={name: image}, remedy=remedy)


def _check_name(job: Job, options: KubernetesOptions) -> None:
    """Check the name; except with HyperPod that of the longest pod must be a host name, too."""
    if not LABEL.fullmatch(job.name):
        remedy = "use lowercase letters, digits and '-', and start with a letter"
        raise RecipeError("is not a valid Kubernetes name", values={"job.name": job.name}, remedy=remedy)
    longest = MAX_LABEL_CHARS - len(POD_NAME_SUFFIXES.get(options.kind, "").format(job.nodes - 1))
    if len(job.name) > longest:
        problem = f"is longer than {longest} characters, and the names of {job.nodes} pods are made of it"
        raise RecipeError(problem, values={"job.name": job.name}, remedy="shorten it")


def _check_folders(job: Job, options: KubernetesOptions) -> None:
    out = tomllib.loads(job.recipe)["run"]["dir"]
    if not options.persistent_volume_claim or not out.startswith(f"{options.mount_path.rstrip('/')}/"):
        raise RecipeError(
            "pods share no folder for checkpoints",
            values={
                "k8s.persistent_volume_claim": options.persistent_volume_claim,
                "k8s.mount_path": options.mount_path,
                "run.dir": out,
            },
            remedy="name the PersistentVolumeClaim, and put run.dir below k8s.mount_path",
        )
    if options.mount_path.rstrip("/") in ("", RECIPE_MOUNT_PATH, SHM_PATH):
        raise RecipeError(
            "is the folder of something else in the pods",
            values={"k8s.mount_path": options.mount_path},
            remedy="mount the file system elsewhere, such as at /fsx",
        )


def _check_variables(job: Job, options: KubernetesOptions) -> None:
    if taken := [name for name in job.env if name in OPERATOR_VARIABLES.get(options.kind, ())]:
        values = {f"job.env.{name}": job.env[name] for name in taken}
        raise RecipeError(f"is set by the controller of a {options.kind}", values=values, remedy="leave it out")
    if options.kind == "trainjob" and len(job.env) > MAX_VARIABLES:
        values = {"job.env": f"{len(job.env)} variables"}
        raise RecipeError(f"a TrainJob takes {MAX_VARIABLES}", values=values, remedy="put some into the image")


def _config_map(job: Job, options: KubernetesOptions) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{job.name}-recipe", "namespace": options.namespace},
        "data": {"run.toml": job.recipe},
    }
