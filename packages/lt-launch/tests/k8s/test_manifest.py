"""Manifests: golden YAML of each kind, read back by a YAML reader; what a pod cannot do without is refused."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lt_launch.errors import LaunchError
from lt_launch.job import ContainerImage, Job, Pipeline, Resources
from lt_launch.k8s.manifest import KINDS
from lt_launch.k8s.target import KubernetesTarget
from lt_launch.profile import Profile
from lt_launch.target import RenderedLaunch
from lt_trainer.config.recipe import load, to_toml
from lt_trainer.config.section import Given
from lt_trainer.errors import RecipeError

DATA = Path(__file__).parent / "data"


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


def profile(**values: Any) -> Profile:
    given = {"persistent_volume_claim": "fsx-claim", "image": "registry/lt:1", **values}
    return Profile(values={f"k8s.{name}": Given(value, "test") for name, value in given.items()})


def rendered(made: Job, given: Profile) -> str:
    return KubernetesTarget().render(Pipeline.from_job(made), given).files[f"{made.name}.yaml"]


@pytest.mark.parametrize("kind", KINDS)
def test_manifests_are_as_they_were_and_can_be_read(kind: str) -> None:
    text = rendered(job(), profile(kind=kind, efa_per_node=32, namespace="team", queue_name="q", service_account="me"))
    golden = DATA / f"{kind}.yaml"
    without = re.sub(r"(  run\.toml: \|\n).*?(?=^---$)", r"\1    # the recipe\n", text, flags=re.DOTALL | re.MULTILINE)
    if os.environ.get("LT_WRITE_GOLDEN"):
        golden.write_text(without)
    assert without == golden.read_text()
    config, _ = yaml.safe_load_all(text)
    assert config["data"]["run.toml"] == job().recipe


@pytest.mark.parametrize("kind", KINDS)
def test_a_neuron_pod_asks_for_a_core_of_each_process_and_its_variables_arrive_as_given(kind: str) -> None:
    """Kubernetes expands $(NAME) and takes $$ for $: the reading here is its own rule."""
    values = {"A": "$(HOME)/x", "B": "a$$b", "C": "$5", "D": "plain"}
    given = profile(kind=kind).with_values({"env.D": "below", "env.E": "profile", "setup": ["module load x"]}, "test")
    made = job(env=values, engine="neuron", procs_per_node=32, resources=Resources())
    text = rendered(made, given)
    assert text.count("aws.amazon.com/neuroncore: '32'") == 2
    assert "nvidia.com" not in text
    found = dict(re.findall(r"- name: ([A-Z])\n +value: (.*)\n", text))
    assert not any(re.search(r"(?<!\$)(?:\$\$)*\$\(", value) for value in found.values())
    assert {name: value.replace("$$", "$") for name, value in found.items()} == {**values, "E": "profile"}
    (note,) = KubernetesTarget().render(Pipeline.from_job(made), given).notes
    assert note.startswith("setup of the profile is not run")


@pytest.mark.parametrize(
    ("changes", "given", "words"),
    [
        ({"pass_env": ("HF_TOKEN",)}, {}, "job.pass_env.*: Kubernetes passes no variables from this machine"),
        ({}, {"image": ""}, "job.container.image = '/fsx/lt.sqsh': a pod needs an image"),
        ({}, {"image": "./lt.sqsh"}, "k8s.image = './lt.sqsh': a pod needs an image"),
        ({"recipe": ""}, {}, "only a training job"),
        ({"env": {"PET_NODE_RANK": "0"}}, {}, "job.env.PET_NODE_RANK = '0'.*set by the controller of a trainjob"),
        ({"env": {"JOB_COMPLETION_INDEX": "0"}}, {"kind": "jobset"}, "set by the controller of a jobset"),
        ({"out": "/dev/shm/runs"}, {"mount_path": "/dev/shm/"}, "folder of something else"),
        ({"out": "runs/llama"}, {}, "pods share no folder.*put run.dir below k8s.mount_path"),
        ({}, {"persistent_volume_claim": ""}, "pods share no folder"),
        ({}, {"mount_path": "fsx"}, "must match"),
        ({}, {"efa_per_node": -1}, "at least 0"),
    ],
)
def test_what_a_pod_cannot_do_without(changes: dict[str, Any], given: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        rendered(job(**changes), profile(**given))


def test_nothing_is_sent() -> None:
    with pytest.raises(LaunchError, match="only renders for k8s"):
        KubernetesTarget().submit(None, RenderedLaunch(files={}), detach=False)  # type: ignore[arg-type]
