"""Manifests against the other side's own definitions: Kubeflow's models, HyperPod's, and Kubernetes' client."""

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

KUBEFLOW_MODELS = "kubeflow-trainer-api==2.3.0"


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


def environment(folder: Path, *packages: str) -> Path:
    """Make an environment with some packages, and nothing that they need; return its interpreter."""
    if shutil.which("uv") is None:
        pytest.skip("uv, which makes environments, is not installed")
    subprocess.run(["uv", "venv", "-q", "--python", sys.executable, folder], check=True)
    for options, names in ((["--no-deps"], packages), ([], ("pydantic>=2.11", "pyyaml"))):
        command = ["uv", "pip", "install", "-q", "--python", folder / "bin" / "python", *options, *names]
        installed = subprocess.run(command, capture_output=True, text=True, check=False)
        if installed.returncode:
            pytest.skip(f"{', '.join(names)} cannot be installed here: {installed.stderr[-300:]}")
    return folder / "bin" / "python"


def ask(python: Path, program: str, document: dict[str, Any]) -> Any:
    """Run a program that reads a document and prints its answer as JSON."""
    command = [python, "-c", program]
    done = subprocess.run(command, input=json.dumps(document), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def differences(given: Any, read: Any, path: str = "") -> list[str]:
    """Return what a reader has dropped or changed."""
    if isinstance(given, dict) and isinstance(read, dict):
        return [line for name in given for line in differences(given[name], read.get(name), f"{path}.{name}")]
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        return [line for at, one in enumerate(given) for line in differences(one, read[at], f"{path}[{at}]")]
    return [] if given == read else [f"{path}: {given!r} became {read!r}"]


KUBEFLOW = """
import json, sys
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob
print(json.dumps(TrainerV1alpha1TrainJob.from_dict(json.load(sys.stdin)).to_dict()))
"""


JOB_SET = """
import json, sys
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet
print(json.dumps(JobsetV1alpha2JobSet.from_dict(json.load(sys.stdin)).to_dict()))
"""


def test_kubeflow_reads_the_whole_train_job_and_job_set(tmp_path: Path) -> None:
    """Its models drop the fields that a version does not have, as the API server does."""
    python = environment(tmp_path / "environment", KUBEFLOW_MODELS)
    _, made = documents()
    assert differences(made, ask(python, KUBEFLOW, made)) == []
    made["spec"]["podTemplate"] = {}
    assert differences(made, ask(python, KUBEFLOW, made)) == [".spec.podTemplate: {} became None"]
    _, made = documents(kind="jobset")
    assert differences(made, ask(python, JOB_SET, made)) == []
    made["spec"]["failurePolicy"]["backoffLimit"] = 3
    assert differences(made, ask(python, JOB_SET, made)) == [".spec.failurePolicy.backoffLimit: 3 became None"]


HYPERPOD = """
import importlib.util, json, sys
from importlib.metadata import files
(file,) = [one for one in files("sagemaker-hyperpod") if one.name == "hyperpod_pytorch_job_unified_config.py"]
spec = importlib.util.spec_from_file_location("config", file.locate())
module = importlib.util.module_from_spec(spec)
sys.modules["config"] = module
spec.loader.exec_module(module)
made = json.load(sys.stdin)
module.Metadata.model_validate(made["metadata"], by_name=True)
read = module._HyperPodPytorchJob.model_validate(made["spec"], by_name=True)
print(json.dumps(read.model_dump(exclude_none=True)))
"""


def test_hyperpod_reads_the_whole_job(tmp_path: Path) -> None:
    python = environment(tmp_path / "environment", "sagemaker-hyperpod")
    _, made = documents(kind="hyperpod")
    assert differences(made["spec"], ask(python, HYPERPOD, made)) == []


KUBERNETES = """
import json, sys
from kubernetes.client import ApiClient
client, asked = ApiClient(), json.load(sys.stdin)
read = {kind: client.deserialize(json.dumps(value), kind, "application/json") for kind, value in asked.items()}
print(json.dumps({kind: client.sanitize_for_serialization(value) for kind, value in read.items()}))
"""


def test_the_client_of_kubernetes_reads_pods_and_the_config_map_whole(tmp_path: Path) -> None:
    python = tmp_path / "environment" / "bin" / "python"
    environment(tmp_path / "environment", "pyyaml")
    installed = subprocess.run(["uv", "pip", "install", "-q", "--python", python, "kubernetes>=37"], check=False)
    if installed.returncode:
        pytest.skip("the client of Kubernetes cannot be installed here")
    config, made = documents(kind="hyperpod")
    (replica,) = made["spec"]["replicaSpecs"]
    asked = {"V1ConfigMap": config, "V1PodTemplateSpec": replica["template"]}
    _, job_set = documents(kind="jobset")
    (replicated,) = job_set["spec"]["replicatedJobs"]
    asked["V1JobTemplateSpec"] = replicated["template"]
    assert differences(asked, ask(python, KUBERNETES, asked)) == []
    _, train_job = documents()
    (patch,) = train_job["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    trainer = train_job["spec"]["trainer"]
    container = {"image": trainer["image"], "command": trainer["command"], "env": trainer["env"]}
    container["resources"] = trainer["resourcesPerNode"]
    pod = replicated["template"]["spec"]["template"]
    pod["spec"]["containers"][0] |= container
    assert differences({"V1PodTemplateSpec": pod}, ask(python, KUBERNETES, {"V1PodTemplateSpec": pod})) == []
