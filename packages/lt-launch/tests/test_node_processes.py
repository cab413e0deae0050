"""Real processes of one node under an attempt: failures, signals and grace, and that nothing is left behind."""

import ast
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lt_launch import node_commands, policy
from lt_launch.attempt import Attempt, Stop
from lt_launch.hosts import Host
from lt_launch.job import Job, Pipeline
from lt_launch.job import Stage as PipelineStage
from lt_launch.local import LocalNode
from lt_launch.node_guard import find_processes
from lt_launch.policy import Place
from lt_launch.spec import launch_files
from lt_launch.ssh_connection import BOOT, SshConnection
from lt_launch.ssh_node import SshNode

PYTHON = [sys.executable, "-S", "-E"]
"""Without site-packages: a process starts in a few milliseconds."""
WAIT = "import os, sys, time\nrank = int(os.environ['RANK'])\n"
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


class Stage:
    """A stage's folder, and attempts of it in a thread."""

    def __init__(self, root: Path, program: str, **values: Any) -> None:
        defaults = {
            "version": 1,
            "name": "train",
            "argv": [*PYTHON, "-c", program],
            "nodes": 1,
            "procs_per_node": 4,
            "grace_s": 30,
            "completion": "exit",
            "restart": {"max_restarts": 3, "max_without_progress": 1},
        }
        self.spec = defaults | values
        self.place = Place(root / "launch" / "stages" / "train" / "spec.json")
        self.stop, self.shown, self.results = Stop(), [], []
        self.open_node: Callable[[], Any] = lambda: LocalNode(self.spec)
        self.number = -1

    @property
    def folder(self) -> Path:
        return self.place.attempt(self.number)

    def start(self, **env: str) -> threading.Thread:
        self.number = policy.open_attempt(self.spec, self.place, launched=self.number < 0)
        count = int(self.spec["nodes"])
        self.nodes = [self.open_node() for _ in range(count)]
        attempt = Attempt(
            spec=self.spec,
            place=self.place,
            number=self.number,
            hosts=[Host(name=f"h{node}") for node in range(count)],
            nodes=self.nodes,
            env=env,
            stop=self.stop,
            show=lambda rank, lines: self.shown.append((rank, lines)),
        )
        thread = threading.Thread(target=lambda: self.results.append(attempt.run()))
        thread.start()
        return thread

    def run(self, **env: str) -> dict[str, Any]:
        self.start(**env).join(60)
        return self.results[-1]

    def log(self, rank: int) -> str:
        path = self.folder / f"rank-{rank:05}.log"
        return path.read_text() if path.exists() else ""

    def until(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not what():
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    made: list[Stage] = []

    def make(program: str, **values: Any) -> Stage:
        made.append(Stage(tmp_path / str(len(made)), program, **values))
        return made[-1]

    yield make
    for one in made:
        for _ in range(2):
            one.stop.note(signal.SIGINT)


@pytest.mark.parametrize(
    ("rank", "code"),
    [(0, 1), (1, 2), (2, 7), (3, 64), (0, 70), (1, 85), (2, 127)]
    + [(2, -number) for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM)],
)
def test_the_first_failure_is_named_with_rank_host_code_and_last_lines(
    stage: Callable[..., Stage], rank: int, code: int
) -> None:
    """All others notice at once and leave with other codes, as ranks do whose collective has broken."""
    program = f"""{WAIT}
import signal
sys.stdout.write(f"last words of {{rank}}\\n"); sys.stdout.flush()
flag = os.environ["FLAG"]
if rank == {rank}:
    open(flag, "w").close()
    os.kill(os.getpid(), {-code}) if {code} < 0 else os._exit({code})
while not os.path.exists(flag): time.sleep(0.005)
time.sleep(0.3)
os._exit({{0: 75, 1: 1, 2: 75, 3: 134}}[rank])
"""
    made = stage(program)
    result = made.run(FLAG=str(made.place.stage / "flag"))
    assert result["code"] == (code if code > 0 else 128 - code)
    first = result["first"]
    assert (first["rank"], first["code"], first["host"]) == (rank, code, "h0")
    assert first["tail"] == [f"last words of {rank}"]
    told = policy.report(result)
    assert f"rank {rank} on h0 was the first to fail" in told[0]
    assert f"    last words of {rank}" in told
    assert result["kind"] == ("failed" if code > 0 else "killed")
    assert policy.read_table(made.folder / "exit.json") == result


