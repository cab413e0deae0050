"""Real processes of nodes under an attempt: failures, signals and grace, and that nothing is left behind."""

import ast
import json
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

from lt_launch import policy
from lt_launch.attempt import Attempt, Stop
from lt_launch.node import TOKEN, Host, Node
from lt_launch.policy import Place

PYTHON = [sys.executable, "-S", "-E"]
"""Without site-packages: a process starts in a few milliseconds."""
WAIT = "import os, sys, time\nrank = int(os.environ['RANK'])\n"
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


class Stage:
    """A stage's folder, and attempts of it in a thread."""

    def __init__(self, root: Path, program: str, **values: Any) -> None:
        defaults = {"name": "train", "argv": [*PYTHON, "-c", program], "nodes": 1, "procs_per_node": 2, "grace_s": 30}
        self.spec = defaults | values
        self.place = Place(root / "launch" / "stages" / "train" / "spec.json")
        self.stop, self.shown, self.results = Stop(), "", []
        self.host = Host(name="h")
        self.number = -1

    @property
    def folder(self) -> Path:
        return self.place.attempt(self.number)

    def start(self, **env: str) -> threading.Thread:
        self.number = policy.open_attempt(self.spec, self.place, launched=self.number < 0)
        hosts = [Host(**{**vars(self.host), "name": f"h{node}"}) for node in range(self.spec["nodes"])]
        options = {"spec": self.spec, "place": self.place, "number": self.number, "hosts": hosts, "env": env}
        self.attempt = Attempt(**options, stop=self.stop, show=self.show)
        thread = threading.Thread(target=lambda: self.results.append(self.attempt.run()))
        thread.start()
        return thread

    def show(self, text: str) -> None:
        self.shown += text

    def run(self, **env: str) -> dict[str, Any]:
        self.start(**env).join(60)
        return self.results[-1]

    def ready(self) -> threading.Thread:
        """Start, and wait until both ranks have said so."""
        thread = self.start()
        self.until(lambda: [self.log(rank) for rank in range(2)] == ["ready\n"] * 2)
        return thread

    def log(self, rank: int) -> str:
        path = self.folder / f"rank-{rank:05}.log"
        return path.read_text() if path.exists() else ""

    def until(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not what():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def processes(self) -> list[str]:
        """Return the processes that its first node has started and that are left."""
        wanted, found = f"{TOKEN}={self.attempt.nodes[0].token}".encode(), []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                found += [str(file)] if wanted in file.read_bytes() else []
        return found


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


@pytest.mark.parametrize(("rank", "code"), [(0, 1), (3, 64), (0, 70), (2, 127), (2, -signal.SIGKILL), (1, -15)])
def test_the_first_failure_is_named_with_rank_host_code_and_last_lines(
    stage: Callable[..., Stage], rank: int, code: int
) -> None:
    """All others notice at once and leave with other codes, as ranks do whose collective has broken."""
    program = f"""{WAIT}
print(f"last words of {{rank}}", flush=True)
if rank == {rank}:
    os.kill(os.getpid(), {-code}) if {code} < 0 else os._exit({code})
while not os.path.exists("notes/{rank}"): time.sleep(0.005)
os._exit({{0: 75, 1: 1, 2: 75, 3: 134}}[rank])
"""
    made = stage(program, procs_per_node=4)
    result = made.run()
    assert result["code"] == (code if code > 0 else 128 - code)
    assert result["kind"] == ("failed" if code > 0 else "killed")
    first = result["first"]
    assert (first["rank"], first["code"], first["host"]) == (rank, code, "h0")
    told = policy.report(result)
    assert f"rank {rank} on h0 was the first to fail" in told[0]
    assert told[2:] == [f"    last words of {rank}"]
    assert policy.read_table(made.folder / "exit.json") == result


def test_an_input_that_changes_while_it_is_read_is_read_again(stage: Callable[..., Stage], tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("before")
    made = stage("open('in.txt', 'w').write('after')", procs_per_node=1, cwd=str(tmp_path), inputs=["in.txt"])
    assert made.run()["kind"] == "done"
    assert not policy.done(made.spec, made.place)


def test_a_command_whose_folder_is_missing_does_not_run_elsewhere(stage: Callable[..., Stage], tmp_path: Path) -> None:
    made = stage("open('made', 'w')", procs_per_node=1, cwd=str(tmp_path / "gone"))
    assert made.run()["kind"] == "failed"
    assert not list(made.folder.rglob("made"))


WORDS = 'it\'s; $(touch broken) `x` "q" \\ @grace@ é\n*'


def test_who_a_process_is_and_words_of_any_kind(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two nodes of three processes: ranks in the order of the nodes, as torchrun names them. People see rank 0.

    Blanks, quotes and a line break in the folders, arguments and variables; nothing of them is run or seen in the list
    of processes.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR LT_ATTEMPT TORCHELASTIC_RUN_ID"
    names += " OMP_NUM_THREADS FROM_SETUP A"
    program = (
        f"import json, os, sys; print(json.dumps([[os.environ[name] for name in '{names}'.split()], sys.argv[1:],"
        " os.getcwd(), open(f'/proc/{os.getppid()}/cmdline').read().split('\\0')]))"
    )
    cwd = tmp_path / "a b';c"
    cwd.mkdir()
    made = stage(program, nodes=2, procs_per_node=3, cwd=str(cwd), setup=["export FROM_SETUP='a b'"])
    made.place = Place(tmp_path / "x ';y" / "stages" / "train" / "spec.json")
    made.spec["argv"] += [WORDS, ""]
    made.spec["env"] = {"A": "hidden"}
    assert made.run(A=WORDS)["kind"] == "done"
    for rank in range(6):
        identity = f"{rank} 6 {rank % 3} 3 {rank // 3} 127.0.0.1 0 train-0 2".split()
        shell = ["bash", "-s", ""]
        assert json.loads(made.log(rank)) == [[*identity, "a b", WORDS], [WORDS, ""], str(cwd), shell]
    assert made.shown == made.log(0)
    assert not list(cwd.iterdir())


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
    thread = made.ready()
    for _ in range(3):  # schedulers send it again and again
        made.stop.note(number)
        time.sleep(0.1)
    thread.join(60)
    assert (made.results[0]["code"], made.results[0]["kind"]) == (75, "stopped")
    assert [made.log(rank) for rank in range(2)] == [f"ready\n{number}\n"] * 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ranks_that_do_not_stop_are_killed_after_the_grace_time_or_a_second_ctrl_c(
    stage: Callable[..., Stage], number: signal.Signals
) -> None:
    grace_s = 0.5 if number == signal.SIGTERM else 30
    made = stage(f"{IGNORES.replace('SIGTERM', number.name)}time.sleep(100)", grace_s=grace_s)
    thread = made.ready()
    begun = time.monotonic()
    made.stop.note(signal.SIGTERM)
    if number == signal.SIGINT:
        made.stop.note(number)
        assert not made.stop.kill, "of two signals that come together either may be first"
        made.stop.note(number)
    thread.join(20)
    assert number == signal.SIGINT or time.monotonic() - begun >= grace_s
    assert (made.results[0]["code"], made.results[0]["kind"]) == (75, "stopped")
    assert "had to be killed" in made.results[0]["reason"] or number == signal.SIGINT


@pytest.mark.parametrize(("grace_s", "killed"), [(30, False), (0.5, True)])
def test_when_one_asks_to_be_started_again_the_others_have_the_grace_time_to_do_so(
    stage: Callable[..., Stage], grace_s: float, killed: bool
) -> None:
    """They are not told: whoever shares a step with it finds out itself, and is killed only when it does not."""
    made = stage(f"{WAIT}time.sleep(rank * {100 if killed else 0.5})\nsys.exit(75)", grace_s=grace_s)
    result = made.run()
    assert (result["code"], result["kind"], result["first"]["rank"]) == (75, "requeued", 0)
    assert (made.folder / "killed").exists() == killed
    assert sorted(policy.read_notes(made.folder / "notes")) == ([0] if killed else [0, 1])


def test_after_a_failure_the_others_are_told_and_then_killed(stage: Callable[..., Stage]) -> None:
    """Also those of another node, and what they have started; the one that failed is named."""
    program = (
        f"{IGNORES}import subprocess\nif rank == 3: subprocess.Popen(['sleep', '1000']); os._exit(9)\ntime.sleep(100)"
    )
    made = stage(program, nodes=2, grace_s=0.5)
    begun = time.monotonic()
    result = made.run()
    assert time.monotonic() - begun >= 3.5, "they may find out themselves, and then have the grace time"
    assert (result["kind"], result["code"], result["first"]["rank"], result["first"]["node"]) == ("failed", 9, 3, 1)
    assert list(policy.read_notes(made.folder / "notes")) == [3]
    assert not made.processes()


def test_long_output_is_shown_whole_and_in_order(stage: Callable[..., Stage]) -> None:
    """Far more than is read at a time, and a last line without an end."""
    made = stage("import os\nfor n in range(3000): os.write(1, b'%d' % n * 999 + b'\\n')\nos.write(1, b'x' * 200000)")
    made.run()
    assert made.shown == made.log(0) + "\n"


# --- ranks below a torchrun


def under_torchrun(stage: Callable[..., Stage], tmp_path: Path, script: str, grace_s: float = 30) -> Stage:
    """A stage that trains on two ranks, with lines of shell in place of `lt train torchrun`."""
    file = tmp_path / "python"
    file.write_text(f"#!/bin/bash\n{script}\n")
    file.chmod(0o755)
    return stage("", argv=[str(file), "-P", "-m", "lt_trainer", "run", "{recipe}"], recipe="hash", grace_s=grace_s)


def test_ranks_are_known_by_their_own_exit_codes_and_logs(stage: Callable[..., Stage], tmp_path: Path) -> None:
    """And their machine by the name that the person knows."""
    script = (
        "cd $LT_EXIT_CODES; echo 75 elsewhere >0; echo 7 elsewhere >1; echo why >>$LT_RANK_LOGS/rank-00001.log; exit 75"
    )
    result = under_torchrun(stage, tmp_path, script).run()
    assert (result["kind"], result["code"], result["first"]["rank"]) == ("failed", 7, 1)
    assert (result["first"]["host"], result["first"]["tail"]) == ("h0", ["why"])


@pytest.mark.parametrize(("code", "kind"), [(64, "failed"), (75, "requeued"), (137, "killed"), (127, "failed")])
def test_a_torchrun_that_starts_no_rank_stands_for_them(
    stage: Callable[..., Stage], tmp_path: Path, code: int, kind: str
) -> None:
    made = under_torchrun(stage, tmp_path, f"echo because; exit {code}")
    if code == 127:
        made.spec["argv"][0] = "/no/such/program"
    result = made.run()
    assert (result["kind"], result["code"], result["first"]["rank"]) == (kind, code, 0)
    said = "because" if code != 127 else "/no/such/program: No such file or directory"
    assert result["first"]["tail"][0].endswith(said)


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
    made = under_torchrun(stage, tmp_path, script, grace_s)
    result = made.run()
    assert result["kind"] == kind
    assert sorted(note[0] for note in policy.read_notes(made.folder / "notes").values()) == [result["code"]] * 2
    assert not made.processes()


# --- the launcher, the link or the shell is gone


def test_a_host_that_cannot_be_reached_is_for_the_person_at_first_and_lost_later(stage: Callable[..., Stage]) -> None:
    made = stage(f"{IGNORES}time.sleep(100)", procs_per_node=1)
    made.host = Host(name="h", shell=("bash", "-c", "echo Connection refused >&2; exit 255"))
    results = [made.run(), made.run()]
    assert [(result["kind"], result["code"]) for result in results] == [("failed", 64), ("lost", 75)]
    said = "host h0 is lost (rank 0): the connection ended with exit code 255 (Connection refused)"
    assert [result["reason"] for result in results] == [said] * 2
    assert policy.read_table(made.place.attempt(0) / "exit.json") == results[0]


def test_processes_save_and_end_when_the_launcher_is_silent(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a cut link, where its words only stop coming."""
    made = stage(SAVES)
    made.host = Host(name="h", silence_s=2)
    thread = made.ready()
    time.sleep(2.5)
    assert made.log(0) == "ready\n", "it is told that the launcher is there"
    monkeypatch.setattr(Node, "_say", lambda self, text: None)
    thread.join(60)
    assert made.results[0]["kind"] == "requeued"
    assert [made.log(rank) for rank in range(2)] == [f"ready\n{int(signal.SIGTERM)}\n"] * 2
    assert not made.processes()


def test_nothing_is_left_when_the_shell_is_killed(stage: Callable[..., Stage]) -> None:
    made = stage(SAVES)
    thread = made.ready()
    made.attempt.nodes[0].process.kill()
    thread.join(60)
    assert made.results[0]["kind"] == "lost"
    assert "host h0 is lost (ranks 0 to 1): the connection ended with killed by SIGKILL" in made.results[0]["reason"]
    made.until(lambda: not made.processes())
    assert made.log(1) == f"ready\n{int(signal.SIGTERM)}\n"


def test_what_runs_on_hosts_is_python_3_9() -> None:
    tree = ast.parse(Path(policy.__file__).read_text(), feature_version=(3, 9))
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names}
    assert {module.partition(".")[0] for module in modules} <= sys.stdlib_module_names
