"""HyperPodPyTorchJob of HyperPod's training operator.

The operator replaces broken nodes and restarts pods at most max_restarts times. Its own agent, hyperpodrun, replaces
torchrun; the image must contain it (pip install hyperpod-elastic-agent).
"""

from __future__ import annotations

from typing import Any

from lt_launch.job import Job
from lt_launch.k8s.options import KubernetesOptions
from lt_launch.k8s.pod import (
    RECIPE_FILE,
    environment,
    image_of,
    resources,
    termination_grace_period,
    volumes_and_mounts,
)

__all__ = ["hyperpod_job"]


def hyperpod_job(job: Job, options: KubernetesOptions) -> dict[str, Any]:
    """Return the manifest."""
    volumes, mounts = volumes_and_mounts(job, options)
    command = ["hyperpodrun", f"--nnodes={job.nodes}", f"--nproc-per-node={job.procs_per_node}"]
    command += ["--rdzv-backend=hyperpod", "-m", "lt_trainer", "run", RECIPE_FILE]
    labels = {"kueue.x-k8s.io/queue-name": options.queue_name} if options.queue_name else {}
    pod: dict[str, Any] = {
        "terminationGracePeriodSeconds": termination_grace_period(job),
        "containers": [
            {
                "name": "pytorch-job-container",
                "image": image_of(job, options),
                "command": command,
                "env": environment(job),
                "resources": resources(job, options),
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }
    if job.resources.instance_type:
        pod["nodeSelector"] = {"node.kubernetes.io/instance-type": job.resources.instance_type}
    if options.service_account:
        pod["serviceAccountName"] = options.service_account
    policy: dict[str, Any] = {"cleanPodPolicy": "None", "jobMaxRetryCount": job.restart.max_restarts}
    if job.time_limit_s:
        policy["activeDeadlineSeconds"] = job.time_limit_s
    return {
        "apiVersion": "sagemaker.amazonaws.com/v1",
        "kind": "HyperPodPyTorchJob",
        "metadata": {"name": job.name, "namespace": options.namespace, "labels": labels},
        "spec": {
            "nprocPerNode": str(job.procs_per_node),
            "runPolicy": policy,
            "replicaSpecs": [
                {
                    "name": "pod",
                    "replicas": job.nodes,
                    "template": {"metadata": {"labels": {"lt-job": job.name}}, "spec": pod},
                }
            ],
        },
    }
