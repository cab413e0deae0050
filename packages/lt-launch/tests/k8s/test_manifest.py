"""Manifests: golden YAML of each kind, read back by a YAML reader; what a pod cannot do without is refused."""

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
from lt_trainer.errors import RecipeError

DATA = Path(__file__).parent / "data"
each_kind = pytest.mark.parametrize("kind", ["trainjob", "jobset"])


def job(out: str = "/fsx/runs/llama", **changes: Any) -> Job:
    recipe = load(base={"run": {"dir": out}, "data": {"store": "/fsx/store"}, "parallel": {"n_nodes": 4}}).recipe
    values: dict[str, Any] = {
        "name": "llama",
        "argv": ("python", "-P", "-m", "lt_trainer", "run", "{recipe}"),
        "recipe": to_toml(recipe),
        "engine": "gpu",
        "nodes": 4,
        "procs_per_node": 8,
        "env": {"NCCL_DEBUG": "WARN"},
        "time_limit_s": 3600,
        "container": ContainerImage(image="/fsx/lt.sqsh"),
        "resources": Resources(gpus_per_node=8, instance_type="ml.p5.48xlarge", memory_gib=1000),
    }
    return Job(**{**values, **changes})


def rendered(made: Job, **values: Any) -> RenderedLaunch:
    given = {"k8s.persistent_volume_claim": "fsx-claim", "k8s.image": "registry/lt:1"}
    given |= {name if "." in name or name == "setup" else f"k8s.{name}": value for name, value in values.items()}
    return KubernetesTarget().render(Pipeline.from_job(made), Profile().with_values(given, "test"))


@each_kind
def test_manifests_are_as_they_were_and_can_be_read(kind: str) -> None:
    options = {"efa_per_node": 32, "namespace": "team", "queue_name": "q", "service_account": "me"}
    text = rendered(job(), kind=kind, **options).files["llama.yaml"]
    golden = DATA / f"{kind}.yaml"
    without = re.sub(r"(  run\.toml: \|\n).*?(?=^---$)", r"\1    # the recipe\n", text, flags=re.DOTALL | re.MULTILINE)
    if os.environ.get("LT_WRITE_GOLDEN"):
        golden.write_text(without)
    assert without == golden.read_text()
    config, _ = yaml.safe_load_all(text)
    assert config["data"]["run.toml"] == job().recipe


@each_kind
def test_a_neuron_pod_asks_for_a_core_of_each_process_and_its_variables_arrive_as_given(kind: str) -> None:
    """Kubernetes expands $(NAME) and takes $$ for $: the reading here is its own rule."""
    values = {"A": "$(HOME)/x", "B": "a$$b", "C": "$5", "D": "plain"}
    made = job(env=values, engine="neuron", procs_per_node=32, resources=Resources())
    found = rendered(made, kind=kind, setup=["module load x"], **{"env.D": "below", "env.E": "profile"})
    text = found.files["llama.yaml"]
    assert text.count("aws.amazon.com/neuroncore: '32'") == 2
    assert "nvidia.com" not in text
    env = dict(re.findall(r"- name: ([A-Z])\n +value: (.*)\n", text))
    assert not any(re.search(r"(?<!\$)(?:\$\$)*\$\(", value) for value in env.values())
    assert {name: value.replace("$$", "$") for name, value in env.items()} == {**values, "E": "profile"}
    assert found.notes == ("setup of the profile is not run in containers; put it into the image",)


@pytest.mark.parametrize(
    ("changes", "given", "words"),
    [
        ({"pass_env": ("HF_TOKEN",)}, {}, "job.pass_env.*: Kubernetes passes no variables from this machine"),
        ({}, {"image": ""}, 'job.container.image = "/fsx/lt.sqsh": a pod needs an image'),
        ({}, {"image": "./lt.sqsh"}, 'k8s.image = "./lt.sqsh": a pod needs an image'),
        ({"recipe": ""}, {}, "only a training job"),
        ({"env": {"PET_NODE_RANK": "0"}}, {}, 'job.env.PET_NODE_RANK = "0".*set by the controller of a trainjob'),
        ({"env": {"JOB_COMPLETION_INDEX": "0"}}, {"kind": "jobset"}, "set by the controller of a jobset"),
        ({"out": "runs/llama"}, {}, "pods share no folder.*put run.dir below k8s.mount_path"),
        ({}, {"persistent_volume_claim": ""}, "pods share no folder"),
        ({}, {"mount_path": "fsx"}, "must match"),
    ],
)
def test_what_a_pod_cannot_do_without(changes: dict[str, Any], given: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        rendered(job(**changes), **given)


def test_nothing_is_sent() -> None:
    with pytest.raises(LaunchError, match="only renders for k8s"):
        KubernetesTarget().submit(None, RenderedLaunch(files={}))  # type: ignore[arg-type]
