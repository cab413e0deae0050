"""Jobs, stages and pipelines: what is refused when they are made, and that a launch reads back what it kept."""

from typing import Any

import pytest

from lt_launch.job import ContainerImage, Job, Pipeline, Resources, RestartPolicy, Stage
from lt_launch.k8s.options import KubernetesOptions
from lt_launch.sagemaker.options import SageMakerOptions
from lt_launch.slurm.options import SlurmOptions
from lt_trainer.errors import RecipeError


def job(name: str = "train", **values: Any) -> Job:
    return Job(name=name, **{"argv": ("python", "x.py"), **values})


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"argv": ()}, "job.argv"),
        ({"nodes": 0}, "job.nodes"),
        ({"procs_per_node": 0}, "job.procs_per_node"),
        ({"grace_period_s": -1.0}, "job.grace_period_s"),
        ({"completion": "run_dir"}, "job.run_dir"),
        ({"completion": "never"}, "job.completion"),
        ({"env": {"RANK": "3"}}, "job.env.RANK"),
        ({"env": {"A B": "3"}}, "job.env.A B"),
        ({"env": {"A": "two\nlines"}}, "job.env.A"),
        ({"pass_env": ("HF_TOKEN=x",)}, "job.pass_env"),
        ({"nodes": "two"}, "job.nodes"),
    ],
)
def test_what_cannot_be_run_is_refused_by_field(values: dict[str, Any], field: str) -> None:
    with pytest.raises(RecipeError) as caught:
        job(**values)
    assert field in caught.value.values


@pytest.mark.parametrize("field", ["partition", "instance_type", "constraint"])
@pytest.mark.parametrize("more", ["\n#SBATCH --uid=0", "\rx", "\x1b[2J", "\u2028x", " --uid=0", "\tx"])
def test_a_resource_is_one_word(field: str, more: str) -> None:
    """It becomes an option in a line of sbatch."""
    with pytest.raises(RecipeError) as caught:
        Resources(**{field: f"p5{more}"})
    assert caught.value.values == {f"resources.{field}": f"p5{more}"}


@pytest.mark.parametrize(
    ("make", "values", "field"),
    [
        (ContainerImage, {"image": "lt:1\nx"}, "container.image"),
        (ContainerImage, {"image": "lt:1", "mounts": ("/a:/b\nx",)}, "container.mounts"),
        (ContainerImage, {"image": "lt:1", "workdir": "/w\nx"}, "container.workdir"),
        *(
            (ContainerImage, {"image": "x", "mounts": (mount,)}, "container.mounts")
            for mount in ("/a", "/a:", "a:b:c:d")
        ),
        (job, {"cwd": "/w\nx"}, "job.cwd"),
        (job, {"run_dir": "/w\x1b[2J"}, "job.run_dir"),
        (SlurmOptions, {"partition": "p5\n#SBATCH --uid=0"}, "slurm.partition"),
        (SlurmOptions, {"account": "team --uid=0"}, "slurm.account"),
        (SlurmOptions, {"exclude": ("node1", "node2 --uid=0")}, "slurm.exclude"),
        (SlurmOptions, {"sbatch_args": ("--comment=x\n#SBATCH",)}, "slurm.sbatch_args"),
        (KubernetesOptions, {"mount_path": "/fsx\nx"}, "k8s.mount_path"),
        (SageMakerOptions, {"role": "arn\nx"}, "sagemaker.role"),
        (SageMakerOptions, {"channels": ("train=s3://bucket/a\nx",)}, "sagemaker.channels"),
    ],
)
def test_text_that_goes_into_scripts_and_requests_is_one_line(make: Any, values: dict[str, Any], field: str) -> None:
    with pytest.raises(RecipeError) as caught:
        make(**values)
    assert field in caught.value.values


def test_what_is_quoted_everywhere_may_have_lines() -> None:
    assert job(argv=("python", "-c", "import os\nprint(1)")).argv[2].count("\n") == 1
    assert ContainerImage(image="lt:1", mounts=("/a folder:/b",)).mounts == ("/a folder:/b",)


