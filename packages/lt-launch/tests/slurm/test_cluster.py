"""What the scripts do on a real cluster, with jobs that cost nothing: chains, arrays, orders, options, refusals."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lt_launch.errors import LaunchError
from lt_launch.launch_dir import load_launch, save_job_ids
from lt_launch.slurm.target import SlurmTarget
from lt_launch.target import Launch

Submit = Callable[..., Launch]
Fake = Callable[[str, str], None]


def wait(cluster: Any, launch: Launch) -> dict[str, str]:
    """State by stage at the end of all jobs."""
    for id_ in launch.job_ids.values():
        cluster.wait_for_end(id_)
    return states(launch)


def states(launch: Launch) -> dict[str, str]:
    return {one.stage: one.state for one in SlurmTarget().status(launch)}


def lines_of(launch: Launch, stage: str, rank: int = 0) -> list[str]:
    return list(SlurmTarget().logs(launch, stage=stage, rank=rank, follow=False))


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
"""


def test_a_pipeline_runs_in_order_and_again_only_where_something_changed(
    cluster: Any, submit: Submit, tmp_path: Path
) -> None:
    elements = [f"prepare.{i}" for i in range(3)]
    assert wait(cluster, submit(PIPELINE)) == dict.fromkeys([*elements, "merge", "train"], "completed")
    assert (tmp_path / "merged").read_text() == "part 0 of 3\npart 1 of 3\npart 2 of 3\n"
    assert (tmp_path / "order").read_text() == "merged\ntrain\n"
    (tmp_path / "merged").unlink()
    assert set(wait(cluster, submit(PIPELINE)).values()) == {"completed"}
    assert (tmp_path / "order").read_text() == "merged\ntrain\nmerged\n", "what stands behind a stage keeps its content"


