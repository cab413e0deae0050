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
from lt_launch.k8s.trainjob import TRAINER_VERSIONS
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
        "container": ContainerImage(image="registry/lt:1"),
        "resources": Resources(gpus_per_node=8, instance_type="ml.p5.48xlarge", memory_gib=1000),
    }
    return Job(**{**values, **changes})


def profile(**values: Any) -> Profile:
    given = {"k8s.persistent_volume_claim": "fsx-claim", **{f"k8s.{name}": value for name, value in values.items()}}
    return Profile(values={name: Given(value, "test") for name, value in given.items()})


def rendered(made: Job, given: Profile) -> str:
    return KubernetesTarget().render(Pipeline.from_job(made), given).files[f"{made.name}.yaml"]


GOLDEN = {f"trainjob-{version}": {"trainer_version": version} for version in TRAINER_VERSIONS}
GOLDEN |= {kind: {"kind": kind} for kind in ("jobset", "hyperpod")}
KINDS = ["trainjob", "jobset", "hyperpod"]


def pod_of(made: dict[str, Any]) -> dict[str, Any]:
    """The fields of a pod in a manifest, wherever its kind and version has them."""
    spec = made["spec"]
    if made["kind"] == "HyperPodPyTorchJob":
        (replica,) = spec["replicaSpecs"]
        return replica["template"]["spec"]
    if made["kind"] == "JobSet":
        (replicated,) = spec["replicatedJobs"]
        return replicated["template"]["spec"]["template"]["spec"]
    if "podSpecOverrides" in spec:
        (override,) = spec["podSpecOverrides"]
        assert override["targetJobs"] == [{"name": "node"}]
        return {name: value for name, value in override.items() if name != "targetJobs"}
    if "podTemplateOverrides" in spec:
        (override,) = spec["podTemplateOverrides"]
        assert override["targetJobs"] == [{"name": "node"}]
        return override["spec"]
    (patch,) = spec["runtimePatches"]
    assert re.fullmatch(r"[a-z0-9.-]+/[A-Za-z0-9._-]+", patch["manager"]), "a path with a domain before it"
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node"
    return replicated["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("name", GOLDEN)
def test_manifests_are_as_they_were_and_can_be_read(name: str) -> None:
    text = rendered(job(), profile(efa_per_node=32, namespace="team", **GOLDEN[name]))
    golden = DATA / f"{name}.yaml"
    without = re.sub(r"(  run\.toml: \|\n).*?(?=^---$)", r"\1    # the recipe\n", text, flags=re.DOTALL | re.MULTILINE)
    if os.environ.get("LT_WRITE_GOLDEN"):
        DATA.mkdir(exist_ok=True)
        golden.write_text(without)
    assert without == golden.read_text()
    config, made = list(yaml.safe_load_all(text))
    assert config["data"]["run.toml"] == job().recipe
    assert made["metadata"] == {"name": "llama", "namespace": "team"}
    pod = pod_of(made)
    if name in KINDS:
        command = pod["containers"][0]["command"]
        if name == "hyperpod":
            (replica,) = made["spec"]["replicaSpecs"]
            assert replica["replicas"] == 4
            assert command[:3] == ["hyperpodrun", "--nnodes=4", "--nproc-per-node=8"]
        else:
            assert command[1:5] == ["-P", "-m", "lt_trainer", "torchrun"]
            assert command[5:9] == ["/etc/lt/run.toml", "--nproc-per-node", "8", "--"]
        limits = pod["containers"][0]["resources"]["limits"]
        assert pod["nodeSelector"] == {"node.kubernetes.io/instance-type": "ml.p5.48xlarge"}
    else:
        trainer = made["spec"]["trainer"]
        assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["image"]) == (4, 8, "registry/lt:1")
        limits = trainer["resourcesPerNode"]["limits"]
    assert limits == {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32", "memory": "1000Gi"}
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {"recipe": "/etc/lt", "shared": "/fsx", "shm": "/dev/shm"}
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts)


