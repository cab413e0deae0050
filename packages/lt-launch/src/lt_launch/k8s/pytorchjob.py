"""PyTorchJob of Kubeflow's training operator, the version 1 that Kubeflow Trainer replaces.

Pod 0 is the master, the others are workers. The operator sets MASTER_ADDR, MASTER_PORT and RANK, the number of the pod,
in each. A container that fails is restarted where it is (OnFailure), whatever its exit code, until the pods of the job
have failed max_restarts times: the other policy, ExitCode, would not restart after 75.
"""

from __future__ import annotations

from typing import Any

from lt_launch.job import Job
from lt_launch.k8s.options import KubernetesOptions
from lt_launch.k8s.pod import metadata, pod_spec, torchrun_command

__all__ = ["pytorch_job"]

CONTAINER = "pytorch"
"""Name by which the operator knows the container that it sets variables in."""


def pytorch_job(job: Job, options: KubernetesOptions, python: str) -> dict[str, Any]:
    """Return the manifest."""
    command = torchrun_command(
        job, python, node_rank="$(RANK)", master_addr="$(MASTER_ADDR)", master_port="$(MASTER_PORT)"
    )
    pod = pod_spec(job, options, container=CONTAINER, command=command)
    replicas = {"Master": 1, "Worker": job.nodes - 1}
    policy: dict[str, Any] = {"cleanPodPolicy": "Running", "backoffLimit": job.restart.max_restarts}
    if job.time_limit_s:
        policy["activeDeadlineSeconds"] = job.time_limit_s
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata(job, options),
        "spec": {
            "runPolicy": policy,
            "pytorchReplicaSpecs": {
                kind: {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": pod}}
                for kind, count in replicas.items()
                if count
            },
        },
    }
