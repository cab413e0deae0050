"""Scripts as text: golden, clean for shellcheck, right in their header; and the policy of a job in a queue."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lt_launch.agent import queued
from lt_launch.agent.places import Place, write_table
from lt_launch.job import Container, Job, Pipeline, Resources, Stage
from lt_launch.profile import Profile
from lt_launch.slurm.queue import jobs_of, nodes_of, sacct_states
from lt_launch.slurm.render import render
from lt_trainer.errors import RecipeError
from lt_trainer.resolve import Given

DATA = Path(__file__).parent / "data"
EXAMPLES = Path(__file__).parents[4] / "examples" / "launch"


def profile(**values: Any) -> Profile:
    return Profile(given={name.replace("__", "."): Given(value, "test") for name, value in values.items()})


def job(**changes: Any) -> Job:
    return Job(**{"name": "train", "argv": ("python", "train.py"), **changes})


def script(made: Job, given: Profile | None = None, **stage: Any) -> str:
    pipeline = Pipeline(name="wiki", stages=(Stage(job=made, **stage),))
    return render(pipeline, given or Profile()).files[f"{made.name}.sbatch"]


VARIANTS = {
    "direct": (job(nodes=2, procs_per_node=8, resources=Resources(gpus_per_node=8, exclusive=True)), Profile(), {}),
    "srun": (
        job(nodes=16, procs_per_node=32, spawner="srun", engine="neuron", time_limit_s=90061),
        profile(slurm__partition="trn1", slurm__account="team", slurm__sbatch=["--comment=x"]),
        {},
    ),
    "enroot": (
        job(nodes=8, procs_per_node=8, container=Container(image="/fsx/lt.sqsh", mounts=("/fsx:/fsx",), workdir="/w")),
        profile(slurm__container="enroot", slurm__auto_resume="on"),
        {},
    ),
    "array": (job(name="prepare", resources=Resources(memory_gib=64)), Profile(), {"array": 16, "array_limit": 4}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_scripts_are_as_they_were_and_clean(name: str, tmp_path: Path) -> None:
    made, given, stage = VARIANTS[name]
    text = script(made, given, **stage)
    golden = DATA / f"{name}.sbatch"
    if os.environ.get("LT_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
    assert text == script(made, given, **stage)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, "-"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_a_header_says_what_the_job_needs() -> None:
    made = job(
        nodes=4,
        procs_per_node=8,
        grace_s=300,
        time_limit_s=36 * 3600,
        resources=Resources(gpus_per_node=8, cpus_per_proc=12, exclusive=True, partition="own", constraint="p5"),
    )
    lines = script(made, profile(slurm__partition="other", slurm__exclude=["n7", "n9"])).splitlines()
    header = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    assert header == [
        "--job-name=wiki-train",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--cpus-per-task=96",
        "--gpus-per-node=8",
        "--mem=0",
        "--exclusive",
        "--time=1-12:00:00",
        "--partition=own",
        "--constraint=p5",
        "--exclude=n7,n9",
        "--requeue",
        "--open-mode=append",
        "--output=../stages/train/slurm-%j.out",
        "--signal=B:USR1@330",
        "--kill-on-invalid-dep=yes",
    ]


def test_a_limit_that_leaves_no_time_to_train_is_refused() -> None:
    with pytest.raises(RecipeError, match="leaves no time to train: the warning comes 150 s before the limit"):
        script(job(time_limit_s=150))
    script(job(time_limit_s=151))
    with pytest.raises(RecipeError, match="is not an option"):
        script(job(), profile(slurm__srun=["--a b"]))


def test_dependencies_stand_in_the_commands() -> None:
    stages = (
        Stage(job=job(name="prepare"), array=3),
        Stage(job=job(name="convert")),
        Stage(job=job(name="train"), after=("prepare", "convert")),
    )
    commands = render(Pipeline(name="wiki", stages=stages), Profile()).commands
    assert commands == (
        ("sbatch", "--parsable", "prepare.sbatch"),
        ("sbatch", "--parsable", "convert.sbatch"),
        (
            "sbatch",
            "--parsable",
            "--dependency=afterok:{jobid:prepare},afterok:{jobid:convert}",
            "train.sbatch",
        ),
    )


def test_what_the_controller_answers() -> None:
    text = (
        "JobId=7 ArrayJobId=5 ArrayTaskId=2 JobName=a b UserId=me(1) JobState=PENDING Reason=Resources Nice=0 "
        "Restarts=1 ExitCode=0:0 NodeList=(null)\n"
        "JobId=5 ArrayJobId=5 ArrayTaskId=3-9%2 JobName=x JobState=PENDING Reason=JobArrayTaskLimit Restarts=0\n"
        "JobId=8 JobName=y JobState=FAILED Reason=NonZeroExitCode ExitCode=7:0 NodeList=n[1-2] BatchHost=n1\n"
    )
    first, rest, last = jobs_of(text)
    assert (first.id, first.index, first.state, first.reason, first.nodes) == ("5", 2, "PENDING", "Resources", "")
    assert first.fields["JobName"] == "a b"
    assert (rest.id, rest.index, rest.reason) == ("5", None, "JobArrayTaskLimit")
    assert (last.id, last.state, last.exit_code, last.nodes) == ("8", "FAILED", 7, "n[1-2]")
    (node, down) = nodes_of("n1|high*|allocated|gpu:8|none\nn2|low|down*|(null)|Not responding\n")
    assert (node.name, node.state, node.partition, node.devices) == ("n1", "allocated", "high", "gpu:8")
    assert (down.state, down.reason) == ("down (no answer)", "Not responding")
    assert sacct_states("12|CANCELLED by 0|0:15\n13|COMPLETED|0:0\n")["12"] == ("CANCELLED", "0:15")


# --- attempts of a job in a queue


def spec(**changes: Any) -> dict[str, Any]:
    restart = {"max_restarts": 3, "max_without_progress": 2, "exclude_bad_nodes": True}
    return {"argv": ["true"], "nodes": 3, "procs_per_node": 1, "completion": "run_dir", "restart": restart, **changes}


def attempts(tmp_path: Path, *ended: dict[str, Any]) -> Place:
    path = tmp_path / "train" / "spec.json"
    write_table(path, spec())
    place = Place(path)
    for result in ended:
        number = place.new_attempt()
        write_table(place.attempt(number) / "exit.json", {"code": 75, "reason": "", **result})
    return place


def ended(kind: str, before: int, step: int, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "step_before": before, "step": step, **more}


@pytest.mark.parametrize(
    ("results", "wise", "words"),
    [
        ([ended("failed", -1, 5)], False, "ended as failed is not started again"),
        ([ended("failed", -1, 5, interrupted=True)], False, "ended as failed is not started again"),
        ([ended("stopped", -1, 5)], True, "cut short by the queue; 0 of 3"),
        ([ended("lost", -1, 5)], True, "1 of 3"),
        ([ended("lost", i, i + 1) for i in range(3)], True, "3 of 3"),
        ([ended("lost", i, i + 1) for i in range(4)], False, "3 of 3 restarts are used up"),
        ([ended("stopped", i, i + 1) for i in range(50)], True, "0 of 3"),
        ([ended("killed", 5, 5)], True, "1 of 3"),
        ([ended("killed", -1, 5), ended("killed", 5, 5), ended("killed", 5, 5)], False, "made no new checkpoint"),
        ([ended("killed", 5, 5), ended("killed", 5, 6), ended("killed", 6, 6)], True, "3 of 3"),
        ([ended("stopped", 5, 5)] * 3, True, "0 of 3"),
        ([ended("stopped", 5, 5)] * 4, False, "4 attempt(s) in a row"),
        ([ended("lost", 5, 5, interrupted=True)] * 3, True, "0 of 3"),
    ],
)
def test_when_another_attempt_is_wise(tmp_path: Path, results: list[dict[str, Any]], wise: bool, words: str) -> None:
    place = attempts(tmp_path, *results)
    yes, why = queued.wise(spec(), place)
    assert yes is wise, why
    assert words in why


def test_an_attempt_that_nobody_concluded_was_cut_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = attempts(tmp_path)
    number = place.new_attempt()
    row = {"event": "began", "node": 0, "host": "n1", "time": 1.0, "ranks": [0], "step": 3}
    (place.attempt(number) / "node-00000.jsonl").write_text(json.dumps(row) + "\n")
    assert queued.main(["enter", str(place.stage / "spec.json"), "--restarts", "1"]) == 0
    assert capsys.readouterr().out == "1\n"
    result = json.loads((place.attempt(0) / "exit.json").read_bytes())
    assert (result["kind"], result["interrupted"]) == ("lost", True)


def test_lost_nodes_are_those_that_others_outlived(tmp_path: Path) -> None:
    place = attempts(tmp_path)
    folder = place.attempt(place.new_attempt())
    for node in (0, 1):
        rows = [{"event": "began", "node": node, "host": "h", "time": 1.0, "ranks": [node], "step": -1}]
        rows += [{"event": "left", "node": 0, "time": 2.0, "code": 75, "step": -1}] if node == 0 else []
        (folder / f"node-{node:05}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert queued.lost_nodes(spec(), place, 0) == [1, 2]
    (folder / "node-00000.jsonl").unlink()
    assert queued.lost_nodes(spec(), place, 0) == [], "all are lost: that says nothing about one of them"
