"""Scripts as text: golden, clean for shellcheck, right in their header; and the policy of a job in a queue."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lt_launch import policy
from lt_launch.job import ContainerImage, Job, Pipeline, Resources, Stage
from lt_launch.policy import Place, write_table
from lt_launch.profile import Profile
from lt_launch.slurm.commands import parse_jobs, parse_nodes, parse_sacct
from lt_launch.slurm.render import render
from lt_launch.slurm.target import SlurmTarget
from lt_trainer.config.section import Given
from lt_trainer.errors import RecipeError

DATA = Path(__file__).parent / "data"
EXAMPLES = Path(__file__).parents[4] / "examples" / "launch"


def profile(**values: Any) -> Profile:
    return Profile(values={name.replace("__", "."): Given(value, "test") for name, value in values.items()})


def job(**changes: Any) -> Job:
    return Job(**{"name": "train", "argv": ("python", "train.py"), **changes})


def script(made: Job, given: Profile | None = None, **stage: Any) -> str:
    pipeline = Pipeline(name="wiki", stages=(Stage(job=made, **stage),))
    return render(pipeline, given or Profile()).files[f"{made.name}.sbatch"]


VARIANTS = {
    "direct": (
        job(
            nodes=4,
            procs_per_node=8,
            grace_period_s=300,
            time_limit_s=36 * 3600,
            resources=Resources(gpus_per_node=8, cpus_per_proc=12, exclusive=True, partition="own", constraint="p5"),
        ),
        profile(slurm__partition="other", slurm__exclude=["n7", "n9"]),
        {},
    ),
    "srun": (
        job(nodes=16, procs_per_node=32, engine="neuron", time_limit_s=90061),
        profile(slurm__partition="trn1", slurm__account="team", slurm__sbatch_args=["--comment=x"]),
        {},
    ),
    "enroot": (
        job(
            nodes=8,
            procs_per_node=8,
            container=ContainerImage(image="/fsx/lt.sqsh", mounts=("/fsx:/fsx",), workdir="/w"),
        ),
        profile(slurm__container_runtime="enroot", slurm__auto_resume="on"),
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


def test_a_limit_that_leaves_no_time_to_train_is_refused() -> None:
    with pytest.raises(RecipeError, match="leaves no time to train: the signal comes 150 s before the limit"):
        script(job(time_limit_s=150))
    script(job(time_limit_s=151))
    with pytest.raises(RecipeError, match="has a blank"):
        script(job(), profile(slurm__srun_args=["--a b"]))


def test_a_warning_that_comes_too_late_to_save_is_refused() -> None:
    late = profile(slurm__signal_lead_time_s=119)
    with pytest.raises(
        RecipeError,
        match=r"slurm.signal_lead_time_s = 119, job.grace_period_s = 120.0: is shorter than the grace period",
    ):
        script(job(grace_period_s=120), late)
    assert "--signal=B:USR1@119\n" in script(job(grace_period_s=119), late)


def test_values_that_enroot_would_change_are_refused() -> None:
    """Its common::envfmt removes quotes around a value; pyxis passes the environment of the task."""
    image = ContainerImage(image="/fsx/lt.sqsh")
    made = job(env={"WORD": '"a" and "b"'}, container=image)
    with pytest.raises(RecipeError, match=r"job.env.WORD = '\"a\" and \"b\"': enroot removes the quotes"):
        script(made)
    with pytest.raises(RecipeError, match=r"^env.WORD = \"'a'\": enroot removes the quotes"):
        script(job(container=image), profile(env__WORD="'a'"))
    assert script(made, profile(slurm__container_runtime="pyxis"))
    assert script(job(env={"WORD": '{"a": 1} "b"'}, container=image))
    assert script(job(env={"WORD": '"a"'}))


def test_what_the_controller_answers() -> None:
    text = (
        "JobId=7 ArrayJobId=5 ArrayTaskId=2 JobName=a b UserId=me(1) JobState=PENDING Reason=Resources Nice=0 "
        "Restarts=1 ExitCode=0:0 NodeList=(null)\n"
        "JobId=5 ArrayJobId=5 ArrayTaskId=3-9%2 JobName=x JobState=PENDING Reason=JobArrayTaskLimit Restarts=0\n"
        "JobId=8 JobName=y JobState=FAILED Reason=NonZeroExitCode ExitCode=7:0 NodeList=n[1-2] BatchHost=n1\n"
    )
    first, rest, last = parse_jobs(text)
    assert (first.id, first.index, first.state, first.reason, first.nodes) == ("5", 2, "PENDING", "Resources", "")
    assert first.fields["JobName"] == "a b"
    assert (rest.id, rest.index, rest.reason) == ("5", None, "JobArrayTaskLimit")
    assert (last.id, last.state, last.exit_code, last.nodes) == ("8", "FAILED", 7, "n[1-2]")
    (node, down) = parse_nodes("n1|high*|allocated|gpu:8|none\nn2|low|down*|(null)|Not responding\n")
    assert (node.name, node.state, node.partition, node.devices) == ("n1", "allocated", "high", "gpu:8")
    assert (down.state, down.reason) == ("down (no answer)", "Not responding")
    assert parse_sacct("12|CANCELLED by 0|0:15\n13|COMPLETED|0:0\n")["12"] == ("CANCELLED", "0:15")


def test_the_jobs_that_are_listed_are_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of users whose names begin or end alike."""
    names = ("ann", "anna", "joann", "ann")
    text = "".join(
        f"JobId={7 + i} JobName=x UserId={name}(1{i}) JobState=RUNNING NodeList=n1\n" for i, name in enumerate(names)
    )
    monkeypatch.setattr("lt_launch.slurm.target.run_slurm_command", lambda *command, **_: text)
    monkeypatch.setattr("getpass.getuser", lambda: "ann")
    assert [job.job_id for job in SlurmTarget().list(profile())] == ["7", "10"]


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
def test_when_another_attempt_may_help(tmp_path: Path, results: list[dict[str, Any]], wise: bool, words: str) -> None:
    place = attempts(tmp_path, *results)
    yes, why = policy.should_requeue(spec(), place)
    assert yes is wise, why
    assert words in why


