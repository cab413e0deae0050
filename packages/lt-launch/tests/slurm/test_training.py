"""Training on a real cluster, preempted, warned, killed, robbed of nodes at random steps: all losses are bit-equal."""

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lt_launch.launch_dir import load_launch
from lt_launch.launcher import launch
from lt_launch.policy import Place, read_table
from lt_launch.profile import Profile
from lt_launch.run_file import RunOverrides, read_run_file
from lt_launch.slurm.target import SlurmTarget
from lt_launch.target import Launch

RECIPE = """
[run]
dir = "run"
engine = "{engine}"
[model]
hidden_size = 32
intermediate_size = 64
n_heads = 2
n_kv_heads = 1
n_layers = 1
tie_word_embeddings = true
[data]
store = "{store}"
seq_len = 64
[batch]
global_batch_size = 8
micro_batch_size = 2
[optimizer]
lr = 3e-3
[schedule]
max_steps = {steps}
warmup_steps = 3
min_lr = 3e-4
[checkpoint]
interval = {interval}
[metrics]
log_interval = 1
[fault_tolerance]
grace_period_s = 15
hang_timeout_s = 60
[parallel]
n_nodes = 2
"""
ON_A_CPU = """
[engine.gpu]
device = "cpu"
dtype = "float32"
"""
JOB = """
[job]
name = "train"
recipe = "recipe.toml"
nodes = 2
procs_per_node = {procs}
env = {{ OMP_NUM_THREADS = "1", PYTHONPATH = "{engines}" }}
restart = {{ max_restarts = 100, max_without_progress = 3 }}
[profile]
python = "{python}"
[profile.slurm]
partition = "low"
step_wait_timeout_s = 30
"""
NO_ENGINE = "needs an engine: pip install lt-trainer-gpu"
SEED = int(os.environ.get("LT_SEED", "7"))


@pytest.fixture
def submit(
    cluster: Any, store: Path, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Submit a training job; gives the launch and the job's id."""
    monkeypatch.setenv("LT_LAUNCH_HOME", str(tmp_path / "home"))
    engines = installed_engine(tmp_path / "engines")
    monkeypatch.syspath_prepend(engines)

    def go(name: str, steps: int, *, engine: str = "gpu", interval: int = 5, slurm: str = "") -> tuple[Launch, str]:
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        (folder / "recipe.toml").write_text(
            RECIPE.format(store=store, steps=steps, interval=interval, engine=engine)
            + (ON_A_CPU if engine == "gpu" else "")
        )
        (folder / "job.toml").write_text(
            JOB.format(python=python, engines=engines, procs=2 if engine == "numpy" else 1) + slurm
        )
        file = read_run_file("job.toml", Profile(), RunOverrides())
        assert launch(file.pipeline, file.profile, "slurm") == 0
        made = load_launch(folder / "run")
        return made, made.job_ids["train"]

    return go


def installed_engine(folder: Path) -> str:
    """Make numpy_engine.py an installed package in a new folder for PYTHONPATH; the folder."""
    info = folder / "numpy_engine-1.0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("numpy_engine.py"), folder)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lt.engines]\nnumpy = numpy_engine:SPEC\n")
    return str(folder)


def losses(launch: Launch) -> dict[int, float]:
    """Loss by step; steps that were done twice must have had the same."""
    found: dict[int, float] = {}
    file = launch.directory.parent / "metrics.jsonl"
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:  # cut by a kill
            continue
        if "loss" in row:
            assert found.setdefault(row["step"], row["loss"]) == row["loss"], row["step"]
    return found


def exits(launch: Launch) -> list[dict[str, Any]]:
    place = Place(launch.directory / "stages" / "train" / "spec.json")
    return [read_table(place.attempt(number) / "exit.json") or {} for number in place.attempts()]


