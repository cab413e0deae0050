"""`lt launch run --on ssh` over two real hosts: ranks, failures, and no orphan when launcher, link or host dies."""

import json
import sys
from pathlib import Path

TRAINER = Path(__file__).parent.parent / "fake_trainer.py"
PYTHON = [sys.executable, "-S", "-E"]
SHELL = "bash\0-s"
GRACE_S = 3


def run_file(net, argv: list[str], *, procs: int = 2, more: str = "", env: str = "") -> None:
    (net.folder / "run.toml").write_text(
        f'[job]\nname = "x"\nargv = {json.dumps(argv)}\nnodes = 2\nprocs_per_node = {procs}\n{more}\n[job.env]\n{env}\n'
    )


def trainer(net, steps: int, *, env: str = "", more: str = "") -> None:
    argv = [*PYTHON, str(TRAINER), "runs/x", str(steps), "0.05"]
    run_file(net, argv, more=f'completion = "run_dir"\nrun_dir = "runs/x"\n{more}', env=env)


def launch_on(net, *hosts: str, more: str = "") -> list[str]:
    return ["run", "run.toml", "--on", "ssh", "--hostfile", net.hostfile(*hosts, more=more)]


def result(net, attempt: int = 0) -> dict:
    return json.loads((net.folder / f"runs/x/launch/stages/x/attempt-{attempt:03}/exit.json").read_text())


def training(net) -> list[int]:
    return [pid for machine in net.machines.values() for pid in machine.processes("fake_trainer.py")]


def logged(net, rank: int) -> str:
    path = net.folder / f"runs/x/launch/stages/x/attempt-000/rank-{rank:05}.log"
    return path.read_text() if path.exists() else ""


def checkpoint(net, step: int) -> Path:
    return net.folder / f"runs/x/checkpoints/step-{step:08}/COMMIT"


def test_ranks_follow_the_hostfile_and_variables_arrive(net) -> None:
    """The hosts stand in the file against the order of their names. Elements of an array go round them."""
    names = "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR FROM_JOB FROM_LINE MY_TOKEN HOME_OF_LAUNCHER"
    program = f"import os, socket; print(socket.gethostname(), *[os.environ.get(n) for n in '{names}'.split()])"
    run_file(net, [*PYTHON, "-c", program], more='pass_env = ["MY_TOKEN"]', env='FROM_JOB = "it\'s 5"')
    arguments = [*launch_on(net, "b", "a", more="slots=2"), "--env", "FROM_LINE=a b"]
    shown = net.lt(*arguments, env={"MY_TOKEN": "hush-hush", "HOME_OF_LAUNCHER": "not handed on"})
    assert [logged(net, rank) for rank in range(4)] == [
        f"{'ba'[rank // 2]} {rank} 4 {rank % 2} b it's 5 a b hush-hush None\n" for rank in range(4)
    ]
    assert logged(net, 0) in shown
    kept = [path for path in (net.folder / "runs").rglob("*") if path.is_file() and path.suffix != ".log"]
    assert kept
    assert not [path for path in kept if b"hush" in path.read_bytes()]
    (net.folder / "run.toml").write_text(
        '[[stages]]\nname = "p"\narray = 4\nargv = ["bash", "-c", "hostname > part.$LT_ARRAY_INDEX"]\n'
    )
    net.lt(*launch_on(net, "a", "b"))
    assert [(net.folder / f"part.{i}").read_text() for i in range(4)] == ["a\n", "b\n", "a\n", "b\n"]


def test_nothing_is_left_on_any_host_when_the_launcher_is_killed(net) -> None:
    """One rank does not even listen to SIGTERM; the others save."""
    trainer(net, 1000, env='FAULT = "3:2:hang"', more=f"grace_period_s = {GRACE_S}.0")
    process = net.start(*launch_on(net, "a", "b"))
    net.until(lambda: all("goes on" in logged(net, r) for r in range(3)) and "planted hang" in logged(net, 3))
    assert len(training(net)) == 4
    process.kill()
    machines = net.machines.values()
    net.until(lambda: not training(net) and not any(one.processes(SHELL) for one in machines))
    assert [logged(net, rank).endswith(f"rank {rank} stopped\n") for rank in range(4)] == [True, True, True, False]


def test_a_cut_link_ends_the_run_on_both_sides_and_names_the_host(net) -> None:
    more = f"grace_period_s = {GRACE_S}.0\n[job.restart]\nmax_restarts = 0"
    trainer(net, 1000, env='FAULT = "3:2:hang"', more=more)
    process = net.start(*launch_on(net, "a", "b"))
    net.until(lambda: "goes on" in logged(net, 2) and "planted hang" in logged(net, 3))
    net.machines["b"].cut()
    net.until(lambda: not net.machines["b"].processes("fake_trainer.py"))
    assert logged(net, 2).endswith("rank 2 stopped\n")
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 75, out
    assert "host b is lost (ranks 2 to 3): the connection ended with exit code 255" in out
    assert not training(net)


def test_a_host_that_dies_is_named_and_another_takes_its_place(net) -> None:
    net.add("c")
    trainer(net, 60)
    process = net.start(*launch_on(net, "a", "b", "c"))
    net.until(lambda: checkpoint(net, 3).exists() and all("goes on" in logged(net, rank) for rank in (2, 3)))
    net.machines["b"].kill()
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert "host b is lost (ranks 2 to 3)" in out
    assert (result(net, 0)["kind"], result(net, 1)["kind"]) == ("lost", "done")
    first, second = (line for line in out.splitlines() if line.startswith("rank 0 of 4 goes on"))
    assert not second.endswith("step 0"), first
    assert json.loads(net.lt("status", "x", "--json"))[0]["nodes"] == ["a", "c"]


def test_a_host_on_which_nothing_can_start_is_named_and_doctor_says_why(net) -> None:
    """Without the shared folder, without power, without the right key."""
    net.add("far", private=net.folder)
    run_file(net, ["true"], procs=1)
    shown = net.lt(*launch_on(net, "a", "far"), code=64)
    assert "host far is lost (rank 1): the connection ended with exit code 66" in shown
    assert "attempt-000: No such file or directory" in shown
    shown = net.lt("doctor", "--on", "ssh", "--hostfile", net.hostfile("a", "b", "far"), "run.toml", code=64)
    assert f"error far: shared folder: {net.folder}/runs/x is not the folder of this machine" in shown
    assert "ok b: packages: lt-launch" in shown
    net.machines["b"].kill()
    assert "host b is lost (rank 1): " in (shown := net.lt(*launch_on(net, "a", "b"), code=64))
    assert "Connection refused" in shown
    (net.keys / "authorized_keys").write_text("")
    shown = net.lt("doctor", "--on", "ssh", "--hostfile", net.hostfile("a"), "run.toml", "--nodes", "1", code=64)
    assert "error a: reach: " in shown
    assert "Permission denied" in shown
