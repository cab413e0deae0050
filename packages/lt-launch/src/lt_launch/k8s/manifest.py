"""Pure, deterministic construction of Kubernetes manifests as plain values.

The resolved recipe travels as a ConfigMap. With Kubeflow each pod starts `lt train torchrun` with the rendezvous that
the operator sets (PET_* variables), which grants ranks their full grace period and preserves exit code 75; with
HyperPod its own agent starts the ranks.
"""

from __future__ import annotations

import math
import re
import tomllib
from typing import Any

from lt_launch.job import Job
from lt_launch.k8s.options import KubernetesOptions
from lt_trainer.errors import RecipeError

__all__ = ["manifests"]

NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
RECIPE_MOUNT_PATH = "/etc/lt"
EXIT_MARGIN_S = 30


def manifests(job: Job, options: KubernetesOptions, python: str) -> list[dict[str, Any]]:
    """Return the ConfigMap of the recipe and the manifest of its training job.

    Raises:
        RecipeError: no registry image, no recipe, or a name that Kubernetes rejects.
    """
    image = _image(job, options)
    if not image or image.startswith((".", "/")) or image.endswith(".sqsh"):
        name = "k8s.image" if options.image else "job.container.image"
        remedy = "name one in k8s.image or job.container.image, such as REGISTRY/lt:1"
        raise RecipeError("a pod needs an image of a registry", values={name: image}, remedy=remedy)
    if not job.recipe:
        raise RecipeError("only a training job can be rendered", values={"job.name": job.name})
    if not NAME.fullmatch(job.name):
        remedy = "use lowercase letters, digits and '-'"
        raise RecipeError("is not a valid Kubernetes name", values={"job.name": job.name}, remedy=remedy)
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
    build = _trainjob if options.kind == "trainjob" else _hyperpod
    return [_config_map(job, options), build(job, options, python)]


def _config_map(job: Job, options: KubernetesOptions) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{job.name}-recipe", "namespace": options.namespace},
        "data": {"run.toml": job.recipe},
    }


def _resources(job: Job, options: KubernetesOptions) -> dict[str, Any]:
    """Return the resources of one pod, as limits: devices and huge pages support nothing else."""
    limits: dict[str, Any] = {}
    if job.resources.neuron_cores_per_node or job.engine == "neuron":
        limits["aws.amazon.com/neuroncore"] = job.resources.neuron_cores_per_node or job.procs_per_node
    else:
        limits["nvidia.com/gpu"] = job.resources.gpus_per_node or job.procs_per_node
    if options.efa_per_node:
        limits["vpc.amazonaws.com/efa"] = options.efa_per_node
    if job.resources.cpus_per_proc:
        limits["cpu"] = job.resources.cpus_per_proc * job.procs_per_node
    if job.resources.memory_gib:
        limits["memory"] = f"{job.resources.memory_gib}Gi"
    return {"limits": limits, "requests": dict(limits)}


def _environment(job: Job) -> list[dict[str, str]]:
    """Return the environment; each $ is doubled because Kubernetes expands $(NAME) in values."""
    return [{"name": name, "value": value.replace("$", "$$")} for name, value in job.env.items()]


def _volumes(job: Job, options: KubernetesOptions) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    volumes = [
        {"name": "recipe", "configMap": {"name": f"{job.name}-recipe"}},
        {"name": "shared", "persistentVolumeClaim": {"claimName": options.persistent_volume_claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [
        {"name": "recipe", "mountPath": RECIPE_MOUNT_PATH, "readOnly": True},
        {"name": "shared", "mountPath": options.mount_path},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    return volumes, mounts


def _command(job: Job, python: str, *rendezvous: str) -> list[str]:
    words = [
        "-m",
        "lt_trainer",
        "torchrun",
        f"{RECIPE_MOUNT_PATH}/run.toml",
        "--nproc-per-node",
        str(job.procs_per_node),
    ]
    return [python, *words, "--", *rendezvous]


def _image(job: Job, options: KubernetesOptions) -> str:
    return options.image or job.container.image


def _trainjob(job: Job, options: KubernetesOptions, python: str) -> dict[str, Any]:
    """Return a TrainJob of Kubeflow Trainer v2.

    The operator sets PET_MASTER_ADDR, PET_MASTER_PORT and PET_NODE_RANK in each pod.
    """
    volumes, mounts = _volumes(job, options)
    shell = _command(job, python, f"--nnodes={job.nodes}", "--node-rank=$(PET_NODE_RANK)")
    shell += ["--master-addr=$(PET_MASTER_ADDR)", "--master-port=$(PET_MASTER_PORT)"]
    spec: dict[str, Any] = {
        "volumes": volumes,
        "terminationGracePeriodSeconds": math.ceil(job.grace_period_s) + EXIT_MARGIN_S,
        "containers": [{"name": "node", "volumeMounts": mounts}],
    }
    if options.service_account:
        spec["serviceAccountName"] = options.service_account
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name, "namespace": options.namespace},
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": options.runtime,
            },
            "trainer": {
                "image": _image(job, options),
                "command": shell,
                "numNodes": job.nodes,
                "numProcPerNode": job.procs_per_node,
                "env": _environment(job),
                "resourcesPerNode": _resources(job, options),
            },
            "podTemplateOverrides": [{"targetJobs": [{"name": "node"}], "spec": spec}],
        },
    }


def _hyperpod(job: Job, options: KubernetesOptions, python: str) -> dict[str, Any]:
    """Return a HyperPodPyTorchJob of HyperPod's training operator.

    The operator replaces broken nodes and restarts pods at most max_restarts times. Its own agent, hyperpodrun,
    replaces torchrun; the image must contain it (pip install hyperpod-elastic-agent).
    """
    volumes, mounts = _volumes(job, options)
    command = ["hyperpodrun", f"--nnodes={job.nodes}", f"--nproc-per-node={job.procs_per_node}"]
    command += ["--rdzv-backend=hyperpod", "-m", "lt_trainer", "run", f"{RECIPE_MOUNT_PATH}/run.toml"]
    labels = {"kueue.x-k8s.io/queue-name": options.queue_name} if options.queue_name else {}
    pod: dict[str, Any] = {
        "terminationGracePeriodSeconds": math.ceil(job.grace_period_s) + EXIT_MARGIN_S,
        "containers": [
            {
                "name": "pytorch-job-container",
                "image": _image(job, options),
                "command": command,
                "env": _environment(job),
                "resources": _resources(job, options),
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }
    if job.resources.instance_type:
        pod["nodeSelector"] = {"node.kubernetes.io/instance-type": job.resources.instance_type}
    if options.service_account:
        pod["serviceAccountName"] = options.service_account
    return {
        "apiVersion": "sagemaker.amazonaws.com/v1",
        "kind": "HyperPodPyTorchJob",
        "metadata": {"name": job.name, "namespace": options.namespace, "labels": labels},
        "spec": {
            "nprocPerNode": str(job.procs_per_node),
            "runPolicy": {"cleanPodPolicy": "None", "jobMaxRetryCount": job.restart.max_restarts},
            "replicaSpecs": [
                {
                    "name": "pod",
                    "replicas": job.nodes,
                    "template": {"metadata": {"labels": {"lt-job": job.name}}, "spec": pod},
                }
            ],
        },
    }