class Disturber:
    """Ways in which a cluster cuts an attempt short."""

    def __init__(self, cluster: Any, launch: Launch, id_: str) -> None:
        self.cluster, self.launch, self.id = cluster, launch, id_
        self.kinds = [self.warning, self.controller_restarted, self.preemption, self.rank_killed, self.node_killed]

    def warning(self) -> None:
        """What Slurm sends ahead of a time limit."""
        self.cluster.run("scancel", "--signal=USR1", "--batch", self.id)
        self.requeued()

    def preemption(self) -> None:
        other = self.cluster.run("sbatch", "--parsable", "-p", "high", "-N3", "--exclusive", "--wrap=true").strip()
        self.requeued()
        self.cluster.wait_for_end(other)

    def rank_killed(self) -> None:
        self.cluster.wait_for(lambda: self.pid(1), "a rank")
        os.kill(self.pid(1), signal.SIGKILL)
        self.requeued()

    def node_killed(self) -> None:
        nodes = self.cluster.run("scontrol", "show", "hostnames", self.cluster.job(self.id)["NodeList"]).split()
        self.cluster.kill_node(nodes[1])
        self.requeued()
        self.cluster.start_node(nodes[1])
        self.cluster.wait_for(lambda: self.cluster.states()[nodes[1]] in ("idle", "alloc", "mix"), "the node")

    def controller_restarted(self) -> None:
        """Nothing is cut short: jobs do not notice."""
        self.cluster.stop_controller()
        self.cluster.start_controller()

    def requeued(self) -> None:
        def again() -> bool:
            job = self.cluster.job(self.id)
            if job["JobState"] == "PENDING" and int(job["Restarts"]) > self.before:
                self.cluster.go_now(self.id)
                return True
            assert job["JobState"] not in ("COMPLETED", "FAILED", "CANCELLED"), (job, exits(self.launch))
            return False

        self.cluster.wait_for(again, "the job in the queue again")

    def pid(self, rank: int) -> int:
        """The process of a rank of the newest attempt; 0 where there is none."""
        place = Place(self.launch.directory / "stages" / "train" / "spec.json")
        wanted = {f"LT_NOTES={place.attempt(place.attempts()[-1]) / 'notes'}".encode(), f"RANK={rank}".encode()}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                is_wanted = wanted <= set((folder / "environ").read_bytes().split(b"\0"))
                if is_wanted and b"lt_trainer" in (folder / "cmdline").read_bytes().split(b"\0")[1:4]:
                    return int(folder.name)
            except OSError:
                continue
        return 0

    def at_step(self, step: int) -> bool:
        """Wait until an attempt is at that step; False when training was over before."""

        def there() -> str:
            job = self.cluster.go_now_if_requeued(self.id)
            assert job["JobState"] not in ("FAILED", "CANCELLED"), (job, exits(self.launch))
            if job["JobState"] == "COMPLETED":
                return "over"
            running = job["JobState"] == "RUNNING" and _running(self.launch)
            return "there" if running and max(losses(self.launch), default=0) >= step else ""

        self.before = int(self.cluster.job(self.id)["Restarts"])
        found = self.cluster.wait_for(there, f"step {step}", 240)
        self.before = int(self.cluster.job(self.id)["Restarts"])
        return found == "there"


def disturbed(
    cluster: Any, submit: Callable[..., Any], engine: str, count: int, steps: int
) -> tuple[Launch, list[str]]:
    """A run that is disturbed at `count` random steps, in all ways in turn."""
    chance = random.Random(SEED)
    made, id_ = submit("disturbed", steps, engine=engine)
    disturber = Disturber(cluster, made, id_)
    done = []
    for at in range(count):
        if not disturber.at_step(max(losses(made), default=0) + chance.randint(2, 12)):
            break
        kind = disturber.kinds[at % len(disturber.kinds)]
        kind()
        done.append(kind.__name__)
    job = cluster.wait_for_end(id_, 1200)
    assert job["JobState"] == "COMPLETED", (job, exits(made), (made.directory / "stages" / "train").iterdir())
    return made, done


def check(cluster: Any, submit: Callable[..., Any], engine: str, count: int, steps: int) -> None:
    undisturbed, id_ = submit("undisturbed", steps, engine=engine)
    assert cluster.wait_for_end(id_, 1200)["JobState"] == "COMPLETED", exits(undisturbed)
    wanted = losses(undisturbed)
    assert sorted(wanted) == list(range(1, steps + 1))
    made, done = disturbed(cluster, submit, engine, count, steps)
    assert losses(made) == wanted
    ended = exits(made)
    assert len(done) >= count - 1, "training was over before it could be disturbed"
    cuts = [name for name in done if name != "controller_restarted"]
    again = cuts.count("node_killed")  # Slurm may put the job back once more when it notices by itself
    assert len(cuts) < len(ended) <= len(cuts) + 1 + again, "one attempt for each cut, and no loop"
    assert ended[-1]["kind"] == "done"
    kinds = {"warning": ("stopped",), "preemption": ("stopped",), "rank_killed": ("killed",), "node_killed": ("lost",)}
    for name, result in zip(cuts[:3], ended, strict=False):
        assert result["kind"] in kinds[name], (name, result)
        if name == "rank_killed":
            assert (result["first"]["rank"], result["first"]["code"]) == (1, -9)
    (status,) = SlurmTarget().status(made)
    assert (status.state, status.attempt, status.job_id) == ("completed", len(ended) - 1, made.job_ids["train"])


