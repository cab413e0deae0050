"""Real processes of one node under an attempt: failures, signals and grace, and that nothing is left behind."""

import ast
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lt_launch import node_commands, policy
from lt_launch.attempt import Attempt, Stop, Transport
from lt_launch.hosts import Host
from lt_launch.node import TOKEN, Node
from lt_launch.policy import Place

PYTHON = [sys.executable, "-S", "-E"]
"""Without site-packages: a process starts in a few milliseconds."""
WAIT = "import os, sys, time\nrank = int(os.environ['RANK'])\n"
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def find_processes(token: str) -> list[str]:
    """Return the processes that a node has started."""
    wanted, found = f"{TOKEN}={token}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found += [folder.name] if wanted in (folder / "environ").read_bytes() else []
    return found


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
        self.open_node: Callable[[], Any] = lambda: Transport().open_node(Host(name="h"), self.spec, self.folder)
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
while not os.path.exists("notes/{rank}"): time.sleep(0.005)
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


def test_an_input_that_changes_while_it_is_read_is_read_again(stage: Callable[..., Stage], tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("before")
    made = stage("open('in.txt', 'w').write('after')", procs_per_node=1, cwd=str(tmp_path), inputs=["in.txt"])
    assert made.run()["kind"] == "done"
    assert not policy.done(made.spec, made.place)


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


@on_linux
def test_grandchildren_end_with_their_rank(stage: Callable[..., Stage]) -> None:
    program = f"{WAIT}import subprocess\nprint(subprocess.Popen(['sleep', '1000']).pid, flush=True)\nos._exit(3)"
    made = stage(program, procs_per_node=1)
    assert made.run()["code"] == 3
    assert not find_processes(made.nodes[0].token)
    stat = Path(f"/proc/{int(made.log(0))}/stat")
    assert not stat.exists() or stat.read_text().rpartition(") ")[2][0] == "Z"


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
    assert "/no/such/program: No such file or directory" in "\n".join(policy.report(result))


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
@pytest.mark.parametrize(("grace_s", "kind"), [(30, "requeued"), (1, "killed")])
def test_ranks_that_outlive_their_torchrun_may_save(
    stage: Callable[..., Stage], tmp_path: Path, grace_s: float, kind: str
) -> None:
    """Each is in a session of its own; none is left when the attempt has ended."""
    saves = 'sleep 2; echo "75 h" >$LT_EXIT_CODES/$1; exit 75'
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
    assert order["ranks"] == list(range(8, 16))
    folder = str(tmp_path / "train/attempt-003")
    assert order["env"]["LT_EXIT_CODES"] == f"{folder}/notes"
    assert order["env"]["LT_RANK_LOGS"] == folder
    assert "RANK" not in order["env"]


# --- the far end of a connection, without ssh


def far(made: Stage, silence_s: float = 60) -> Node:
    """Return what ssh would start."""
    return Node(["bash", "-s"], made.folder, made.spec["grace_s"], python=sys.executable, silence_s=silence_s)


WORDS = 'it\'s; $(touch broken) `x` "q" \\ @grace@ é\n*'


def test_words_of_any_kind_arrive(stage: Callable[..., Stage], tmp_path: Path) -> None:
    """Blanks, quotes and a line break in the folders, arguments and variables; nothing of them is run."""
    cwd = tmp_path / "a b';c"
    cwd.mkdir()
    made = stage("import os, sys; print(ascii(sys.argv[1:]), ascii(os.environ['A']), os.getcwd())", procs_per_node=1)
    made.place, made.spec["cwd"] = Place(tmp_path / "x ';y" / "stages" / "train" / "spec.json"), str(cwd)
    made.spec["argv"] += [WORDS, ""]
    made.open_node = lambda: far(made)
    assert made.run(A=WORDS)["kind"] == "done"
    assert made.log(0) == f"{[WORDS, '']!a} {WORDS!a} {cwd}\n"
    assert not list(cwd.iterdir())


def test_nothing_of_a_job_is_seen_in_the_list_of_processes(stage: Callable[..., Stage]) -> None:
    made = stage(f"{WAIT}print(open(f'/proc/{{os.getppid()}}/cmdline').read().split('\\0'))", procs_per_node=1)
    made.run(SECRET="hush")
    assert made.log(0) == "['bash', '-s', '']\n"


def test_a_host_without_the_folder_of_the_launch_is_told(stage: Callable[..., Stage]) -> None:
    made = stage("pass", procs_per_node=1)
    made.open_node = lambda: Node(["bash", "-s"], made.folder / "elsewhere", 1, python=sys.executable)
    result = made.run()
    assert (result["kind"], result["code"]) == ("failed", 64)
    assert "cannot start on host h0: " in result["reason"]
    assert "elsewhere: No such file or directory" in result["reason"]


@on_linux
@pytest.mark.parametrize("how", ["closed", "silent"])
def test_processes_save_and_end_without_the_launcher(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Its words end when it dies; behind a cut link they only stop coming."""
    made = stage(SAVES, procs_per_node=2)
    made.open_node = lambda: far(made, silence_s=2)
    thread = made.start()
    made.until(lambda: all(made.log(rank) == "ready\n" for rank in range(2)))
    time.sleep(3)
    assert made.log(0) == "ready\n", "it is told that the launcher is there"
    if how == "closed":
        made.nodes[0].process.stdin.close()
    monkeypatch.setattr(Node, "_say", lambda self, text: None)
    made.until(lambda: all(made.log(rank) == f"ready\n{int(signal.SIGTERM)}\n" for rank in range(2)))
    thread.join(60)
    assert made.results[0]["kind"] == "requeued"


@on_linux
def test_what_does_not_stop_without_the_launcher_is_killed(stage: Callable[..., Stage]) -> None:
    made = stage(f"{IGNORES}time.sleep(100)", grace_s=1, procs_per_node=2)
    thread = made.start()
    made.until(lambda: all(made.log(rank) == "ready\n" for rank in range(2)))
    made.nodes[0].process.stdin.close()
    thread.join(60)
    assert not find_processes(made.nodes[0].token)
    assert made.results[0]["code"] == 75


@on_linux
def test_nothing_is_left_when_the_shell_is_killed(stage: Callable[..., Stage]) -> None:
    made = stage(SAVES, procs_per_node=2)
    thread = made.start()
    made.until(lambda: all(made.log(rank) == "ready\n" for rank in range(2)))
    made.nodes[0].process.kill()
    thread.join(60)
    assert made.results[0]["kind"] == "lost"
    assert "host h0 is lost (ranks 0 to 1): the connection ended with killed by SIGKILL" in made.results[0]["reason"]
    made.until(lambda: not find_processes(made.nodes[0].token))
    assert made.log(1) == f"ready\n{int(signal.SIGTERM)}\n"


def test_what_runs_on_hosts_is_python_3_9() -> None:
    tree = ast.parse(Path(policy.__file__).read_text(), feature_version=(3, 9))
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names}
    assert {module.partition(".")[0] for module in modules} <= sys.stdlib_module_names
