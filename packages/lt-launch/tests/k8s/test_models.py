"""Manifests against the other side's own definitions: Kubeflow's models and Kubernetes' client."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lt_launch.job import ContainerImage, Job, Pipeline, Resources
from lt_launch.k8s.target import KubernetesTarget
from lt_launch.profile import Profile
from lt_trainer.config.recipe import load, to_toml

pytestmark = pytest.mark.slow

READ = """
import json, sys
from kubernetes.client import ApiClient
from kubeflow_trainer_api import models
kind, document = json.load(sys.stdin)
if kind.startswith("V1"):
    client = ApiClient()
    made = client.sanitize_for_serialization(client.deserialize(json.dumps(document), kind, "application/json"))
else:
    made = getattr(models, kind).from_dict(document).to_dict()
print(json.dumps(made))
"""


def documents(**options: Any) -> list[dict[str, Any]]:
    """ConfigMap and job of a manifest that has every field."""
    recipe = load(base={"run": {"dir": "/fsx/run"}, "data": {"store": "/fsx/store"}, "parallel": {"n_nodes": 2}}).recipe
    job = Job(
        name="llama",
        argv=("python",),
        recipe=to_toml(recipe),
        nodes=2,
        procs_per_node=8,
        env={"NCCL_DEBUG": "WARN", "B": "$(HOME)"},
        time_limit_s=3600,
        container=ContainerImage(image="registry/lt:1"),
        resources=Resources(cpus_per_proc=4, memory_gib=100, instance_type="ml.p5.48xlarge"),
    )
    given = {"persistent_volume_claim": "fsx", "service_account": "trainer", "queue_name": "team", "efa_per_node": 32}
    profile = Profile().with_values({f"k8s.{name}": value for name, value in {**given, **options}.items()}, "test")
    return list(yaml.safe_load_all(KubernetesTarget().render(Pipeline.from_job(job), profile).files["llama.yaml"]))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with both clients."""
    if shutil.which("uv") is None:
        pytest.skip("uv, which makes environments, is not installed")
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run(["uv", "venv", "-q", "--python", sys.executable, folder], check=True)
    for words in (["--no-deps", "kubeflow-trainer-api==2.3.0"], ["pydantic>=2.11", "pyyaml", "kubernetes>=37"]):
        command = ["uv", "pip", "install", "-q", "--python", folder / "bin" / "python", *words]
        installed = subprocess.run(command, capture_output=True, text=True, check=False)
        if installed.returncode:
            pytest.skip(f"{', '.join(words)} cannot be installed here: {installed.stderr[-300:]}")
    return folder / "bin" / "python"


def dropped(python: Path, kind: str, document: dict[str, Any]) -> list[str]:
    """Return what a model drops or changes: the fields that its version does not have, as the API server does."""
    given = json.dumps([kind, document])
    done = subprocess.run([python, "-c", READ], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return differences(document, json.loads(done.stdout.splitlines()[-1]))


def differences(given: Any, read: Any, path: str = "") -> list[str]:
    if isinstance(given, dict) and isinstance(read, dict):
        return [line for name in given for line in differences(given[name], read.get(name), f"{path}.{name}")]
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        return [line for at, one in enumerate(given) for line in differences(one, read[at], f"{path}[{at}]")]
    return [] if given == read else [f"{path}: {given!r} became {read!r}"]


def test_kubeflow_and_kubernetes_read_the_whole_train_job(python: Path) -> None:
    config, made = documents()
    kind = "TrainerV1alpha1TrainJob"
    assert dropped(python, kind, made) == []
    assert dropped(python, kind, made | {"spec": {**made["spec"], "podTemplate": {}}}) == [
        ".spec.podTemplate: {} became None"
    ]
    (patch,) = made["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    trainer, pod = made["spec"]["trainer"], replicated["template"]["spec"]["template"]
    pod["spec"]["containers"][0] |= {name: trainer[name] for name in ("image", "command", "env")}
    pod["spec"]["containers"][0]["resources"] = trainer["resourcesPerNode"]
    assert dropped(python, "V1PodTemplateSpec", pod) == []
    assert dropped(python, "V1ConfigMap", config) == []


def test_kubeflow_and_kubernetes_read_the_whole_job_set(python: Path) -> None:
    _, made = documents(kind="jobset")
    kind = "JobsetV1alpha2JobSet"
    assert dropped(python, kind, made) == []
    (replicated,) = made["spec"]["replicatedJobs"]
    assert dropped(python, "V1JobTemplateSpec", replicated["template"]) == []
    made["spec"]["failurePolicy"]["backoffLimit"] = 3
    assert dropped(python, kind, made) == [".spec.failurePolicy.backoffLimit: 3 became None"]