def begin(place: Place, restarts: int = 0) -> int | None:
    wanted = policy.read_table(place.stage / "spec.json")
    assert wanted is not None
    return policy.begin_attempt(wanted, place, restarts)


def leave(place: Place, number: int, codes: dict[int, int]) -> None:
    """What the processes of an attempt leave: their exit codes, in the order given."""
    for at, (rank, code) in enumerate(codes.items()):
        file = place.attempt(number) / "notes" / str(rank)
        file.write_text(f"{code} n{rank + 1}\n")
        os.utime(file, (at, at))


def result_of(place: Place, number: int) -> dict[str, Any]:
    return json.loads((place.attempt(number) / "exit.json").read_bytes())


def test_lost_nodes_are_those_that_others_outlived() -> None:
    note = (75, "n1", 1.0)
    assert policy.lost_nodes(spec(), {0: note}) == [1, 2]
    assert policy.lost_nodes(spec(procs_per_node=2), {0: note, 3: note}) == [2]
    assert policy.lost_nodes(spec(), {}) == [], "all are lost: that says nothing about one of them"


# --- what must not be taken for a success, and what a person's own start begins anew


def test_an_attempt_that_was_cut_short_before_any_process_began_is_no_success(tmp_path: Path) -> None:
    """Of a job without a run directory nothing but its exit codes can prove that it has run."""
    place = attempts(tmp_path)
    write_table(place.stage / "spec.json", spec(completion="exit"))
    assert begin(place) == 0
    assert begin(place, restarts=1) == 1
    result = result_of(place, 0)
    assert (result["kind"], result["code"], result["interrupted"]) == ("lost", 75, True)
    assert not place.stamp.exists()


def test_processes_that_nobody_started_are_no_success(tmp_path: Path) -> None:
    """As srun ends with 0 when a node was lost and the others had finished."""
    place = attempts(tmp_path)
    wanted = spec(completion="exit")
    write_table(place.stage / "spec.json", wanted)
    for number, present in enumerate([(0, 2), (0, 1, 2)]):
        assert begin(place) == number
        leave(place, number, dict.fromkeys(present, 0))
        result = policy.conclude(wanted, place, number, 0)
        assert result | {"first": None} == result_of(place, number) | {"first": None}
        assert result["kind"] == ("done" if number else "lost")
    assert result_of(place, 0)["first"]["ranks"] == [1]
    assert place.stamp.exists()


def test_training_is_done_when_rank_0_noted_so_in_this_attempt(tmp_path: Path) -> None:
    wanted = spec(run_dir="run", cwd=str(tmp_path), nodes=1)
    place = attempts(tmp_path)
    write_table(place.stage / "spec.json", wanted)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").write_text('{"event": "completed"}\n')
    for number in range(2):
        assert begin(place) == number
        leave(place, number, {0: 0})
        with (tmp_path / "run" / "events.jsonl").open("a") as file:
            file.write('{"event": "completed"}\n' * number)
        assert policy.conclude(wanted, place, number, 0)["kind"] == ("done" if number else "failed")


