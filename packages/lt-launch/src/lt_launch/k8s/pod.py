"""The pod of a node, the same for all kinds of jobs: image, command, environment, resources, volumes, grace period."""

from __future__ import annotations

import math
from typing import Any

from lt_launch.job import Job
from lt_launch.k8s.options import KubernetesOptions

RECIPE_MOUNT_PATH = "/etc/lt"
RECIPE_FILE = f"{RECIPE_MOUNT_PATH}/run.toml"
SHM_PATH = "/dev/shm"
EXIT_MARGIN_S = 30
"""Time that a pod has for its end after the grace period of its processes."""


def pod_spec(job: Job, options: KubernetesOptions, *, container: str, command: list[str]) -> dict[str, Any]:
    """Return a pod with one container."""
    pod: dict[str, Any] = {
        "terminationGracePeriodSeconds": math.ceil(job.grace_period_s) + EXIT_MARGIN_S,
        "containers": [
            {
                "name": container,
                "image": options.image or job.container.image,
                "command": command,
                # Kubernetes expands $(NAME) in values, so each $ is doubled.
                "env": [{"name": name, "value": value.replace("$", "$$")} for name, value in job.env.items()],
                "resources": _resources(job, options),
                "volumeMounts": [
                    {"name": "recipe", "mountPath": RECIPE_MOUNT_PATH, "readOnly": True},
                    {"name": "shared", "mountPath": options.mount_path},
                    {"name": "shm", "mountPath": SHM_PATH},
                ],
            }
        ],
        "volumes": [
            {"name": "recipe", "configMap": {"name": f"{job.name}-recipe"}},
            {"name": "shared", "persistentVolumeClaim": {"claimName": options.persistent_volume_claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if job.resources.instance_type:
        pod["nodeSelector"] = {"node.kubernetes.io/instance-type": job.resources.instance_type}
    if options.service_account:
        pod["serviceAccountName"] = options.service_account
    return pod


def torchrun_command(job: Job, python: str, node_rank: str, master_addr: str, master_port: str) -> list[str]:
    """Return the command of a pod; Kubernetes expands $(NAME) in it from the environment of the pod."""
    words = [python, "-P", "-m", "lt_trainer", "torchrun", RECIPE_FILE, "--nproc-per-node", str(job.procs_per_node)]
    words += ["--", f"--nnodes={job.nodes}", f"--node-rank={node_rank}"]
    return [*words, f"--master-addr={master_addr}", f"--master-port={master_port}"]


def _resources(job: Job, options: KubernetesOptions) -> dict[str, Any]:
    """Return the resources of one pod as limits (devices support nothing else), in text as Kubernetes has them."""
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
    quantities = {name: str(value) for name, value in limits.items()}
    return {"limits": quantities, "requests": dict(quantities)}