def test_a_success_leaves_a_stamp(stage: Callable[..., Stage], tmp_path: Path) -> None:
    made = stage(f"{WAIT}open('out.txt', 'w').write('made')", procs_per_node=1, cwd=str(tmp_path), outputs=["out.txt"])
    assert made.run()["kind"] == "done"
    assert policy.done(made.spec, made.place)
    (tmp_path / "out.txt").write_text("changed")
    assert not policy.done(made.spec, made.place)


def test_an_input_that_changes_while_it_is_read_is_read_again(stage: Callable[..., Stage], tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("before")
    made = stage("open('in.txt', 'w').write('after')", procs_per_node=1, cwd=str(tmp_path), inputs=["in.txt"])
    assert made.run()["kind"] == "done"
    assert not policy.done(made.spec, made.place)


def test_what_an_earlier_attempt_completed_proves_nothing(stage: Callable[..., Stage], tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "start"}\n{"event": "completed"}\n')
    made = stage("pass", procs_per_node=1, completion="run_dir", run_dir=str(tmp_path))
    assert made.run()["code"] == 70
    program = (
        f'open({str(tmp_path / "events.jsonl")!r}, \'a\').write(\'{{"event": "start"}}\\n{{"event": "completed"}}\\n\')'
    )
    assert stage(program, procs_per_node=1, completion="run_dir", run_dir=str(tmp_path)).run()["kind"] == "done"


def test_who_a_process_is(stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of three processes: ranks in the order of the nodes, as torchrun names them. People see rank 0."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR LT_ATTEMPT TORCHELASTIC_RUN_ID"
    program = f"import os; print(*[os.environ[name] for name in '{names} OMP_NUM_THREADS A'.split()])"
    made = stage(program, nodes=2, procs_per_node=3, env={"A": "x y"})
    assert made.run()["kind"] == "done"
    found = [made.log(rank) for rank in range(6)]
    assert found == [f"{rank} 6 {rank % 3} 3 {rank // 3} 127.0.0.1 0 train-0 2 x y\n" for rank in range(6)]
    assert made.shown == [(0, found[0])]


SAVES = f"""{WAIT}import signal
got = []
for one in (signal.SIGTERM, signal.SIGUSR1): signal.signal(one, lambda number, frame: got.append(number))
print("ready", flush=True)
while not got: time.sleep(0.01)
time.sleep(0.6)
print(*got)
sys.exit(75)
"""
IGNORES = f"{WAIT}import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_goes_on_once_and_the_ranks_have_the_whole_grace_time(
    stage: Callable[..., Stage], number: int
) -> None:
    made = stage(SAVES)
    thread = made.start()
    made.until(lambda: all(made.log(rank) == "ready\n" for rank in range(4)))
    for _ in range(3):  # schedulers send it again and again
        made.stop.note(number)
        time.sleep(0.1)
    thread.join(60)
    assert (made.results[0]["code"], made.results[0]["kind"]) == (75, "stopped")
    assert [made.log(rank) for rank in range(4)] == [f"ready\n{number}\n"] * 4


def test_a_rank_that_does_not_stop_is_killed_when_the_grace_time_is_over(stage: Callable[..., Stage]) -> None:
    made = stage(f"{IGNORES}time.sleep(100)", grace_s=0.5, procs_per_node=2)
    thread = made.start()
    made.until(lambda: all(made.log(rank) == "ready\n" for rank in range(2)))
    begun = time.monotonic()
    made.stop.note(signal.SIGTERM)
    thread.join(60)
    assert time.monotonic() - begun >= 0.5
    assert (made.results[0]["code"], made.results[0]["kind"]) == (75, "stopped")
    assert "had to be killed" in made.results[0]["reason"]


def test_the_second_ctrl_c_ends_everything_at_once(stage: Callable[..., Stage]) -> None:
    made = stage(IGNORES.replace("SIGTERM", "SIGINT") + "time.sleep(100)", procs_per_node=2)
    thread = made.start()
    made.until(lambda: all(made.log(rank) == "ready\n" for rank in range(2)))
    made.stop.note(signal.SIGTERM)
    made.stop.note(signal.SIGINT)
    assert not made.stop.kill, "of two signals that come together either may be first"
    made.stop.note(signal.SIGINT)
    thread.join(20)
    assert made.results[0]["kind"] == "stopped"


@pytest.mark.parametrize(("grace_s", "killed"), [(30, False), (0.5, True)])
def test_when_one_asks_to_be_started_again_the_others_have_the_grace_time_to_do_so(
    stage: Callable[..., Stage], grace_s: float, killed: bool
) -> None:
    """They are not told: whoever shares a step with it finds out itself, and is killed only when it does not."""
    made = stage(f"{WAIT}time.sleep(rank * {100 if killed else 1.0})\nsys.exit(75)", procs_per_node=2, grace_s=grace_s)
    result = made.run()
    assert (result["code"], result["kind"], result["first"]["rank"]) == (75, "requeued", 0)
    assert (made.folder / "killed").exists() == killed
    assert sorted(policy.read_notes(made.folder / "notes")) == ([0] if killed else [0, 1])


def test_after_a_failure_the_others_are_told_and_then_killed(stage: Callable[..., Stage]) -> None:
    """Also those of another node; the one that failed is named."""
    made = stage(f"{IGNORES}if rank == 3: os._exit(9)\ntime.sleep(100)", nodes=2, procs_per_node=2, grace_s=0.5)
    begun = time.monotonic()
    result = made.run()
    assert time.monotonic() - begun >= 3.5, "they may find out themselves, and then have the grace time"
    assert (result["kind"], result["code"], result["first"]["rank"], result["first"]["node"]) == ("failed", 9, 3, 1)
    assert list(policy.read_notes(made.folder / "notes")) == [3]


def test_after_a_failure_the_others_may_save(stage: Callable[..., Stage]) -> None:
    made = stage(SAVES.replace("got = []", "got = []\nif rank == 1: os._exit(9)"), procs_per_node=2)
    assert made.run()["code"] == 9
    assert made.log(0) == f"ready\n{int(signal.SIGTERM)}\n"


@on_linux
def test_grandchildren_end_with_their_rank(stage: Callable[..., Stage]) -> None:
    program = f"{WAIT}import subprocess\nprint(subprocess.Popen(['sleep', '1000']).pid, flush=True)\nos._exit(3)"
    made = stage(program, procs_per_node=1)
    assert made.run()["code"] == 3
    assert not find_processes(made.nodes[0].token)
    stat = Path(f"/proc/{int(made.log(0))}/stat")
    assert not stat.exists() or stat.read_text().rpartition(") ")[2][0] == "Z"


@on_linux
def test_the_guard_and_the_processes_of_an_attempt_are_gone_after_it(stage: Callable[..., Stage]) -> None:
    made = stage("pass")
    made.run()
    done = subprocess.run(["pgrep", "-f", made.nodes[0].token], capture_output=True, text=True, check=False)
    assert done.stdout == ""


def test_a_last_line_without_an_end_is_shown(stage: Callable[..., Stage]) -> None:
    made = stage("import sys; sys.stdout.write('one\\ntwo')", procs_per_node=1)
    made.run()
    assert "".join(lines for _, lines in made.shown) == "one\ntwo"


def test_long_output_is_shown_whole_and_in_order(stage: Callable[..., Stage]) -> None:
    """Far more than is read at a time, and a line that is longer than that."""
    made = stage("import os\nfor n in range(300): os.write(1, b'%d' % n * 999 + b'\\n')\nos.write(1, b'x' * 200000)")
    made.run()
    text = "".join(lines for _, lines in made.shown)
    assert text == "".join(f"{str(n) * 999}\n" for n in range(300)) + "x" * 200000 == made.log(0)


def test_a_program_that_is_not_there(stage: Callable[..., Stage]) -> None:
    result = stage("", argv=["/no/such/program"], procs_per_node=1).run()
    assert (result["code"], result["first"]["rank"]) == (127, 0)
    assert "cannot run '/no/such/program'" in "\n".join(policy.report(result))


def test_lines_before_the_command_are_run_in_the_same_shell(stage: Callable[..., Stage]) -> None:
    program = "import os, sys; print(os.environ['FROM_SETUP'], sys.argv[1:])"
    made = stage(program, setup=["export FROM_SETUP='a b'"], procs_per_node=1)
    made.spec["argv"] += ["it's", "$HOME"]
    assert made.run()["kind"] == "done"
    assert made.log(0) == "a b [\"it's\", '$HOME']\n"


# --- ranks below a torchrun


def under_torchrun(stage: Callable[..., Stage], tmp_path: Path, script: str) -> Stage:
    """A stage that trains on two ranks, with lines of shell in place of `lt train torchrun`."""
    file = tmp_path / "python"
    file.write_text(f"#!/bin/bash\n{script}\n")
    file.chmod(0o755)
    return stage("", argv=[str(file), "-P", "-m", "lt_trainer", "run", "{recipe}"], recipe="hash", procs_per_node=2)


def test_ranks_are_known_by_their_own_exit_codes_and_logs(stage: Callable[..., Stage], tmp_path: Path) -> None:
    """And their machine by the name that the person knows."""
    script = (
        "cd $LT_EXIT_CODES; echo 75 elsewhere >0; echo 7 elsewhere >1; echo why >>$LT_RANK_LOGS/rank-00001.log; exit 75"
    )
    result = under_torchrun(stage, tmp_path, script).run()
    assert (result["kind"], result["code"], result["first"]["rank"]) == ("failed", 7, 1)
    assert (result["first"]["host"], result["first"]["tail"]) == ("h0", ["why"])


@pytest.mark.parametrize(("code", "kind"), [(64, "failed"), (75, "requeued"), (137, "killed")])
def test_a_torchrun_that_starts_no_rank_stands_for_them(
    stage: Callable[..., Stage], tmp_path: Path, code: int, kind: str
) -> None:
    result = under_torchrun(stage, tmp_path, f"echo because; exit {code}").run()
    assert (result["kind"], result["code"], result["first"]["rank"]) == (kind, code, 0)
    assert result["first"]["tail"] == ["because"]


@on_linux
@pytest.mark.parametrize(("grace_s", "kind"), [(30, "requeued"), (0.5, "killed")])
def test_ranks_that_outlive_their_torchrun_may_save(
    stage: Callable[..., Stage], tmp_path: Path, grace_s: float, kind: str
) -> None:
    """Each is in a session of its own; none is left when the attempt has ended."""
    saves = 'sleep 1; echo "75 h" >$LT_EXIT_CODES/$1; exit 75'
    rank = f"trap '{saves}' TERM; touch $LT_RANK_LOGS/up-$1; while :; do sleep 0.05; done"
    script = f"""for rank in 0 1; do setsid bash -c {shlex.quote(rank)} rank $rank & done
until [ -e $LT_RANK_LOGS/up-0 -a -e $LT_RANK_LOGS/up-1 ]; do sleep 0.05; done
kill -9 $$"""
    made = under_torchrun(stage, tmp_path, script)
    made.spec["grace_s"] = grace_s
    result = made.run()
    assert result["kind"] == kind
    assert sorted(note[0] for note in policy.read_notes(made.folder / "notes").values()) == [result["code"]] * 2
    assert not find_processes(made.nodes[0].token)


# --- which commands a node gets


TRAIN = ["py", "-P", "-m", "lt_trainer", "run", "{recipe}"]
TRAINS = {"argv": TRAIN, "recipe": "hash", "procs_per_node": 8, "nodes": 2}


def test_a_stage_that_trains_is_one_torchrun_per_node(tmp_path: Path) -> None:
    place = Place(tmp_path / "train" / "spec.json")
    (order,) = node_commands.node_commands(TRAINS, place, 3, 1, ("10.0.0.1", 77))
    assert order["argv"] == [
        *("py", "-P", "-m", "lt_trainer", "torchrun", str(tmp_path / "train/recipe.toml")),
        *("--nproc-per-node", "8", "--"),
        *("--nnodes=2", "--node-rank=1", "--rdzv-backend=static", "--master-addr=10.0.0.1", "--master-port=77"),
    ]
    assert (order["ranks"], order["notes"]) == (list(range(8, 16)), True)
    folder = str(tmp_path / "train/attempt-003")
    assert order["env"]["LT_EXIT_CODES"] == f"{folder}/notes"
    assert order["env"]["LT_RANK_LOGS"] == folder
    assert "RANK" not in order["env"]


def test_a_stage_that_does_not_train_needs_no_torch(tmp_path: Path) -> None:
    spec = TRAINS | {"argv": ["echo", "{index}", "{array}"], "recipe": "", "nodes": 1, "procs_per_node": 1, "array": 5}
    (order,) = node_commands.node_commands(spec, Place(tmp_path / "p" / "spec.json", 4), 0, 0, ("127.0.0.1", 1))
    assert order["argv"] == ["echo", "4", "5"]
    assert json.loads(json.dumps(order)) == order
    assert (order["env"]["LT_ARRAY_INDEX"], order["env"]["LT_ARRAY_SIZE"]) == ("4", "5")


# --- the far end of a connection, without ssh


def connection(spec: dict[str, Any], place: Place, link_timeout_s: float = 60.0) -> SshConnection:
    """A host's end of a connection, where nothing is installed: only what is sent is there."""
    pipeline = Pipeline(name="p", stages=(PipelineStage(job=Job(name="train", argv=("x",))),))
    files = launch_files(pipeline, {"train": spec}, "ssh")
    launch = place.stage.parent.parent
    command = [sys.executable, "-I", "-S", "-c", BOOT]
    return SshConnection("far", command, spec, launch=str(launch), files=files, link_timeout_s=link_timeout_s)


def test_what_is_sent_runs_where_nothing_is_installed(stage: Callable[..., Stage]) -> None:
    """Exit codes, last lines, output, progress and a stop come and go over the connection alone."""
    made = stage(f"{WAIT}print('words of', rank)\nsys.exit(7 if rank == 1 else 0)", procs_per_node=2)
    made.open_node = lambda: connection(made.spec, made.place)
    result = made.run()
    assert (result["kind"], result["code"], result["first"]["rank"]) == ("failed", 7, 1)
    assert result["first"]["tail"] == ["words of 1"]
    assert made.shown == [(0, "words of 0\n")]
    made = stage(SAVES, procs_per_node=2)
    made.open_node = lambda: connection(made.spec, made.place)
    thread = made.start()
    made.until(lambda: all(made.log(rank) == "ready\n" for rank in range(2)))
    made.stop.note(signal.SIGUSR1)
    thread.join(60)
    assert made.results[0]["kind"] == "stopped"
    assert made.log(1) == f"ready\n{int(signal.SIGUSR1)}\n"


@on_linux
def test_processes_save_and_end_when_the_connection_is_closed(stage: Callable[..., Stage]) -> None:
    """As when the launcher dies."""
    made = stage(SAVES, procs_per_node=2)
    made.open_node = lambda: connection(made.spec, made.place)
    thread = made.start()
    made.until(lambda: all(made.log(rank) == "ready\n" for rank in range(2)))
    made.nodes[0].process.stdin.close()
    thread.join(60)
    assert made.results[0]["kind"] == "lost"
    assert "host h0 is lost (ranks 0 to 1)" in made.results[0]["reason"]
    made.until(lambda: all(made.log(rank) == f"ready\n{int(signal.SIGTERM)}\n" for rank in range(2)))


@on_linux
def test_processes_save_and_end_when_the_connection_is_silent(stage: Callable[..., Stage]) -> None:
    """As behind a cut link: no end of the connection comes, only nothing."""
    made = stage(SAVES, procs_per_node=2)
    made.number = policy.open_attempt(made.spec, made.place, launched=True)
    far = connection(made.spec, made.place, link_timeout_s=1.0)
    made.until(lambda: far.port() > 0)
    far.start(node_commands.node_commands(made.spec, made.place, 0, 0, ("127.0.0.1", 1)), None)
    made.until(lambda: all(made.log(rank) == f"ready\n{int(signal.SIGTERM)}\n" for rank in range(2)))
    assert far.process is not None
    assert far.process.wait(60) == 0
    far.close()


@on_linux
def test_nothing_is_left_of_the_far_end_when_it_says_so(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the guard either: told of no end, it would signal the groups later, whose numbers may be others' by then."""
    made = stage(f"{WAIT}print('words of', rank)", procs_per_node=2)
    made.number = policy.open_attempt(made.spec, made.place, launched=True)
    commands = node_commands.node_commands(made.spec, made.place, 0, 0, ("127.0.0.1", 1))
    given = {"spec": made.spec, "link_timeout_s": 60, "token": f"far-{os.getpid()}", "orders": commands}
    (orders, far_orders), (far_answers, answers) = os.pipe(), os.pipe()
    alarms: list[int] = []
    monkeypatch.setattr(signal, "alarm", alarms.append)  # it would end this process
    os.write(far_orders, json.dumps({"start": given | {"shown_rank": 0}}).encode() + b"\n")
    try:
        SshNode(orders, answers).run()
        done = subprocess.run(["pgrep", "-f", given["token"]], capture_output=True, text=True, check=False)
        assert done.stdout == ""
        said = [json.loads(line) for line in os.read(far_answers, 1 << 16).splitlines()]
    finally:
        for descriptor in (orders, far_orders, far_answers, answers):
            os.close(descriptor)
    assert {(row["ended"], row["code"]) for row in said if "ended" in row} == {(0, 0), (1, 0)}
    assert "".join(row["lines"] for row in said if "lines" in row) == "words of 0\n"
    assert (said[-1], alarms) == ({"left": 1}, [10])


@pytest.mark.parametrize("name", ["policy", "node_guard", "node_processes", "ssh_node"])
def test_what_runs_on_hosts_is_python_3_9(name: str) -> None:
    source = Path(policy.__file__).with_name(f"{name}.py").read_text()
    tree = ast.parse(source, feature_version=(3, 9))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names}
    ours = {f"lt_launch.{one}" for one in ("policy", "node_guard", "node_processes")} | {"lt_launch"}
    assert {module.partition(".")[0] for module in modules - ours} <= sys.stdlib_module_names
