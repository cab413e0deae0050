"""Pure, deterministic construction of Kubernetes manifests as plain values.

The resolved recipe travels as a ConfigMap. Each pod is a node: it starts `lt train torchrun` with the rendezvous that
the controller of its kind sets, which grants ranks their full grace period and preserves exit code 75.

TrainJob of Kubeflow Trainer 2.3: its runtime describes the pods, and a patch adds what the job needs. The operator sets
PET_MASTER_ADDR, PET_MASTER_PORT and PET_NODE_RANK in each pod.

JobSet of Kubernetes' SIG Apps, for clusters without Kubeflow: an indexed Job. All pods are restarted together, at most
max_restarts times. Exit code 64 or 70, which a restart does not mend, and the end of the time limit fail the whole set:
the pod failure policy of the Job says so of exit codes, the failure policy of the set of the Job's reason. The
controller sets JOB_COMPLETION_INDEX in each pod and gives it a host name.

What names may look like, kubectl says.
"""

from __future__ import annotations

import math
import tomllib
from typing import Any

from lt_launch.job import Job
from lt_launch.k8s.options import KubernetesOptions
from lt_trainer.errors import RecipeError

NODE = "node"
"""The replicated job of the nodes and its container, in the runtimes of Kubeflow Trainer, too."""
RECIPE_MOUNT_PATH, SHM_PATH = "/etc/lt", "/dev/shm"
MASTER_PORT = 29500
EXIT_MARGIN_S = 30
"""Time that a pod has for its end after the grace period of its processes."""
FINAL_EXIT_CODES = [64, 70]
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
    if options.kind == "trainjob":
        head = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob"}
        spec = _train_job(job, options, python)
    else:
        head = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
        spec = _job_set(job, options, python)
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": config, "data": {"run.toml": job.recipe}},
        {**head, "metadata": metadata, "spec": spec},
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
    reserved = CONTROLLER_VARIABLES[options.kind]
    if taken := {f"job.env.{name}": value for name, value in job.env.items() if name.startswith(reserved)}:
        raise RecipeError(f"is set by the controller of a {options.kind}", values=taken, remedy="leave it out")


def _train_job(job: Job, options: KubernetesOptions, python: str) -> dict[str, Any]:
    address = ("$(PET_NODE_RANK)", "$(PET_MASTER_ADDR)", "$(PET_MASTER_PORT)")
    pod = _pod(job, options, python, *address)
    (container,) = pod["containers"]
    own = {"name": NODE, "volumeMounts": container["volumeMounts"]}
    patched = {"name": NODE, "template": {"spec": {"template": {"spec": {**pod, "containers": [own]}}}}}
    return {
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
        **_deadline(job),
    }


def _job_set(job: Job, options: KubernetesOptions, python: str) -> dict[str, Any]:
    address = ("$(JOB_COMPLETION_INDEX)", f"{job.name}-{NODE}-0-0.{job.name}", str(MASTER_PORT))
    codes = {"containerName": NODE, "operator": "In", "values": FINAL_EXIT_CODES}
    spec = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]},
        "template": {"spec": {"restartPolicy": "Never", **_pod(job, options, python, *address)}},
        **_deadline(job),
    }
    reasons = ["PodFailurePolicy", "DeadlineExceeded"]
    rule = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": reasons}
    return {
        "failurePolicy": {"maxRestarts": job.restart.max_restarts, "rules": [rule]},
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": spec}}],
    }


def _deadline(job: Job) -> dict[str, int]:
    return {"activeDeadlineSeconds": job.time_limit_s} if job.time_limit_s else {}


def _pod(job: Job, options: KubernetesOptions, python: str, rank: str, address: str, port: str) -> dict[str, Any]:
    """Return the pod of a node; Kubernetes expands $(NAME) in its command from its environment."""
    words = [python, "-P", "-m", "lt_trainer", "torchrun", f"{RECIPE_MOUNT_PATH}/run.toml"]
    words += ["--nproc-per-node", str(job.procs_per_node), "--", f"--nnodes={job.nodes}", f"--node-rank={rank}"]
    words += [f"--master-addr={address}", f"--master-port={port}"]
    pod: dict[str, Any] = {
        "terminationGracePeriodSeconds": math.ceil(job.grace_period_s) + EXIT_MARGIN_S,
        "containers": [
            {
                "name": NODE,
                "image": options.image or job.container.image,
                "command": words,
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


def _resources(job: Job, options: KubernetesOptions) -> dict[str, Any]:
    """Return the resources of one pod as limits (devices support nothing else), in text as Kubernetes has them."""
    resources, procs = job.resources, job.procs_per_node
    limits: dict[str, Any] = {}
    if resources.neuron_cores_per_node or job.engine == "neuron":
        limits["aws.amazon.com/neuroncore"] = resources.neuron_cores_per_node or procs
    else:
        limits["nvidia.com/gpu"] = resources.gpus_per_node or procs
    if options.efa_per_node:
        limits["vpc.amazonaws.com/efa"] = options.efa_per_node
    if resources.cpus_per_proc:
        limits["cpu"] = resources.cpus_per_proc * procs
    if resources.memory_gib:
        limits["memory"] = f"{resources.memory_gib}Gi"
    quantities = {name: str(value) for name, value in limits.items()}
    return {"limits": quantities, "requests": dict(quantities)}
