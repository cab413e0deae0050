"""HyperPodPyTorchJob of HyperPod's training operator.

The operator replaces broken nodes and restarts pods at most max_restarts times. Its own agent, hyperpodrun, replaces
torchrun; the image must contain it (pip install hyperpod-elastic-agent).
"""

from __future__ import annotations

from typing import Any

from lt_launch.job import Job
from lt_launch.k8s.options import KubernetesOptions
from lt_launch.k8s.pod import RECIPE_FILE, metadata, pod_spec


def hyperpod_job(job: Job, options: KubernetesOptions) -> dict[str, Any]:
    """Return the manifest."""
    command = ["hyperpodrun", f"--nnodes={job.nodes}", f"--nproc-per-node={job.procs_per_node}"]
    command += ["--rdzv-backend=hyperpod", "-m", "lt_trainer", "run", RECIPE_FILE]
    pod = pod_spec(job, options, container="pytorch-job-container", command=command)
    pod["containers"][0]["env"].append({"name": "PYTHONSAFEPATH", "value": "1"})  # hyperpodrun starts python without -P
    policy: dict[str, Any] = {"cleanPodPolicy": "None", "jobMaxRetryCount": job.restart.max_restarts}
    if job.time_limit_s:
        policy["activeDeadlineSeconds"] = job.time_limit_s
    return {
        "apiVersion": "sagemaker.amazonaws.com/v1",
        "kind": "HyperPodPyTorchJob",
        "metadata": metadata(job, options),
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