def test_a_partition_that_is_not_there_is_refused_and_nothing_stays_in_the_queue(cluster: Any, submit: Submit) -> None:
    text = PIPELINE.replace('name = "train"\n', 'name = "train"\nresources = { partition = "nowhere" }\n')
    words = r"(?s)Slurm rejected stage train: .*invalid partition.*2 stage\(s\) before it"
    with pytest.raises(LaunchError, match=words):
        submit(text)
    assert cluster.run("squeue", "-h", "-t", "PENDING,RUNNING") == ""


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
    assert lines_of(made, "first", 1) == ["this is why"]


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
        (line,) = lines_of(made, "ranks", rank)
        words = line.split()
        assert words[:5] == [str(rank), str(rank % 3), "6", "3", f"n{rank // 3 + 2}"]
        assert words[5:9] == ["127.0.0.3", made.job_ids["ranks"], "1", "[2]"]
        assert words[9:] == ["1", "/shared/lt.sqsh", f"{made.directory}:{made.directory},/shared:/shared:ro"]


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
[profile.slurm]
container_runtime = "enroot"
'''


def test_what_a_job_needs_is_in_the_environment_of_an_enroot_container(
    cluster: Any, submit: Submit, tmp_path: Path, enroot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """enroot clears the environment; exit codes and a requeue work as elsewhere, and a folder that is not inside is
    named."""
    (tmp_path / "lt.sqsh").write_text("PATH=/usr/bin:/bin\nIMAGE=yes\nNCCL_DEBUG=of the image\n")
    for name, value in {"OF_HOST": "host", "OF_JOB": "host", "NCCL_DEBUG": "WARN"}.items():
        monkeypatch.setenv(name, value)
    text = INSIDE.replace("FOLDER", str(tmp_path))
    outside = submit(text.replace('"/tmp"', '"/not/there"').replace('"inside"', '"outside"'))
    made = submit(text)
    id_ = made.job_ids["inside"]
    assert cluster.wait_for_end(id_)["JobState"] == "COMPLETED"
    for rank in range(4):
        first, second = (line.split() for line in lines_of(made, "inside", rank))
        assert first[:6] == [str(rank), str(rank % 2), "4", str(rank // 2), str(rank // 2), id_]
        assert int(first[6])
        assert first[7:] == ["0", "two", "words", "efa", "^lo,docker,veth", "WARN", "yes", "[]", "/tmp"]
        assert second[7] == "1"
    mounts = set((enroot / "mounts").read_text().splitlines())
    assert mounts >= {f"{made.directory} {made.directory} rbind,x-create=auto"}
    assert mounts >= {f"{tmp_path} {tmp_path} x-create=auto,rbind,ro"}
    assert wait(cluster, outside) == {"outside": "failed"}
    (status,) = SlurmTarget().status(outside)
    assert status.exit_code == 64
    lines = lines_of(outside, "outside")
    assert "/not/there: No such file or directory" in lines[0]
    assert "set container.workdir" in lines[1]


WARNED = '''
[job]
name = "warned"
argv = ["bash", "-c", """
trap 'exit 75' USR1
echo $LT_ATTEMPT >>seen
while [ $LT_ATTEMPT = 0 ]; do sleep 99 & wait; done # the sleep may die of the signal before bash hears of it
"""]
grace_period_s = 45 # Slurm looks every 30 s and rounds up by one look: the signal comes 15 to 45 s after the start
time_limit = "2m"
'''


@pytest.mark.slow
def test_the_warning_ahead_of_the_time_limit_is_a_requeue(cluster: Any, submit: Submit, tmp_path: Path) -> None:
    made = submit(WARNED)
    job = cluster.wait_for_end(made.job_ids["warned"])
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1")
    assert (tmp_path / "seen").read_text() == "0\n1\n"
    first = cluster.exits(made, "warned")[0]
    assert (first["kind"], first["code"]) == ("stopped", 75)


WAITS = """
[job]
name = "waits"
argv = ["bash", "-c", "sleep 600"]
grace_period_s = 2
"""


def test_cancelled_and_then_forgotten_by_the_controller(cluster: Any, submit: Submit) -> None:
    made = submit(WAITS)
    id_, stage = made.job_ids["waits"], made.directory / "stages" / "waits"
    cluster.wait_for((stage / "attempt-000" / "notes" / "step").exists, "its process")
    assert states(made) == {"waits": "running"}
    with pytest.raises(LaunchError, match=f"job {id_} of an earlier launch is still running"):
        submit(WAITS)
    assert load_launch(made.directory).job_ids == made.job_ids, "nothing was written"
    assert list(SlurmTarget().cancel(made)) == [f"waits: job {id_} was signaled to save and stop"]
    assert wait(cluster, made) == {"waits": "cancelled"}
    made = save_job_ids(made, {"waits": "99999"})  # a number that the controller does not know, as after MinJobAge
    assert states(made) == {"waits": "cancelled"}
    (stage / "attempt-000" / "exit.json").unlink()
    (stage / "cancelled").unlink()
    (status,) = SlurmTarget().status(made)
    assert status.state == "lost"
    assert "no longer knows" in status.reason


def test_a_waiting_job_is_removed(cluster: Any, submit: Submit) -> None:
    cluster.run("scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=bad fan")
    try:
        made = submit(WAITS.replace("argv", "nodes = 3\nargv"))
        assert states(made) == {"waits": "pending"}
        words = f"waits: job {made.job_ids['waits']} was pending and is removed"
        assert list(SlurmTarget().cancel(made)) == [words]
        assert states(made) == {"waits": "cancelled"}
    finally:
        cluster.run("scontrol", "update", "NodeName=n3", "State=RESUME")


LOSES = """
[job]
name = "loses"
argv = ["bash", "-c", "[ $LT_ATTEMPT = 1 ] || { [ $RANK = 0 ] || kill -9 $PPID; sleep 600; }"]
nodes = 2
"""
NO_STEP = """#!/bin/bash
# srun, whose first step waits in vain for a node that Slurm has given to the job
case "$*" in *--nodes=*) ;; *) exec REAL "$@" ;; esac
if [ -e FOLDER/waited ]; then exec REAL "$@"; fi
touch FOLDER/waited
for word in "$@"; do case $word in --immediate=*) sleep "${word#*=}" ;; esac; done
echo 'srun: error: Unable to create step for job: Requested nodes are busy' >&2
exit 1
"""
LATE = '[job]\nname = "late"\nargv = ["true"]\n[profile.slurm]\nstep_wait_timeout_s = 2\n'


def test_a_lost_process_and_a_step_that_slurm_never_makes_are_started_again(
    cluster: Any, submit: Submit, tmp_path: Path, fake: Fake
) -> None:
    """The step as when a node is lost and comes back within seconds; another failure of srun at once ends the job."""
    lost = submit(LOSES)
    cluster.wait_for(lambda: cluster.exits(lost, "loses")[:1] not in ([], [{}]), "the end of the first attempt")
    fake("srun", NO_STEP)
    late = submit(LATE)
    for made, stage, kinds in ((lost, "loses", ["lost", "done"]), (late, "late", ["requeued", "done"])):
        assert cluster.wait_for_end(made.job_ids[stage])["JobState"] == "COMPLETED"
        assert [one["kind"] for one in cluster.exits(made, stage)] == kinds
    first = cluster.exits(lost, "loses")[0]["first"]
    assert (first["rank"], first["node"], first["code"]) == (1, 1, None)
    output = late.directory / "stages" / "late" / f"slurm-{late.job_ids['late']}.out"
    assert "srun got no step" in output.read_text()


AGAIN = """#!/bin/bash
# srun, whose step is restarted in place when it has failed, as by SageMaker HyperPod's --auto-resume
case "$*" in *--nodes=*) REAL "$@" && exit; sleep 1 ;; esac
exec REAL "$@"
"""


def test_a_step_that_srun_restarts_by_itself_has_the_time_it_needs(cluster: Any, submit: Submit, fake: Fake) -> None:
    """What was to end the survivors of the first one does not reach the second."""
    fake("srun", AGAIN)
    command = "[ -e $RANK ] && sleep 6 && exit; touch $RANK; exit $((7 * RANK))"
    made = submit(f'[job]\nname = "again"\nprocs_per_node = 2\nargv = ["bash", "-c", "{command}"]\n')
    assert wait(cluster, made) == {"again": "completed"}
    assert cluster.job(made.job_ids["again"])["Restarts"] == "0"


def test_the_script_stands_alone(cluster: Any, submit: Submit, tmp_path: Path) -> None:
    """Submitted by hand with the system's own python: nothing of lt-launch is installed there."""
    made = submit('[job]\nname = "alone"\nargv = ["bash", "-c", "echo here >>ran"]\n', python="python3")
    assert wait(cluster, made) == {"alone": "completed"}
    (made.directory / "stages" / "alone" / "done.json").unlink()
    rendered = made.directory / "rendered"
    for folder, exit_code in ((rendered, "0:0"), (tmp_path, "64:0")):
        words = ["sbatch", "--parsable", *([] if folder == rendered else [f"--output={folder}/elsewhere.out"])]
        done = subprocess.run([*words, str(rendered / "alone.sbatch")], cwd=folder, capture_output=True, check=True)
        assert cluster.wait_for_end(done.stdout.decode().strip())["ExitCode"] == exit_code
    assert (tmp_path / "ran").read_text() == "here\nhere\n"
    assert "submit this script in its own folder" in (tmp_path / "elsewhere.out").read_text()