@pytest.mark.parametrize(
    ("codes", "code", "asked", "killed", "ending"),
    [
        ({}, 1, False, False, ("failed", 1, None)),
        ({}, 137, False, False, ("killed", 137, None)),
        ({}, 138, True, False, ("stopped", 75, None)),
        ({}, 142, False, False, ("requeued", 75, None)),
        ({}, 75, True, False, ("stopped", 75, None)),
        ({0: 75, 1: 75, 2: 75}, 75, False, False, ("requeued", 75, 0)),
        ({0: 75, 1: 75, 2: 75}, 75, True, False, ("stopped", 75, None)),
        ({0: 75, 1: 75, 2: 138}, 138, True, False, ("stopped", 75, None)),
        ({1: 137, 0: 75, 2: 75}, 137, False, False, ("killed", 137, 1)),
        ({2: 1, 1: 64, 0: 75}, 75, False, False, ("failed", 64, 1)),
        ({2: 1, 1: 64, 0: 75}, 75, True, False, ("failed", 64, 1)),
        ({2: 7, 0: 143}, 143, False, True, ("failed", 7, 2)),
        ({0: 75, 1: 75}, 137, False, False, ("lost", 75, 2)),
        ({0: 75, 1: 75}, 137, True, True, ("stopped", 75, None)),
        ({0: 0, 1: 0, 2: 0}, 0, True, False, ("done", 0, None)),
        ({0: 0, 1: 0, 2: 0}, 138, False, False, ("done", 0, None)),
    ],
)
def test_how_an_attempt_ended(
    codes: dict[int, int], code: int, asked: bool, killed: bool, ending: tuple[str, int, int | None]
) -> None:
    notes = {rank: (one, f"n{rank + 1}", float(at)) for at, (rank, one) in enumerate(codes.items())}
    kind, ended, _, first = policy.judge(range(3), notes, code, asked=asked, killed=killed)
    assert (kind, ended, first) == ending


def test_a_rank_that_the_kernels_timer_ended_has_left_with_75(tmp_path: Path) -> None:
    """It hung and held Python's lock."""
    (tmp_path / "1").write_text("142 n2\n")
    (tmp_path / "0").write_text("75 n1\n")
    notes = policy.read_notes(tmp_path)
    assert {rank: note[0] for rank, note in notes.items()} == {0: 75, 1: 75}
    assert policy.judge(range(2), notes, 142)[:2] == ("requeued", 75)


def test_the_policy_runs_alone(tmp_path: Path) -> None:
    """As `python3 <out>/launch/policy.py`, isolated from what is installed."""
    copy = tmp_path / "policy.py"
    copy.write_bytes(Path(policy.__file__).read_bytes())
    command = [sys.executable, "-I", "-S", copy, "run", tmp_path / "missing.json", "--", "srun"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 64
    assert "submit this script in its own folder" in done.stderr


EVERYTHING = {
    "nodes": 16,
    "procs_per_node": 32,
    "time_limit_s": 90061,
    "resources": Resources(
        cpus_per_proc=4, memory_gib=100, gpus_per_node=8, exclusive=True, partition="own", constraint="p5"
    ),
    "container": ContainerImage(image="/fsx/lt.sqsh", mounts=("/fsx:/fsx", "/data:/data:ro"), workdir="/w"),
}


def test_what_was_before_a_person_launched_again_does_not_count(tmp_path: Path) -> None:
    place = attempts(tmp_path, *[ended("lost", 5, 5)] * 5)
    assert not policy.should_requeue(spec(), place)[0]
    assert begin(place) == 5, "a person's start is never refused"
    write_table(place.attempt(5) / "exit.json", ended("lost", 5, 5, code=75, reason=""))
    assert policy.should_requeue(spec(), place) == (True, "attempt 5 was ended as lost; 1 of 3 restarts are used")
    assert begin(place, restarts=1) == 6
    write_table(place.attempt(6) / "exit.json", ended("lost", 5, 5, code=75, reason=""))
    assert not policy.should_requeue(spec(), place)[0]
    assert begin(place, restarts=2) is None


@pytest.mark.parametrize(
    ("bad", "partition", "never", "out"),
    [
        (["n2"], "n1 idle\nn2 idle\nn3 alloc\n", "", ["n2"]),
        (["n2", "n3"], "n1 idle\nn2 mix\nn3 comp\n", "", ["n3"]),
        (["n2", "n3", "n2"], "n1 idle\nn2 mix\nn3 comp\n", "", ["n2"]),
        (["n2", "n3"], "n1 idle\nn2 down*\nn3 idle\nn4 idle\n", "", ["n3", "n2"]),
        (["n2", "n3"], "n1 idle\nn2 idle\nn3 idle\nn4 drng\n", "", ["n3"]),
        (["n2"], "n1 idle\nn2 idle\nn3 idle*\n", "", []),
        (["n2"], "n1 idle\nn2 idle\nn3 idle\n", "n1", []),
    ],
)
def test_lost_nodes_are_left_out_while_enough_others_can_be_had(
    bad: list[str], partition: str, never: str, out: list[str]
) -> None:
    assert policy.avoid(2, bad, partition.splitlines(), never.split(",")) == out


def test_nodes_that_the_profile_leaves_out_reach_the_policy() -> None:
    pipeline = Pipeline(name="wiki", stages=(Stage(job=job()),))
    specs = SlurmTarget().stage_specs(pipeline, profile(slurm__exclude=["n7", "n9"]), cwd="")
    assert specs["train"]["never"] == "n7,n9"
