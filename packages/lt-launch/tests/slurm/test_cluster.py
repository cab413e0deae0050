"""What the scripts do on a real cluster, with jobs that cost nothing: chains, arrays, orders, options, refusals."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lt_launch.errors import LaunchError
from lt_launch.launch_dir import load_launch, save_job_ids
from lt_launch.launcher import launch
from lt_launch.policy import Place, read_table
from lt_launch.profile import Profile
from lt_launch.run_file import RunOverrides, read_run_file
from lt_launch.slurm.target import SlurmTarget
from lt_launch.target import Launch

Submit = Callable[[str], Launch]


@pytest.fixture
def submit(cluster: Any, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submit:
    """Submit a run file given as text."""
    monkeypatch.setenv("LT_LAUNCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def go(text: str) -> Launch:
        (tmp_path / "run.toml").write_text(text.replace("PYTHON", python))
        file = read_run_file("run.toml", Profile(), RunOverrides())
        assert launch(file.pipeline, file.profile, "slurm") == 0
        return load_launch(tmp_path / file.pipeline.out)

    return go


def states(launch: Launch) -> dict[str, str]:
    return {one.stage: one.state for one in SlurmTarget().status(launch)}


def wait(cluster: Any, launch: Launch) -> dict[str, str]:
    for id_ in launch.job_ids.values():
        cluster.wait_for(lambda id_=id_: _over(cluster, id_), f"the end of {id_}")
    return states(launch)


def _over(cluster: Any, id_: str) -> bool:
    rows = cluster.run("scontrol", "-o", "show", "job", id_).splitlines()
    found = [re.search(r"JobState=(\S+)", row) for row in rows if row]
    return all(match and match[1] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL") for match in found)


PIPELINE = """
[pipeline]
name = "chain"
[job]
restart = { max_restarts = 0 }
[[stages]]
name = "prepare"
argv = ["bash", "-c", "echo part $LT_ARRAY_INDEX of $LT_ARRAY_SIZE >part-$LT_ARRAY_INDEX"]
array = 3
[[stages]]
name = "merge"
after = ["prepare"]
argv = ["bash", "-c", "cat part-0 part-1 part-2 >merged; echo merged >>order"]
outputs = ["merged"]
[[stages]]
name = "train"
after = ["merge"]
argv = ["bash", "-c", "test -s merged && echo train >>order"]
[profile]
python = "PYTHON"
"""


def test_a_pipeline_runs_in_order_and_again_only_where_something_changed(
    cluster: Any, submit: Submit, tmp_path: Path
) -> None:
    made = submit(PIPELINE)
    assert wait(cluster, made) == {
        "prepare.0": "completed",
        "prepare.1": "completed",
        "prepare.2": "completed",
        "merge": "completed",
        "train": "completed",
    }
    assert (tmp_path / "merged").read_text() == "part 0 of 3\npart 1 of 3\npart 2 of 3\n"
    assert (tmp_path / "order").read_text() == "merged\ntrain\n"
    (tmp_path / "merged").unlink()
    made = submit(PIPELINE)
    assert set(wait(cluster, made).values()) == {"completed"}
    assert (tmp_path / "order").read_text() == "merged\ntrain\nmerged\n", "what stands behind a stage keeps its content"


FAILS = """
[[stages]]
name = "first"
argv = ["bash", "-c", "if [ $RANK = 1 ]; then echo this is why; exit 7; fi; sleep 30"]
nodes = 2
procs_per_node = 2
[[stages]]
name = "second"
after = ["first"]
argv = ["true"]
[profile]
python = "PYTHON"
"""


def test_a_failure_is_named_and_what_waits_for_it_is_cancelled(cluster: Any, submit: Submit) -> None:
    made = submit(FAILS)
    assert wait(cluster, made) == {"first": "failed", "second": "cancelled"}
    first, second = SlurmTarget().status(made)
    assert first.exit_code == 7
    assert "rank 1 on " in first.reason
    assert "exit code 7" in first.reason
    assert "DependencyNeverSatisfied" in second.reason
    assert cluster.job(made.job_ids["first"])["ExitCode"] == "7:0"
    lines = list(SlurmTarget().logs(made, stage="first", rank=1, follow=False))
    assert lines == ["this is why"]


RANKS = r'''
[job]
name = "ranks"
argv = ["bash", "-c", """
echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $SLURMD_NODENAME $MASTER_ADDR $TORCHELASTIC_RUN_ID \\
$OMP_NUM_THREADS [$SLURM_CPUS_PER_TASK] $STUB_AUTO_RESUME $STUB_CONTAINER_IMAGE $STUB_CONTAINER_MOUNTS"""]
nodes = 2
procs_per_node = 3
resources = { cpus_per_proc = 2 }
container = { image = "/shared/lt.sqsh", mounts = ["/shared:/shared:ro"] }
[profile]
python = "PYTHON"
[profile.slurm]
auto_resume = "on"
exclude = ["n1"]
srun_args = ["--cpu-bind=none"]
'''


def test_ranks_follow_the_allocation_and_options_reach_srun(cluster: Any, submit: Submit) -> None:
    """Ranks meet at the first node of the job, wherever sbatch was called."""
    made = submit(RANKS)
    assert wait(cluster, made) == {"ranks": "completed"}
    (status,) = SlurmTarget().status(made)
    assert status.nodes == ("n[2-3]",)
    for rank in range(6):
        (line,) = SlurmTarget().logs(made, stage="ranks", rank=rank, follow=False)
        words = line.split()
        assert words[:5] == [str(rank), str(rank % 3), "6", "3", f"n{rank // 3 + 2}"]
        assert words[5:9] == ["127.0.0.3", made.job_ids["ranks"], "1", "[2]"]
        assert words[9:11] == ["1", "/shared/lt.sqsh"]
        assert words[11] == f"{made.directory}:{made.directory},/shared:/shared:ro"


INSIDE = '''
[job]
name = "inside"
argv = ["bash", "-c", """
echo $RANK $LOCAL_RANK $WORLD_SIZE $NODE_RANK $SLURM_NODEID $SLURM_JOB_ID $MASTER_PORT $LT_ATTEMPT \\
"$OF_JOB" $FI_PROVIDER $NCCL_SOCKET_IFNAME $NCCL_DEBUG $IMAGE [$OF_HOST] $PWD; [ $LT_ATTEMPT = 1 ] || exit 75"""]
nodes = 2
procs_per_node = 2
env = { OF_JOB = "two words" }
container = { image = "FOLDER/lt.sqsh", mounts = ["FOLDER:FOLDER:ro"], workdir = "/tmp" }
[profile]
python = "PYTHON"
[profile.slurm]
container_runtime = "enroot"
'''


def test_what_a_job_needs_is_in_the_environment_of_an_enroot_container(
    cluster: Any, submit: Submit, tmp_path: Path, enroot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """enroot clears the environment; exit codes and a requeue work as elsewhere."""
    (tmp_path / "lt.sqsh").write_text("PATH=/usr/bin:/bin\nIMAGE=yes\nNCCL_DEBUG=of the image\n")
    monkeypatch.setenv("OF_HOST", "host")
    monkeypatch.setenv("OF_JOB", "host")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    made = submit(INSIDE.replace("FOLDER", str(tmp_path)))
    id_ = made.job_ids["inside"]
    assert cluster.wait_for_end(id_)["JobState"] == "COMPLETED"
    for rank in range(4):
        first, second = (line.split() for line in SlurmTarget().logs(made, stage="inside", rank=rank, follow=False))
        assert first[:6] == [str(rank), str(rank % 2), "4", str(rank // 2), str(rank // 2), id_]
        assert int(first[6])
        assert first[7:] == ["0", "two", "words", "efa", "^lo,docker,veth", "WARN", "yes", "[]", "/tmp"]
        assert second[7] == "1"
    assert set((enroot / "mounts").read_text().splitlines()) == {
        f"{made.directory} {made.directory} rbind,x-create=auto",
        f"{tmp_path} {tmp_path} x-create=auto,rbind,ro",
    }


def test_a_folder_that_is_not_in_the_container_is_named(
    cluster: Any, submit: Submit, tmp_path: Path, enroot: Path
) -> None:
    (tmp_path / "lt.sqsh").write_text("PATH=/usr/bin:/bin\n")
    made = submit(INSIDE.replace("FOLDER", str(tmp_path)).replace('"/tmp"', '"/not/there"'))
    assert wait(cluster, made) == {"inside": "failed"}
    (status,) = SlurmTarget().status(made)
    assert status.exit_code == 64
    lines = list(SlurmTarget().logs(made, stage="inside", rank=0, follow=False))
    assert "/not/there: No such file or directory" in lines[0]
    assert "set container.workdir" in lines[1]


def test_a_partition_that_is_not_there_is_refused_and_nothing_stays_in_the_queue(cluster: Any, submit: Submit) -> None:
    text = PIPELINE.replace('name = "train"\n', 'name = "train"\nresources = { partition = "nowhere" }\n')
    with pytest.raises(
        LaunchError, match=r"(?s)Slurm rejected stage train: .*invalid partition.*2 stage\(s\) before it"
    ):
        submit(text)
    assert cluster.run("squeue", "-h", "-t", "PENDING,RUNNING") == ""


WARNED = '''
[job]
name = "warned"
argv = ["bash", "-c", """
trap 'exit 75' USR1
echo $LT_ATTEMPT >>seen
while [ $LT_ATTEMPT = 0 ]; do sleep 99 & wait; done # the sleep may die of the signal before bash hears of it
"""]
grace_period_s = 5
time_limit = "2m"
[profile]
python = "PYTHON"
[profile.slurm]
signal_lead_time_s = 75 # Slurm looks every 30 s and rounds up by one look: the signal comes 15 to 45 s after the start
'''


def test_the_warning_ahead_of_the_time_limit_is_a_requeue(cluster: Any, submit: Submit, tmp_path: Path) -> None:
    made = submit(WARNED)
    job = cluster.wait_for_end(made.job_ids["warned"])
    assert job["JobState"] == "COMPLETED"
    assert job["Restarts"] == "1"
    assert (tmp_path / "seen").read_text() == "0\n1\n"
    place = Place(made.directory / "stages" / "warned" / "spec.json")
    first = read_table(place.attempt(0) / "exit.json")
    assert first is not None
    assert (first["kind"], first["code"]) == ("stopped", 75)


WAITS = """
[job]
name = "waits"
argv = ["bash", "-c", "sleep 600"]
grace_period_s = 2
[profile]
python = "PYTHON"
"""


def test_cancelled_and_then_forgotten_by_the_controller(cluster: Any, submit: Submit) -> None:
    made = submit(WAITS)
    id_ = made.job_ids["waits"]
    cluster.wait_for(lambda: states(made) == {"waits": "running"}, "the job running")
    file = made.directory / "stages" / "waits" / "attempt-000" / "notes" / "step"
    cluster.wait_for(file.exists, "its process")
    with pytest.raises(LaunchError, match=f"job {id_} of an earlier launch is still running"):
        submit(WAITS)
    assert load_launch(made.directory).job_ids == made.job_ids, "nothing was written"
    assert list(SlurmTarget().cancel(made)) == [f"waits: job {id_} was signaled to save and stop"]
    cluster.wait_for_end(id_)
    assert states(made) == {"waits": "cancelled"}
    made = save_job_ids(made, {"waits": "99999"})  # a number that the controller does not know, as after MinJobAge
    cluster.run("scontrol", "show", "job", "99999", code=1)
    assert states(made) == {"waits": "cancelled"}
    (made.directory / "stages" / "waits" / "attempt-000" / "exit.json").unlink()
    (made.directory / "stages" / "waits" / "cancelled").unlink()
    (status,) = SlurmTarget().status(made)
    assert status.state == "lost"
    assert "no longer knows" in status.reason


def test_a_waiting_job_is_removed_and_nodes_are_shown(cluster: Any, submit: Submit) -> None:
    cluster.run("scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=bad fan")
    try:
        shown = {(node.name, node.partition): node for node in SlurmTarget().nodes(Profile())}
        assert set(shown) == {(f"n{i}", name) for i in (1, 2, 3) for name in ("low", "high")}
        assert shown["n1", "low"].state == "idle"
        assert shown["n3", "low"].state == "drained"
        assert shown["n3", "low"].reason == "bad fan"
        made = submit(WAITS.replace("argv", "nodes = 3\nargv"))
        (status,) = SlurmTarget().status(made)
        assert status.state == "pending"
        assert list(SlurmTarget().list(Profile()))[-1].job_id == made.job_ids["waits"]
        assert list(SlurmTarget().cancel(made)) == [f"waits: job {made.job_ids['waits']} was pending and is removed"]
        assert states(made) == {"waits": "cancelled"}
    finally:
        cluster.run("scontrol", "update", "NodeName=n3", "State=RESUME")


LOSES = """
[job]
name = "loses"
argv = ["bash", "-c", "echo $PPID >pid-$LT_ATTEMPT-$RANK; [ $LT_ATTEMPT = 2 ] || sleep 600"]
nodes = 2
[profile]
python = "PYTHON"
"""


def test_a_node_that_was_lost_is_left_out_while_others_are_enough(cluster: Any, submit: Submit, tmp_path: Path) -> None:
    """The second node's task dies, twice: of three nodes two are needed, so only the newest loss is left out."""
    made = submit(LOSES)
    id_ = made.job_ids["loses"]
    place = Place(made.directory / "stages" / "loses" / "spec.json")
    for attempt, lost in ((0, "n2"), (1, "n3")):
        file = tmp_path / f"pid-{attempt}-1"

        def begun(file: Path = file) -> bool:
            cluster.go_now_if_requeued(id_)
            return file.exists() and file.read_text().endswith("\n")

        cluster.wait_for(begun, f"attempt {attempt}")
        os.kill(int(file.read_text()), signal.SIGKILL)
        cluster.wait_for(lambda lost=lost: cluster.job(id_)["ExcNodeList"] == lost, f"{lost} left out")
    assert cluster.wait_for_end(id_)["JobState"] == "COMPLETED"
    ran_on = [(place.attempt(number) / "slurm").read_text().split()[2] for number in place.attempts()]
    assert ran_on == ["n[1-2]", "n[1,3]", "n[1-2]"]
    first = read_table(place.attempt(0) / "exit.json")
    assert first is not None
    assert (first["kind"], first["first"]["node"], first["first"]["ranks"]) == ("lost", 1, [1])


