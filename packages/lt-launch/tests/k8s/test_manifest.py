"""Manifests: golden YAML of both kinds, read back by a YAML reader; what a pod cannot do without is refused."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lt_launch.errors import LaunchError
from lt_launch.job import ContainerImage, Job, Pipeline, Resources
from lt_launch.k8s.target import KubernetesTarget
from lt_launch.profile import Profile
from lt_launch.target import RenderedLaunch
from lt_trainer.config.recipe import load, to_toml
from lt_trainer.config.sources import Assignment
from lt_trainer.errors import RecipeError

DATA = Path(__file__).parent / "data"


def job(out: str = "/fsx/runs/llama", **changes: Any) -> Job:
    recipe = load(base={"run": {"dir": out}, "data": {"store": "/fsx/store"}, "parallel": {"n_nodes": 4}}).recipe
    values: dict[str, Any] = {
        "name": "llama",
        "argv": ("python", "-m", "lt_trainer", "run", "{recipe}"),
        "recipe": to_toml(recipe),
        "engine": "gpu",
        "nodes": 4,
        "procs_per_node": 8,
        "env": {"NCCL_DEBUG": "WARN"},
        "container": ContainerImage(image="registry/lt:1"),
        "resources": Resources(gpus_per_node=8, instance_type="ml.p5.48xlarge", memory_gib=1000),
    }
    return Job(**{**values, **changes})


def profile(**values: Any) -> Profile:
    given = {"k8s.persistent_volume_claim": "fsx-claim", **{f"k8s.{name}": value for name, value in values.items()}}
    return Profile(values={name: Assignment(value, "test") for name, value in given.items()})


def rendered(made: Job, given: Profile) -> str:
    return KubernetesTarget().render(Pipeline.from_job(made), given).files[f"{made.name}.yaml"]


@pytest.mark.parametrize("kind", ["trainjob", "hyperpod"])
def test_manifests_are_as_they_were_and_can_be_read(kind: str) -> None:
    text = rendered(job(), profile(kind=kind, efa_per_node=32, namespace="team"))
    golden = DATA / f"{kind}.yaml"
    without = re.sub(r"(  run\.toml: \|\n).*?(?=^---$)", r"\1    # the recipe\n", text, flags=re.DOTALL | re.MULTILINE)
    if os.environ.get("LT_WRITE_GOLDEN"):
        DATA.mkdir(exist_ok=True)
        golden.write_text(without)
    assert without == golden.read_text()
    config, made = list(yaml.safe_load_all(text))
    assert config["data"]["run.toml"] == job().recipe
    assert made["metadata"] == {"name": "llama", "namespace": "team"} | ({"labels": {}} if kind == "hyperpod" else {})
    if kind == "trainjob":
        trainer = made["spec"]["trainer"]
        assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["image"]) == (4, 8, "registry/lt:1")
        limits = trainer["resourcesPerNode"]["limits"]
        pod = made["spec"]["podTemplateOverrides"][0]["spec"]
    else:
        (replica,) = made["spec"]["replicaSpecs"]
        assert replica["replicas"] == 4
        pod = replica["template"]["spec"]
        assert pod["containers"][0]["command"][:3] == ["hyperpodrun", "--nnodes=4", "--nproc-per-node=8"]
        limits = pod["containers"][0]["resources"]["limits"]
        assert pod["nodeSelector"] == {"node.kubernetes.io/instance-type": "ml.p5.48xlarge"}
    assert limits == {"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 32, "memory": "1000Gi"}
    assert pod["terminationGracePeriodSeconds"] == 150
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {"recipe": "/etc/lt", "shared": "/fsx", "shm": "/dev/shm"}


@pytest.mark.parametrize("kind", ["trainjob", "hyperpod"])
def test_an_image_of_a_registry_stands_in_for_a_file(kind: str) -> None:
    made = job(container=ContainerImage(image="/fsx/lt.sqsh"))
    text = rendered(made, profile(kind=kind, image="registry/lt:2"))
    assert re.findall(r"image: (.*)", text) == ["registry/lt:2"]


def test_neuron_cores() -> None:
    text = rendered(job(engine="neuron", resources=Resources(neuron_cores_per_node=32)), profile())
    made = list(yaml.safe_load_all(text))[1]
    assert made["spec"]["trainer"]["resourcesPerNode"]["limits"] == {"aws.amazon.com/neuroncore": 32}


@pytest.mark.parametrize("kind", ["trainjob", "hyperpod"])
def test_a_neuron_pod_asks_for_a_core_of_each_process_where_the_job_says_nothing(kind: str) -> None:
    text = rendered(job(engine="neuron", procs_per_node=32, resources=Resources()), profile(kind=kind))
    assert text.count("aws.amazon.com/neuroncore: 32") == 2
    assert "nvidia.com" not in text


@pytest.mark.parametrize("kind", ["trainjob", "hyperpod"])
def test_variables_arrive_as_they_were_given(kind: str) -> None:
    """Kubernetes expands $(NAME) and takes $$ for $: the reading here is its own rule."""
    values = {"A": "$(HOME)/x", "B": "a$$b", "C": "$5", "D": "plain"}
    text = rendered(job(env=values), profile(kind=kind).with_values({"env.D": "below", "env.E": "profile"}, "test"))
    spec = list(yaml.safe_load_all(text))[1]["spec"]
    one = spec["trainer"] if kind == "trainjob" else spec["replicaSpecs"][0]["template"]["spec"]["containers"][0]
    found = {item["name"]: item["value"] for item in one["env"]}
    assert not any(re.search(r"(?<!\$)(?:\$\$)*\$\(", value) for value in found.values())
    assert {name: value.replace("$$", "$") for name, value in found.items()} == {**values, "E": "profile"}


@pytest.mark.parametrize(
    ("changes", "given", "words"),
    [
        ({"pass_env": ("HF_TOKEN",)}, {}, "job.pass_env.*: Kubernetes passes no variables from this machine"),
        ({"container": ContainerImage()}, {}, "a pod needs an image"),
        (
            {"container": ContainerImage(image="/fsx/lt.sqsh")},
            {},
            "job.container.image = '/fsx/lt.sqsh': a pod needs",
        ),
        ({}, {"image": "./lt.sqsh"}, "k8s.image = './lt.sqsh': a pod needs an image"),
        ({"recipe": ""}, {}, "only a training job"),
        ({"name": "Llama"}, {}, "not a valid Kubernetes name"),
        ({"out": "runs/llama"}, {}, "pods share no folder"),
        ({}, {"persistent_volume_claim": ""}, "pods share no folder"),
        ({}, {"mount_path": "fsx"}, "not an absolute path"),
        ({}, {"efa_per_node": -1}, "at least 0"),
    ],
)
def test_what_a_pod_cannot_do_without(changes: dict[str, Any], given: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        rendered(job(**changes), profile(**given))


def test_lines_of_the_profile_that_no_pod_runs_are_told() -> None:
    given = profile().with_values({"setup": ["module load x"]}, "test")
    (note,) = KubernetesTarget().render(Pipeline.from_job(job()), given).notes
    assert note.startswith("setup of the profile is not run")


def test_nothing_is_sent() -> None:
    with pytest.raises(LaunchError, match="kubectl apply"):
        KubernetesTarget().submit(None, RenderedLaunch(files={}), detach=False)  # type: ignore[arg-type]