@pytest.mark.parametrize(
    ("version", "field", "has_grace_period", "has_deadline"),
    [
        ("2.0", "podSpecOverrides", False, False),
        ("2.1", "podTemplateOverrides", False, False),
        ("2.2", "runtimePatches", False, True),
        ("2.3", "runtimePatches", True, True),
    ],
)
def test_each_version_of_the_trainer_gets_the_fields_it_has(
    version: str, field: str, has_grace_period: bool, has_deadline: bool
) -> None:
    """The API server drops the others without a word; a slow test has Kubeflow's own models say the same."""
    given = profile(trainer_version=version, service_account="trainer", queue_name="team")
    made_job = job(time_limit_s=3600)
    target = KubernetesTarget().render(Pipeline.from_job(made_job), given)
    made = list(yaml.safe_load_all(target.files["llama.yaml"]))[1]
    deadline = {"activeDeadlineSeconds"} if has_deadline else set()
    assert set(made["spec"]) == {"runtimeRef", "trainer", field} | deadline
    grace = {"terminationGracePeriodSeconds"} if has_grace_period else set()
    pod = pod_of(made)
    assert set(pod) == {"volumes", "containers", "serviceAccountName"} | grace
    assert pod.get("terminationGracePeriodSeconds", 150) == 150
    assert made["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
    assert any("terminationGracePeriodSeconds" in note and "150" in note for note in target.notes) != has_grace_period
    assert any("job.time_limit" in note for note in target.notes) != has_deadline


def test_a_pod_that_needs_no_more_than_the_usual_grace_period_is_not_told() -> None:
    given = profile(trainer_version="2.1")
    assert KubernetesTarget().render(Pipeline.from_job(job(grace_period_s=0.0)), given).notes == ()


@pytest.mark.parametrize("kind", ["hyperpod"])
def test_operators_keep_the_time_limit(kind: str) -> None:
    made = list(yaml.safe_load_all(rendered(job(time_limit_s=3600), profile(kind=kind))))[1]
    assert made["spec"]["runPolicy"]["activeDeadlineSeconds"] == 3600


def test_a_jobset_is_restarted_as_a_whole_and_not_after_a_mistake_or_its_time() -> None:
    made = list(yaml.safe_load_all(rendered(job(time_limit_s=3600), profile(kind="jobset"))))[1]
    policy = made["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 10
    (rule,) = policy["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy", "DeadlineExceeded"])
    template = made["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (template["parallelism"], template["completions"], template["completionMode"]) == (4, 4, "Indexed")
    assert (template["backoffLimit"], template["activeDeadlineSeconds"]) == (0, 3600)
    (one,) = template["podFailurePolicy"]["rules"]
    pod = template["template"]["spec"]
    assert one["onExitCodes"] == {
        "containerName": pod["containers"][0]["name"],
        "operator": "In",
        "values": [64, 70],
    }
    assert pod["restartPolicy"] == "Never", "as a pod failure policy needs"
    command = pod["containers"][0]["command"]
    assert command[9:] == [
        "--nnodes=4",
        "--node-rank=$(JOB_COMPLETION_INDEX)",
        "--master-addr=llama-node-0-0.llama",
        "--master-port=29500",
    ]


def test_names_are_as_long_as_those_of_pods_allow() -> None:
    """JOB-node-0-INDEX-abcde has at most 63 characters."""
    assert rendered(job(name="a" * 48), profile())
    with pytest.raises(RecipeError, match=r"job.name = .*longer than 48 characters.*shorten it"):
        rendered(job(name="a" * 49), profile())
    with pytest.raises(RecipeError, match=r"longer than 47 characters"):
        rendered(job(name="a" * 48, nodes=11), profile())
    assert rendered(job(name="a" * 48), profile(kind="jobset"))
    with pytest.raises(RecipeError, match="longer than 48 characters"):
        rendered(job(name="a" * 49), profile(kind="jobset"))
    assert rendered(job(name="a" * 63), profile(kind="hyperpod"))


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_of_a_registry_stands_in_for_a_file(kind: str) -> None:
    made = job(container=ContainerImage(image="/fsx/lt.sqsh"))
    text = rendered(made, profile(kind=kind, image="registry/lt:2"))
    assert set(re.findall(r"image: (.*)", text)) == {"registry/lt:2"}


def test_neuron_cores() -> None:
    text = rendered(job(engine="neuron", resources=Resources(neuron_cores_per_node=32)), profile())
    made = list(yaml.safe_load_all(text))[1]
    assert made["spec"]["trainer"]["resourcesPerNode"]["limits"] == {"aws.amazon.com/neuroncore": "32"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_neuron_pod_asks_for_a_core_of_each_process_where_the_job_says_nothing(kind: str) -> None:
    text = rendered(job(engine="neuron", procs_per_node=32, resources=Resources()), profile(kind=kind))
    assert text.count("aws.amazon.com/neuroncore: '32'") == 2
    assert "nvidia.com" not in text


@pytest.mark.parametrize("kind", KINDS)
def test_variables_arrive_as_they_were_given(kind: str) -> None:
    """Kubernetes expands $(NAME) and takes $$ for $: the reading here is its own rule."""
    values = {"A": "$(HOME)/x", "B": "a$$b", "C": "$5", "D": "plain"}
    text = rendered(job(env=values), profile(kind=kind).with_values({"env.D": "below", "env.E": "profile"}, "test"))
    document = list(yaml.safe_load_all(text))[1]
    one = document["spec"]["trainer"] if kind == "trainjob" else pod_of(document)["containers"][0]
    found = {item["name"]: item["value"] for item in one["env"] if item["name"] != "PYTHONSAFEPATH"}
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
        ({"name": "1b-llama"}, {}, "job.name = '1b-llama'.*start with a letter"),
        ({"container": ContainerImage(image="registry/lt:1 latest")}, {}, "'registry/lt:1 latest'.*name of an image"),
        ({}, {"trainer_version": "1.9"}, r"k8s.trainer_version.*2.3"),
        ({}, {"namespace": "My Team"}, "k8s.namespace = 'My Team'.*must match"),
        ({}, {"namespace": ""}, "k8s.namespace = ''.*must match"),
        ({}, {"service_account": "a_b"}, "k8s.service_account = 'a_b'.*must match"),
        ({}, {"persistent_volume_claim": "fsx claim"}, "k8s.persistent_volume_claim = 'fsx claim'.*must match"),
        ({"env": {"PET_NODE_RANK": "0"}}, {}, "job.env.PET_NODE_RANK = '0'.*set by the controller of a trainjob"),
        ({"env": {"JOB_COMPLETION_INDEX": "0"}}, {"kind": "jobset"}, "set by the controller of a jobset"),
        ({"env": {f"A{at}": "1" for at in range(129)}}, {}, "129 variables.*takes 128"),
        ({}, {"mount_path": "/"}, "k8s.mount_path = '/'.*folder of something else"),
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


def test_lines_of_the_profile_that_no_pod_runs_are_told() -> None:
    given = profile().with_values({"setup": ["module load x"]}, "test")
    (note,) = KubernetesTarget().render(Pipeline.from_job(job()), given).notes
    assert note.startswith("setup of the profile is not run")


def test_nothing_is_sent() -> None:
    with pytest.raises(LaunchError, match="only renders for k8s"):
        KubernetesTarget().submit(None, RenderedLaunch(files={}), detach=False)  # type: ignore[arg-type]