NO_STEP = """#!/bin/bash
# srun, whose first step waits in vain for a node that Slurm has given to the job
case "$*" in *--nodes=*) ;; *) exec REAL "$@" ;; esac
if [ -e FOLDER/waited ]; then exec REAL "$@"; fi
touch FOLDER/waited
for word in "$@"; do case $word in --immediate=*) sleep "${word#*=}" ;; esac; done
echo 'srun: error: Unable to create step for job: Requested nodes are busy' >&2
exit 1
"""


def test_a_job_whose_step_slurm_never_makes_is_started_again(
    cluster: Any, submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it happens when a node is lost and comes back within seconds; another failure of srun at once ends the job."""
    real = shutil.which("srun")
    assert real is not None
    fake = tmp_path / "bin" / "srun"
    fake.parent.mkdir()
    fake.write_text(NO_STEP.replace("REAL", real).replace("FOLDER", str(tmp_path)))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    text = '[job]\nname = "late"\nargv = ["true"]\n[profile]\npython = "PYTHON"\n'
    text += "[profile.slurm]\nstep_wait_timeout_s = 2\n"
    made = submit(text)
    id_ = made.job_ids["late"]
    assert cluster.wait_for_end(id_)["JobState"] == "COMPLETED"
    place = Place(made.directory / "stages" / "late" / "spec.json")
    kinds = [(read_table(place.attempt(number) / "exit.json") or {}).get("kind") for number in place.attempts()]
    assert kinds == ["requeued", "done"]
    assert "srun got no step" in (place.stage / f"slurm-{id_}.out").read_text()


AGAIN = """#!/bin/bash
# srun, whose step is restarted in place when it has failed, as by SageMaker HyperPod's --auto-resume
case "$*" in *--nodes=*) REAL "$@" && exit; sleep 1 ;; esac
exec REAL "$@"
"""


def test_a_step_that_srun_restarts_by_itself_has_the_time_it_needs(
    cluster: Any, submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was to end the survivors of the first one does not reach the second."""
    real = shutil.which("srun")
    assert real is not None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(AGAIN.replace("REAL", real))
    (tmp_path / "bin" / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    command = "[ -e $RANK ] && sleep 6 && exit; touch $RANK; exit $((7 * RANK))"
    made = submit(
        f'[job]\nname = "again"\nprocs_per_node = 2\nargv = ["bash", "-c", "{command}"]\n[profile]\npython = "PYTHON"\n'
    )
    assert wait(cluster, made) == {"again": "completed"}
    assert cluster.job(made.job_ids["again"])["Restarts"] == "0"


def test_the_script_stands_alone(cluster: Any, submit: Submit, tmp_path: Path) -> None:
    """Submitted by hand with the system's own python: nothing of lt-launch is installed there."""
    made = submit('[job]\nname = "alone"\nargv = ["bash", "-c", "echo here >>ran"]\n[profile]\npython = "python3"\n')
    assert wait(cluster, made) == {"alone": "completed"}
    (made.directory / "stages" / "alone" / "done.json").unlink()
    rendered = made.directory / "rendered"
    id_ = subprocess.run(
        ["sbatch", "--parsable", "alone.sbatch"], cwd=rendered, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert cluster.wait_for_end(id_)["JobState"] == "COMPLETED"
    assert (tmp_path / "ran").read_text() == "here\nhere\n"
    elsewhere = subprocess.run(
        ["sbatch", "--parsable", f"--output={tmp_path}/elsewhere.out", str(rendered / "alone.sbatch")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert cluster.wait_for_end(elsewhere)["ExitCode"] == "64:0"
    assert "submit this script in its own folder" in (tmp_path / "elsewhere.out").read_text()
