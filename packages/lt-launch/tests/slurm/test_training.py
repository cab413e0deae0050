"""Training on a real cluster, preempted, warned, killed, robbed of nodes at random steps: all losses are bit-equal."""

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from lt_launch.policy import Place
from lt_launch.slurm.target import SlurmTarget
from lt_launch.target import Launch
from lt_trainer.run_directory.jsonl import read_jsonl

JOB = """
[job]
name = "train"
recipe = "recipe-{name}.toml"
nodes = 2
env = {{ OMP_NUM_THREADS = "1", GLOO_SOCKET_IFNAME = "lo" }}
restart = {{ max_restarts = 100, max_without_progress = 3 }}
[profile.slurm]
partition = "low"
step_wait_timeout_s = 30
{more}
"""
SEED = int(os.environ.get("LT_SEED", "9"))
ENDINGS = {"warned": "stopped", "preempted": "stopped", "rank_killed": "killed", "node_killed": "lost stopped"}
"""How an attempt ends, by what cut it short; the end of a node may be noticed first by Slurm, which stops the job."""


@pytest.fixture
def train(
    submit: Callable[..., Launch], store: Path, tiny_recipe: Callable[..., str], tmp_path: Path
) -> Callable[..., Launch]:
    """Submit a training job."""
    pytest.importorskip("lt_trainer_gpu", reason="needs an engine: pip install lt-trainer-gpu")

    def go(name: str, steps: int, *, more: str = "") -> Launch:
        fields = {"run.dir": name, "data.store": str(store), "schedule.max_steps": steps, "parallel.n_nodes": 2}
        (tmp_path / f"recipe-{name}.toml").write_text(tiny_recipe({**fields, "fault_tolerance.grace_period_s": 15}))
        return submit(JOB.format(name=name, more=more))

    return go


def losses(launch: Launch) -> dict[int, float]:
    """Loss by step; steps that were done twice must have had the same."""
    found: dict[int, float] = {}
    file = launch.directory.parent / "metrics.jsonl"
    for row in read_jsonl(file) if file.exists() else []:
        if "loss" in row:
            assert found.setdefault(row["step"], row["loss"]) == row["loss"], row["step"]
    return found


class Disturber:
    """Ways in which a cluster cuts an attempt short."""

    def __init__(self, cluster: Any, launch: Launch) -> None:
        self.cluster, self.launch, self.id = cluster, launch, launch.job_ids["train"]

    def warned(self) -> None:
        """What Slurm sends ahead of a time limit."""
        self.cluster.run("scancel", "--signal=USR1", "--batch", self.id)
        self.requeued()

    def preempted(self) -> None:
        other = self.cluster.run("sbatch", "--parsable", "-p", "high", "-N3", "--exclusive", "--wrap=true").strip()
        self.requeued()
        self.cluster.wait_for_end(other)

    def rank_killed(self) -> None:
        self.cluster.wait_for(lambda: self.rank(1), "a rank").kill()
        self.requeued()

    def node_killed(self) -> None:
        node = self.second_node()
        self.cluster.kill_node(node)
        self.requeued()
        self.cluster.start_node(node)
        self.cluster.wait_for(lambda: self.cluster.states()[node] in ("idle", "alloc", "mix"), "the node")

    def controller_restarted(self) -> None:
        """Nothing is cut short: jobs do not notice."""
        self.cluster.stop_controller()
        self.cluster.start_controller()

    def second_node(self) -> str:
        return self.cluster.run("scontrol", "show", "hostnames", self.cluster.job(self.id)["NodeList"]).split()[1]

    def requeued(self) -> None:
        def again() -> bool:
            job = self.cluster.job_in_a_hurry(self.id)
            assert job["JobState"] not in ("COMPLETED", "FAILED", "CANCELLED"), (job, self.exits())
            return int(job["Restarts"]) > self.before

        self.cluster.wait_for(again, "the job in the queue again")

    def exits(self) -> list[dict[str, Any]]:
        return self.cluster.exits(self.launch, "train")

    def attempt(self) -> Path | None:
        """The folder of the newest attempt."""
        place = Place(self.launch.directory / "stages" / "train" / "spec.json")
        numbers = place.attempts()
        return place.attempt(numbers[-1]) if numbers else None

    def rank(self, rank: int) -> psutil.Process | None:
        """The process of a rank of the newest attempt."""
        for process in self.cluster.processes(LT_NOTES=f"{self.attempt()}/notes", RANK=str(rank)):
            if "lt_trainer" in process.cmdline()[1:4]:
                return process
        return None

    def wait_for_step(self, step: int) -> None:
        """Wait until a running attempt is at that step."""

        def there() -> bool:
            job, attempt = self.cluster.job_in_a_hurry(self.id), self.attempt()
            assert job["JobState"] not in ("FAILED", "CANCELLED", "COMPLETED"), (job, self.exits())
            running = attempt and (attempt / "notes" / "step").exists() and not (attempt / "exit.json").exists()
            return job["JobState"] == "RUNNING" and bool(running) and max(losses(self.launch), default=0) >= step

        self.cluster.wait_for(there, f"step {step}", 240)
        self.before = int(self.cluster.job(self.id)["Restarts"])


