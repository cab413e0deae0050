"""Scripts as text: golden, clean for shellcheck, right in their header; and what Slurm's commands print."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lt_launch.job import ContainerImage, Job, Pipeline, Resources, Stage
from lt_launch.profile import Profile
from lt_launch.slurm.commands import QueueJob, parse_queue
from lt_launch.slurm.target import SlurmTarget
from lt_trainer.errors import RecipeError

DATA = Path(__file__).parent / "data"


def script(job: dict[str, Any], slurm: dict[str, Any], stage: dict[str, Any]) -> str:
    made = Job(**{"name": "train", "argv": ("python", "train.py"), **job})
    profile = Profile().with_values({f"slurm.{name}": value for name, value in slurm.items()}, "test")
    pipeline = Pipeline(name="wiki", stages=(Stage(job=made, **stage),))
    return SlurmTarget().render(pipeline, profile).files[f"{made.name}.sbatch"]


NODE = {"gpus_per_node": 8, "cpus_per_proc": 12, "exclusive": True, "partition": "own", "constraint": "p5"}
SIZE = {"nodes": 4, "procs_per_node": 8, "grace_period_s": 300, "time_limit_s": 36 * 3600}
OPTIONS = {"partition": "other", "exclude": ["n7", "n9"], "account": "team", "sbatch_args": ["--comment=x"]}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "direct": ({**SIZE, "resources": Resources(**NODE)}, OPTIONS, {}),
    "array": ({"name": "prepare", "resources": Resources(memory_gib=64)}, {}, {"array": 16, "array_limit": 4}),
}
"""Job, options and stage; containers and Trainium are in the examples (test_render)."""


@pytest.mark.parametrize("name", VARIANTS)
def test_scripts_are_as_they_were_and_clean(name: str) -> None:
    text = script(*VARIANTS[name])
    golden = DATA / f"{name}.sbatch"
    if os.environ.get("LT_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, "-"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_a_container_gets_the_variables_of_the_job_and_those_that_it_names() -> None:
    job = {"container": ContainerImage(image="i.sqsh"), "env": {"OWN": "1"}, "pass_env": ("MY_TOKEN",)}
    assert "|OWN|MY_TOKEN)\n" in script(job, {}, {})


def test_a_limit_that_leaves_no_time_to_train_is_refused() -> None:
    with pytest.raises(RecipeError, match="leaves no time to train: the signal comes 150 s before the limit"):
        script({"time_limit_s": 150}, {}, {})
    assert "--signal=B:USR1@150\n" in script({"time_limit_s": 151}, {}, {})


def test_what_the_controller_answers() -> None:
    text = "5|2|PENDING|Resources\n5|N/A|COMPLETED|None\n8|N/A|TIMEOUT|TimeLimit\n9|N/A|NEW|None\n"
    assert parse_queue(text) == [
        QueueJob("5", 2, "pending", "Resources"),
        QueueJob("5", None, "completed", "COMPLETED"),
        QueueJob("8", None, "failed", "TimeLimit"),
        QueueJob("9", None, "failed", "NEW"),
    ]
