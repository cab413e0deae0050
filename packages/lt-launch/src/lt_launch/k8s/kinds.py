"""Training jobs of three kinds, each one pod a node made by `pod_spec`.

TrainJob of Kubeflow Trainer 2.3: its runtime describes the pods, and a patch adds what the job needs. The operator sets
PET_MASTER_ADDR, PET_MASTER_PORT and PET_NODE_RANK in each pod.

JobSet of Kubernetes' SIG Apps, for clusters without Kubeflow: an indexed Job. All pods are restarted together, at most
max_restarts times. Exit code 64 or 70, which a restart does not mend, and the end of the time limit fail the whole set:
the pod failure policy of the Job says so of exit codes, the failure policy of the set of the Job's reason. The
controller sets JOB_COMPLETION_INDEX in each pod and gives it a host name.

HyperPodPyTorchJob of HyperPod's training operator, which replaces broken nodes and restarts pods at most max_restarts
times. Its own agent, hyperpodrun, replaces torchrun; the image must contain it (pip install hyperpod-elastic-agent).
"""

from __future__ import annotations

from typing import Any

from lt_launch.job import Job
from lt_launch.k8s.options import KubernetesOptions
from lt_launch.k8s.pod import RECIPE_FILE, pod_spec, torchrun_command

NODE = "node"
"""The replicated job of the nodes and its container, in the runtimes of Kubeflow Trainer, too."""
MASTER_PORT = 29500
FINAL_EXIT_CODES = [64, 70]
FINAL_REASONS = ["PodFailurePolicy", "DeadlineExceeded"]


def train_job(job: Job, options: KubernetesOptions, python: str) -> dict[str, Any]:
    """Return apiVersion, kind and spec of a TrainJob."""
    address = ("$(PET_NODE_RANK)", "$(PET_MASTER_ADDR)", "$(PET_MASTER_PORT)")
    pod = pod_spec(job, options, container=NODE, command=torchrun_command(job, python, *address))
    (container,) = pod["containers"]
    own = {"name": NODE, "volumeMounts": container["volumeMounts"]}
    patched = {"name": NODE, "template": {"spec": {"template": {"spec": {**pod, "containers": [own]}}}}}
    spec: dict[str, Any] = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": options.runtime},
        "trainer": {
            **{name: container[name] for name in ("image", "command", "env")},
            "numNodes": job.nodes,
            "numProcPerNode": job.procs_per_node,
            "resourcesPerNode": container["resources"],
        },
        "runtimePatches": [
            {
                "manager": "lt-launch/render",
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patched]}}},
            }
        ],
    }
    if job.time_limit_s:
        spec["activeDeadlineSeconds"] = job.time_limit_s
    return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "spec": spec}


def job_set(job: Job, options: KubernetesOptions, python: str) -> dict[str, Any]:
    """Return apiVersion, kind and spec of a JobSet."""
    address = ("$(JOB_COMPLETION_INDEX)", f"{job.name}-{NODE}-0-0.{job.name}", str(MASTER_PORT))
    pod = pod_spec(job, options, container=NODE, command=torchrun_command(job, python, *address))
    codes = {"containerName": NODE, "operator": "In", "values": FINAL_EXIT_CODES}
    spec: dict[str, Any] = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]},
        "template": {"spec": {"restartPolicy": "Never", **pod}},
    }
    if job.time_limit_s:
        spec["activeDeadlineSeconds"] = job.time_limit_s
    rule = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": FINAL_REASONS}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "spec": {
            "failurePolicy": {"maxRestarts": job.restart.max_restarts, "rules": [rule]},
            "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": spec}}],
        },
    }


def hyperpod_job(job: Job, options: KubernetesOptions, python: str) -> dict[str, Any]:
    """Return apiVersion, kind and spec of a HyperPodPyTorchJob; its agent decides the interpreter."""
    command = ["hyperpodrun", f"--nnodes={job.nodes}", f"--nproc-per-node={job.procs_per_node}"]
    command += ["--rdzv-backend=hyperpod", "-m", "lt_trainer", "run", RECIPE_FILE]
    pod = pod_spec(job, options, container="pytorch-job-container", command=command)
    pod["containers"][0]["env"].append({"name": "PYTHONSAFEPATH", "value": "1"})  # hyperpodrun starts python without -P
    policy: dict[str, Any] = {"cleanPodPolicy": "None", "jobMaxRetryCount": job.restart.max_restarts}
    if job.time_limit_s:
        policy["activeDeadlineSeconds"] = job.time_limit_s
    template = {"metadata": {"labels": {"lt-job": job.name}}, "spec": pod}
    return {
        "apiVersion": "sagemaker.amazonaws.com/v1",
        "kind": "HyperPodPyTorchJob",
        "spec": {
            "nprocPerNode": str(job.procs_per_node),
            "runPolicy": policy,
            "replicaSpecs": [{"name": "pod", "replicas": job.nodes, "template": template}],
        },
    }
