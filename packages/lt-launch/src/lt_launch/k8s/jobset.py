"""JobSet of Kubernetes' SIG Apps: an indexed Job of one pod per node, for clusters without Kubeflow.

All pods are restarted together, at most max_restarts times. Exit code 64 or 70, which a restart does not mend, and the
end of the time limit fail the whole set: the pod failure policy of the Job says so of exit codes, the failure policy of
the set of the Job's reason. The controller sets JOB_COMPLETION_INDEX in each pod and gives it a host name.
"""

from __future__ import annotations

from typing import Any

from lt_launch.job import Job
from lt_launch.k8s.options import KubernetesOptions
from lt_launch.k8s.pod import metadata, pod_spec, torchrun_command

REPLICATED_JOB = "node"
MASTER_PORT = 29500
FINAL_EXIT_CODES = [64, 70]
FINAL_REASONS = ["PodFailurePolicy", "DeadlineExceeded"]


def job_set(job: Job, options: KubernetesOptions, python: str) -> dict[str, Any]:
    """Return the manifest."""
    command = torchrun_command(
        job,
        python,
        node_rank="$(JOB_COMPLETION_INDEX)",
        master_addr=f"{job.name}-{REPLICATED_JOB}-0-0.{job.name}",
        master_port=str(MASTER_PORT),
    )
    pod = {"restartPolicy": "Never", **pod_spec(job, options, container=REPLICATED_JOB, command=command)}
    codes = {"containerName": REPLICATED_JOB, "operator": "In", "values": FINAL_EXIT_CODES}
    spec: dict[str, Any] = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]},
        "template": {"spec": pod},
    }
    if job.time_limit_s:
        spec["activeDeadlineSeconds"] = job.time_limit_s
    rule = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": FINAL_REASONS}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(job, options),
        "spec": {
            "failurePolicy": {"maxRestarts": job.restart.max_restarts, "rules": [rule]},
            "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": spec}}],
        },
    }