def check(cluster: Any, train: Any, count: int, steps: int) -> None:
    """A run that is disturbed at random steps, in all ways in turn, has the losses of an undisturbed one."""
    chance = random.Random(SEED)
    undisturbed = train("undisturbed", steps)
    assert cluster.wait_for_end(undisturbed.job_ids["train"], 1200)["JobState"] == "COMPLETED"
    wanted = losses(undisturbed)
    assert sorted(wanted) == list(range(1, steps + 1))
    made = train("disturbed", steps)
    disturber, kinds = Disturber(cluster, made), ["controller_restarted", *ENDINGS]
    done: list[str] = []
    while len(done) < count:
        for kind in chance.sample(kinds, len(kinds))[: count - len(done)]:
            disturber.wait_for_step(max(losses(made), default=0) + chance.randint(2, 12))
            getattr(disturber, kind)()
            done.append(kind)
    job = cluster.wait_for_end(disturber.id, 1200)
    assert job["JobState"] == "COMPLETED", (job, disturber.exits())
    assert losses(made) == wanted
    ended, cuts = disturber.exits(), [name for name in done if name in ENDINGS]
    again = cuts.count("node_killed")  # Slurm may put the job back once more when it notices by itself
    assert len(cuts) < len(ended) <= len(cuts) + 1 + again, "one attempt for each cut, and no loop"
    assert ended[-1]["kind"] == "done"
    for name, result in zip(cuts, ended, strict=False):
        assert result["kind"] in ENDINGS[name], (name, result)
        if name == "rank_killed":
            assert (result["first"]["rank"], result["first"]["code"]) == (1, -9)
        if name == "node_killed":
            break
    (status,) = SlurmTarget().status(made)
    assert (status.state, status.attempt, status.job_id) == ("completed", len(ended) - 1, disturber.id)
    sys.stdout.write(f"{len(done)} disturbances, {len(ended)} attempts, {steps} steps: {', '.join(done)}\n")


def test_disturbances_leave_every_loss_as_it_was(cluster: Any, train: Any) -> None:
    check(cluster, train, 2, 120)


@pytest.mark.slow
def test_twenty_disturbances_leave_every_loss_as_it_was(cluster: Any, train: Any) -> None:
    check(cluster, train, int(os.environ.get("LT_KILLS", "20")), 820)


def test_training_is_saved_when_it_is_cancelled(cluster: Any, train: Any) -> None:
    made = train("stopped", 100000)
    disturber = Disturber(cluster, made)
    disturber.wait_for_step(3)
    assert list(SlurmTarget().cancel(made)) == [f"train: job {disturber.id} was signaled to save and stop"]
    job = cluster.wait_for_end(disturber.id)
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "75:0")
    (status,) = SlurmTarget().status(made)
    assert (status.state, status.exit_code) == ("cancelled", 75)
    assert len(disturber.exits()) == 1, "it does not come back"
    steps = sorted((made.directory.parent / "checkpoints").glob("step-*/COMMIT"))
    assert int(steps[-1].parent.name.removeprefix("step-")) == max(losses(made))


@pytest.mark.slow
def test_a_rank_whose_step_daemon_is_killed_leaves_and_the_run_goes_on(cluster: Any, train: Any) -> None:
    """Slurm no longer knows of it: by itself it would train on beside the next attempt."""
    made = train("orphans", 150)
    disturber = Disturber(cluster, made)
    disturber.wait_for_step(10)
    rank = cluster.wait_for(lambda: disturber.rank(1), "a rank")
    daemon = rank.parent().parent()
    assert "slurmstepd" in daemon.name()
    daemon.kill()
    rank.wait(30)
    assert cluster.wait_for_end(disturber.id)["JobState"] == "COMPLETED", disturber.exits()
    assert sorted(losses(made)) == list(range(1, 151))
    assert disturber.exits()[-1]["kind"] == "done"


AUTO_RESUME = """#!/bin/bash
# srun, as SageMaker HyperPod describes --auto-resume=1: when the node of a failed step has been replaced, it begins
# anew in the same job; without GRES, which makes it a requeue
case "$*" in *--auto-resume=1*) ;; *) exec REAL "$@" ;; esac
REAL "$@" && exit
touch FOLDER/failed
while [ ! -e FOLDER/replaced ]; do sleep 0.2; done
exec REAL "$@"
"""


@pytest.mark.slow
def test_a_step_that_begins_anew_on_a_replaced_node_goes_on_in_the_same_attempt(
    cluster: Any, train: Any, tmp_path: Path, fake: Callable[[str, str], None]
) -> None:
    """The job is not requeued, and what was about to end the first step's survivors leaves the second alone."""
    undisturbed = train("undisturbed", 100)
    assert cluster.wait_for_end(undisturbed.job_ids["train"])["JobState"] == "COMPLETED"
    fake("srun", AUTO_RESUME)
    made = train("resumed", 100, more='auto_resume = "on"')
    disturber = Disturber(cluster, made)
    disturber.wait_for_step(12)
    node = disturber.second_node()
    cluster.wait_for(lambda: disturber.rank(1), "a rank").kill()
    cluster.wait_for((tmp_path / "failed").exists, "the end of the step")
    cluster.daemons[f"slurmd-{node}"].kill()
    cluster.daemons[f"slurmd-{node}"].wait(60)
    cluster.start_node(node, "-c")
    (tmp_path / "replaced").touch()
    job = cluster.wait_for_end(disturber.id)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), disturber.exits()
    assert losses(made) == losses(undisturbed)
    assert [one["kind"] for one in disturber.exits()] == ["done"]