@pytest.mark.parametrize("name", ["", "-a", "a-", "a b", "a/b", "x" * 64, "ä"])
def test_names_that_some_target_would_refuse(name: str) -> None:
    with pytest.raises(RecipeError, match=r"job\.name"):
        job(name)
    assert job("llama-3.1_70B" + "x" * 50)


SECRETS = (
    "HF_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID db_password MY_SECRET TOKEN GITHUB_PAT X_APIKEY"
    " DJANGO_SECRET_KEY PGPASSWORD MYSQL_PWD OPENAI_KEY HFTOKEN SMTP_PASS HTTP_AUTH DB_DSN JWT"
)
VALUES = ("hf_" + "x" * 34, "sk-proj-" + "x" * 40, "AKIA" + "X" * 16, "-----BEGIN OPENSSH PRIVATE KEY-----")


@pytest.mark.parametrize(
    ("name", "value"), [(name, "hush-hush") for name in SECRETS.split()] + [("INNOCENT", value) for value in VALUES]
)
def test_a_secret_is_refused_and_its_value_is_not_repeated(name: str, value: str) -> None:
    with pytest.raises(RecipeError, match="looks like a secret") as caught:
        job(env={name: value})
    assert value not in str(caught.value)
    assert f'pass_env = ["{name}"]' in str(caught.value)


def test_variables_that_only_sound_like_secrets_are_taken() -> None:
    names = "TOKENIZERS_PARALLELISM MAX_TOKENS NCCL_DEBUG KEYS EOS_TOKEN SORT_KEY BYPASS"
    assert job(env=dict.fromkeys(names.split(), "1"))


def test_a_pipeline_names_stages_before_they_are_waited_for() -> None:
    first, second = Stage(job=job("a")), Stage(job=job("b"), after=("a",))
    assert Pipeline(name="p", stages=(first, second)).stage("b") == second
    with pytest.raises(RecipeError, match="no stage before it"):
        Pipeline(name="p", stages=(second, first))
    element = Stage(job=job("prepare.2"))
    with pytest.raises(RecipeError, match="two stages, or a stage and an array element, have this name"):
        Pipeline(name="p", stages=(Stage(job=job("prepare"), array=3), element))
    with pytest.raises(RecipeError, match="two stages, or a stage and an array element, have this name"):
        Pipeline(name="p", stages=(element, Stage(job=job("prepare"), array=3)))
    assert Pipeline(name="p", stages=(Stage(job=job("prepare"), array=2), element))
    with pytest.raises(RecipeError, match="have this name"):
        Pipeline(name="p", stages=(first, first))
    with pytest.raises(RecipeError, match="a pipeline needs stages"):
        Pipeline(name="p", stages=())


def test_only_is_the_job_of_a_lone_stage() -> None:
    assert Pipeline.from_job(job()).single_job == job()
    with pytest.raises(RecipeError, match="runs single jobs"):
        _ = Pipeline(name="p", stages=(Stage(job=job("a")), Stage(job=job("b")))).single_job
    with pytest.raises(RecipeError, match="runs single jobs"):
        _ = Pipeline(name="p", stages=(Stage(job=job("a"), array=2),)).single_job


def test_an_array_is_no_job_of_several_processes() -> None:
    assert Stage(job=job(), array=3).array_indices == (0, 1, 2)
    assert Stage(job=job()).array_indices == (None,)
    with pytest.raises(RecipeError, match="either an array"):
        Stage(job=job(procs_per_node=2), array=3)


def test_what_a_launch_keeps_reads_back_equal() -> None:
    import json

    full = job(
        nodes=2,
        procs_per_node=8,
        env={"A": "1"},
        pass_env=("HF_TOKEN",),
        completion="run_dir",
        run_dir="runs/x",
        recipe="[run]\n",
        resources=Resources(gpus_per_node=8, constraint="a100"),
        container=ContainerImage(image="x.sqsh", mounts=("/a:/b:ro",)),
        restart=RestartPolicy(max_restarts=1),
    )
    made = Pipeline(
        name="p",
        stages=(Stage(job=job("a"), array=4, array_limit=2), Stage(job=full, after=("a",), inputs=("x",))),
        out="o",
    )
    assert Pipeline.model_validate(json.loads(json.dumps(made.model_dump(mode="json")))) == made