def test_five_disturbances_leave_every_loss_as_it_was(cluster: Any, submit: Callable[..., Any]) -> None:
    """With an engine that starts in no time: all but the arithmetic is what trains elsewhere."""
    check(cluster, submit, "numpy", 5, 120)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "steps"), [("numpy", 700), ("gpu", 800)])
def test_twenty_disturbances_leave_every_loss_as_it_was(
    cluster: Any, submit: Callable[..., Any], engine: str, steps: int
) -> None:
    """With torch each attempt takes the time that two ranks need to import it."""
    if engine == "gpu":
        pytest.importorskip("lt_trainer_gpu", reason=NO_ENGINE)
    check(cluster, submit, engine, int(os.environ.get("LT_KILLS", "20")), steps)


def test_training_is_saved_when_it_is_cancelled(cluster: Any, submit: Callable[..., Any]) -> None:
    pytest.importorskip("lt_trainer_gpu", reason=NO_ENGINE)
    made, id_ = submit("stopped", 100000)
    cluster.wait_for(lambda: max(losses(made), default=0) >= 3, "step 3")
    assert list(SlurmTarget().cancel(made)) == [f"train: job {id_} was signaled to save and stop"]
    job = cluster.wait_for_end(id_)
    assert job["JobState"] == "FAILED"
    assert job["ExitCode"] == "75:0"
    (status,) = SlurmTarget().status(made)
    assert (status.state, status.exit_code) == ("cancelled", 75)
    assert len(exits(made)) == 1, "it does not come back"
    steps = sorted((made.directory.parent / "checkpoints").glob("step-*/COMMIT"))
    assert int(steps[-1].parent.name.removeprefix("step-")) == max(losses(made))


@pytest.mark.slow
def test_ranks_whose_step_daemon_is_killed_leave_and_the_run_goes_on(cluster: Any, submit: Callable[..., Any]) -> None:
    """Slurm no longer knows of them: by themselves they would train on beside the next attempt."""
    made, id_ = submit("orphans", 100, engine="numpy")
    disturber = Disturber(cluster, made, id_)
    assert disturber.at_step(10)
    ranks = [disturber.pid(rank) for rank in (2, 3)]
    daemon = parent_of(parent_of(ranks[0]))
    assert "slurmstepd" in Path(f"/proc/{daemon}/comm").read_text()
    os.kill(daemon, signal.SIGKILL)
    cluster.wait_for(lambda: not any(parent_of(pid) for pid in ranks), "the end of the ranks", 30)
    assert cluster.wait_for_end(id_)["JobState"] == "COMPLETED", exits(made)
    assert sorted(losses(made)) == list(range(1, 101))
    assert exits(made)[-1]["kind"] == "done"


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
    cluster: Any, submit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is not requeued, and what was about to end the first step's survivors leaves the second alone."""
    undisturbed, id_ = submit("undisturbed", 60, engine="numpy")
    assert cluster.wait_for_end(id_)["JobState"] == "COMPLETED", exits(undisturbed)
    real = shutil.which("srun")
    assert real is not None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(AUTO_RESUME.replace("REAL", real).replace("FOLDER", str(tmp_path)))
    (tmp_path / "bin" / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    made, id_ = submit("resumed", 60, engine="numpy", slurm='auto_resume = "on"')
    disturber = Disturber(cluster, made, id_)
    assert disturber.at_step(12)
    node = cluster.run("scontrol", "show", "hostnames", cluster.job(id_)["NodeList"]).split()[1]
    for rank in (2, 3):
        os.kill(disturber.pid(rank), signal.SIGKILL)
    cluster.wait_for((tmp_path / "failed").exists, "the end of the step")
    cluster.daemons[f"slurmd-{node}"].kill()
    cluster.daemons[f"slurmd-{node}"].wait(60)
    cluster.start_node(node, "-c")
    (tmp_path / "replaced").touch()
    job = cluster.wait_for_end(id_)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), exits(made)
    assert losses(made) == losses(undisturbed)
    assert [one["kind"] for one in exits(made)] == ["done"]


def parent_of(pid: int) -> int:
    """The parent of a process; 0 where there is no such process any more."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[:2]
    except OSError:
        return 0
    return 0 if state in "ZX" else int(parent)


def _running(made: Launch) -> bool:
    place = Place(made.directory / "stages" / "train" / "spec.json")
    attempts = place.attempts()
    if not attempts or (place.attempt(attempts[-1]) / "exit.json").exists():
        return False
    return (place.attempt(attempts[-1]) / "notes" / "step").exists()
