"""The agent of a node with real processes: injected failures, signals and grace, and that nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lt_launch.agent.policy import read_lines, read_table
from lt_launch.spec import AGENT_DIR

PYTHON = [sys.executable, "-S", "-E"]
"""Without site-packages: a process starts in a few milliseconds."""


class Stage:
    """A stage's folder, and the agent's commands on it."""

    def __init__(self, root: Path, program: str, **values: Any) -> None:
        self.spec = root / "launch" / "stages" / "train" / "spec.json"
        self.spec.parent.mkdir(parents=True)
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
        self.spec.write_text(json.dumps(defaults | values))
        self.processes: list[subprocess.Popen[bytes]] = []

    def command(self, *arguments: str) -> list[str]:
        return [*PYTHON, str(AGENT_DIR), arguments[0], str(self.spec), *arguments[1:]]

    def open(self) -> str:
        return subprocess.run(self.command("open"), capture_output=True, text=True, check=True).stdout.strip()

    def start(
        self, attempt: str, *arguments: str, node: int = 0, env: dict[str, str] | None = None, **options: Any
    ) -> Any:
        where = ["--attempt", attempt, "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", "1"]
        command = self.command("node", *where, *arguments)
        process = subprocess.Popen(command, env={**os.environ, **(env or {})}, **options)
        self.processes.append(process)
        return process

    def verdict(self, attempt: str, *arguments: str) -> tuple[int, dict[str, Any], str]:
        done = subprocess.run(
            self.command("verdict", "--attempt", attempt, *arguments), capture_output=True, text=True, check=False
        )
        return done.returncode, read_table(self.attempt(attempt) / "exit.json") or {}, done.stderr

    def attempt(self, attempt: str) -> Path:
        return self.spec.parent / f"attempt-{int(attempt):03}"

    def notes(self, attempt: str = "0", node: int = 0) -> list[dict[str, Any]]:
        return read_lines(self.attempt(attempt) / f"node-{node:05}.jsonl")

    def pids(self, attempt: str = "0") -> list[int]:
        return [note["pid"] for note in self.notes(attempt) if note["event"] == "started"]

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
        for process in one.processes:
            process.kill()
            process.wait(60)
            if process.stdin:
                process.stdin.close()


def alive(pid: int) -> bool:
    """Whether a process still runs; one that has ended but was not buried yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


WAIT = "import os, sys, time\nrank = int(os.environ['RANK'])\n"


@pytest.mark.guarantee("first-failure")
@pytest.mark.parametrize(
    ("rank", "code"),
    [(0, 1), (1, 2), (2, 7), (3, 64), (0, 70), (1, 85), (2, 127), (3, 137), (0, 254), (1, 255)]
    + [(2, -number) for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGTERM)],
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
time.sleep(0.1)
os._exit({{0: 75, 1: 1, 2: 75, 3: 134}}[rank])
"""
    made = stage(program)
    attempt = made.open()
    process = made.start(attempt, env={"FLAG": str(made.spec.parent / "flag")}, stdout=subprocess.DEVNULL)
    expected = code if code > 0 else 128 - code
    assert process.wait(60) == expected
    found, result, told = made.verdict(attempt)
    assert found == expected
    first = result["first"]
    assert (first["rank"], first["code"], first["host"]) == (rank, code, os.uname().nodename)
    assert first["tail"] == [f"last words of {rank}"]
    assert f"rank {rank} on {os.uname().nodename} was the first to fail" in told
    assert f"    last words of {rank}" in told
    assert result["kind"] == ("failed" if code > 0 else "killed")


def test_a_success_leaves_a_stamp_and_is_skipped_next_time(stage: Callable[..., Stage], tmp_path: Path) -> None:
    made = stage(f"{WAIT}open('out.txt', 'w').write('made')", procs_per_node=1, cwd=str(tmp_path), outputs=["out.txt"])
    attempt = made.open()
    assert made.start(attempt).wait(60) == 0
    assert made.verdict(attempt)[0] == 0
    assert made.open() == "skip"
    (tmp_path / "out.txt").write_text("changed")
    assert made.open() == "1"


def test_an_input_that_changes_while_it_is_read_is_read_again(stage: Callable[..., Stage], tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("before")
    made = stage("open('in.txt', 'w').write('after')", procs_per_node=1, cwd=str(tmp_path), inputs=["in.txt"])
    attempt = made.open()
    assert made.start(attempt).wait(60) == 0
    assert made.verdict(attempt)[0] == 0
    assert made.open() == "1"


def test_what_an_earlier_attempt_completed_proves_nothing(stage: Callable[..., Stage], tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "start"}\n{"event": "completed"}\n')
    made = stage("pass", procs_per_node=1, completion="run_dir", run_dir=str(tmp_path))
    attempt = made.open()
    assert made.start(attempt).wait(60) == 0
    assert made.verdict(attempt)[0] == 70
    program = (
        f'open({str(tmp_path / "events.jsonl")!r}, \'a\').write(\'{{"event": "start"}}\\n{{"event": "completed"}}\\n\')'
    )
    made = stage(program, procs_per_node=1, completion="run_dir", run_dir=str(tmp_path))
    attempt = made.open()
    assert made.start(attempt).wait(60) == 0
    assert made.verdict(attempt)[0] == 0


def test_who_a_process_is(stage: Callable[..., Stage]) -> None:
    """Two nodes of three processes: ranks in the order of the nodes, as torchrun names them."""
    names = (
        "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT LT_ATTEMPT OMP_NUM_THREADS A"
    )
    program = f"import os; print(*[os.environ[name] for name in '{names}'.split()])"
    made = stage(program, nodes=2, procs_per_node=3, env={"A": "x y"})
    attempt = made.open()
    processes = [
        made.start(attempt, node=node, env={"OMP_NUM_THREADS": "2"}, stdout=subprocess.PIPE) for node in (0, 1)
    ]
    shown = [process.communicate()[0].decode() for process in processes]
    found = [(made.attempt(attempt) / f"rank-{rank:05}.log").read_text() for rank in range(6)]
    assert found == [f"{rank} 6 {rank % 3} 3 {rank // 3} 127.0.0.1 1 0 2 x y\n" for rank in range(6)]
    assert shown == [found[0], ""]  # people see rank 0


IGNORES = f"{WAIT}import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
SAVES = f"""{WAIT}import signal
got = []
for one in (signal.SIGTERM, signal.SIGUSR1): signal.signal(one, lambda number, frame: got.append(number))
print("ready", flush=True)
while not got: time.sleep(0.01)
time.sleep(0.6)
print(*got)
sys.exit(75)
"""


@pytest.mark.guarantee("launch-signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_goes_on_once_and_the_ranks_have_the_whole_grace_time(
    stage: Callable[..., Stage], number: int
) -> None:
    made = stage(SAVES)
    attempt = made.open()
    process = made.start(attempt, stdout=subprocess.DEVNULL)
    made.until(lambda: all((made.attempt(attempt) / f"rank-{r:05}.log").exists() for r in range(4)))
    made.until(lambda: all((made.attempt(attempt) / f"rank-{r:05}.log").read_text() == "ready\n" for r in range(4)))
    for _ in range(3):  # schedulers send it again and again
        process.send_signal(number)
        time.sleep(0.1)
    assert process.wait(60) == 75
    code, result, _ = made.verdict(attempt)
    assert (code, result["kind"]) == (75, "stopped")
    assert [(made.attempt(attempt) / f"rank-{r:05}.log").read_text() for r in range(4)] == [f"ready\n{number}\n"] * 4


def test_a_signal_that_comes_before_the_agent_can_take_it_is_not_lost(stage: Callable[..., Stage]) -> None:
    """Whoever started it holds the signal back; the agent takes it as soon as it is there."""

    def held_back() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
        os.kill(os.getpid(), signal.SIGTERM)

    made = stage("import time; time.sleep(100)", procs_per_node=2)
    attempt = made.open()
    made.start(attempt, preexec_fn=held_back, stdout=subprocess.DEVNULL).wait(60)
    code, result, _ = made.verdict(attempt)
    assert (code, result["kind"]) == (75, "stopped")


@pytest.mark.guarantee("launch-signals")
def test_a_rank_that_does_not_stop_is_killed_when_the_grace_time_is_over(stage: Callable[..., Stage]) -> None:
    made = stage(f"{IGNORES}print('ready', flush=True)\ntime.sleep(100)", grace_s=0.5, procs_per_node=2)
    attempt = made.open()
    process = made.start(attempt, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    made.until(lambda: (made.attempt(attempt) / "rank-00001.log").read_text() == "ready\n")
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    process.stdout.close()
    code, result, _ = made.verdict(attempt)
    assert (code, result["kind"]) == (75, "stopped")
    assert "had to be killed" in result["reason"]
    times = {note["event"]: note["time"] for note in made.notes()}
    assert times["killed"] - times["signal"] >= 0.5


@pytest.mark.parametrize(("grace_s", "codes"), [(30, [75, 75]), (0.5, [75, -9])])
def test_when_one_asks_to_be_started_again_the_others_have_the_grace_time_to_do_so(
    stage: Callable[..., Stage], grace_s: float, codes: list[int]
) -> None:
    """They are not told: whoever shares a step with it finds out itself, and is killed only when it does not."""
    program = f"{WAIT}time.sleep(rank * {1.0 if grace_s > 1 else 100})\nsys.exit(75)"
    made = stage(program, procs_per_node=2, grace_s=grace_s)
    attempt = made.open()
    assert made.start(attempt).wait(60) == 75
    assert [note["code"] for note in made.notes() if note["event"] == "ended"] == codes
    code, result, _ = made.verdict(attempt)
    assert (code, result["kind"], result["first"]["rank"]) == (75, "requeue", 0)


def test_after_a_failure_the_others_are_told_and_then_killed(stage: Callable[..., Stage]) -> None:
    program = f"{IGNORES}if rank == 1: os._exit(9)\ntime.sleep(100)"
    made = stage(program, procs_per_node=2, settle_s=0.3, failed_s=0.3)
    attempt = made.open()
    assert made.start(attempt).wait(60) == 9
    notes = made.notes()
    assert [note["code"] for note in notes if note["event"] == "ended"] == [9, -9]
    assert made.verdict(attempt)[1]["first"]["rank"] == 1


def test_a_failure_on_another_node_ends_this_one(stage: Callable[..., Stage]) -> None:
    """The nodes share a folder; nobody else tells them of each other."""
    program = f"{WAIT}if rank == 1: os._exit(9)\ntime.sleep(100)"
    made = stage(program, nodes=2, procs_per_node=1)
    attempt = made.open()
    processes = [made.start(attempt, node=node) for node in (0, 1)]
    assert [process.wait(60) for process in processes] == [143, 9]
    code, result, _ = made.verdict(attempt)
    assert (code, result["first"]["rank"], result["first"]["node"]) == (9, 1, 1)


def test_grandchildren_end_with_their_rank(stage: Callable[..., Stage], tmp_path: Path) -> None:
    program = f"{WAIT}import subprocess\nprint(subprocess.Popen(['sleep', '1000']).pid, flush=True)\nos._exit(3)"
    made = stage(program, procs_per_node=1)
    attempt = made.open()
    assert made.start(attempt, stdout=subprocess.DEVNULL).wait(60) == 3
    pid = int((made.attempt(attempt) / "rank-00000.log").read_text())
    made.until(lambda: not alive(pid))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ties a process to its parent")
def test_ranks_end_when_the_agent_is_killed_and_the_node_counts_as_lost(stage: Callable[..., Stage]) -> None:
    made = stage(f"{IGNORES}time.sleep(1000)", procs_per_node=3)
    attempt = made.open()
    process = made.start(attempt)
    made.until(lambda: len(made.pids()) == 3)
    process.kill()
    process.wait(60)
    agent = made.notes()[0]["pid"]
    made.until(lambda: not any(alive(pid) for pid in (agent, *made.pids())))
    code, result, told = made.verdict(attempt)
    assert (code, result["kind"], result["first"]["ranks"]) == (75, "lost", [0, 1, 2])
    assert "host" in told
    assert "is lost (ranks 0 to 2)" in told


@pytest.mark.guarantee("slurm-lost-node")
def test_an_agent_that_nobody_watches_and_that_is_killed_ends_the_other_nodes(stage: Callable[..., Stage]) -> None:
    made = stage("import time; time.sleep(600)", procs_per_node=1, nodes=2, settle_s=0.1)
    attempt = made.open()
    killed, other = made.start(attempt, node=1), made.start(attempt, node=0)
    made.until(
        lambda: all([note["event"] for note in made.notes(node=node)] == ["began", "started"] for node in (0, 1))
    )
    agent = made.notes(node=1)[0]["pid"]
    assert agent != killed.pid
    os.kill(agent, signal.SIGKILL)
    assert killed.wait(60) == 128 + signal.SIGKILL
    assert other.wait(60) == 128 + signal.SIGTERM
    code, result, told = made.verdict(attempt)
    assert (code, result["kind"], result["first"]["node"]) == (75, "lost", 1)
    assert f"host {os.uname().nodename} is lost" in told


def test_the_agent_ends_its_ranks_when_orders_stop(stage: Callable[..., Stage]) -> None:
    """The launcher is there but silent, as behind a cut link."""
    made = stage(f"{IGNORES}time.sleep(1000)", procs_per_node=2, link_timeout_s=0.5, lost_grace_s=0.2)
    attempt = made.open()
    process = made.start(attempt, "--control", stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    made.until(lambda: len(made.pids()) == 2)
    process.wait(60)
    assert not any(alive(pid) for pid in made.pids())
    assert [note["reason"][:14] for note in made.notes() if note["event"] == "lost"] == ["no order came "]


def test_a_last_line_without_an_end_is_shown(stage: Callable[..., Stage]) -> None:
    made = stage("import sys; sys.stdout.write('one\\ntwo')", procs_per_node=1)
    process = made.start(made.open(), stdout=subprocess.PIPE)
    assert process.communicate()[0] == b"one\ntwo\n"


def test_a_program_that_is_not_there(stage: Callable[..., Stage]) -> None:
    made = stage("", argv=["/no/such/program"], procs_per_node=1)
    attempt = made.open()
    assert made.start(attempt).wait(60) == 127
    code, result, told = made.verdict(attempt)
    assert (code, result["first"]["rank"]) == (127, 0)
    assert "cannot run '/no/such/program'" in told


def test_a_reader_that_does_not_read_stops_nobody(stage: Callable[..., Stage]) -> None:
    """Rank 0 writes far more than a pipe holds while nobody reads the agent's output."""
    made = stage("import os\nfor _ in range(300): os.write(1, b'x' * 9999 + b'\\n')", procs_per_node=1)
    attempt = made.open()
    process = made.start(attempt, stdout=subprocess.PIPE)
    made.until(lambda: any(note["event"] == "ended" for note in made.notes()))
    assert (made.attempt(attempt) / "rank-00000.log").stat().st_size == 3_000_000
    process.stdout.close()
    assert process.wait(60) == 0


def test_lines_before_the_command_are_run_in_the_same_shell(stage: Callable[..., Stage]) -> None:
    made = stage(
        "import os, sys; print(os.environ['FROM_SETUP'], sys.argv[1:])",
        setup=["export FROM_SETUP='a b'"],
        procs_per_node=1,
    )
    spec = json.loads(made.spec.read_text())
    made.spec.write_text(json.dumps(spec | {"argv": [*spec["argv"], "it's", "$HOME"]}))
    attempt = made.open()
    assert made.start(attempt, stdout=subprocess.DEVNULL).wait(60) == 0
    assert (made.attempt(attempt) / "rank-00000.log").read_text() == "a b [\"it's\", '$HOME']\n"


def test_the_word_recipe_becomes_the_path_of_the_resolved_recipe(stage: Callable[..., Stage]) -> None:
    made = stage("import sys; print(sys.argv[1])", procs_per_node=1)
    spec = json.loads(made.spec.read_text())
    made.spec.write_text(json.dumps(spec | {"argv": [*spec["argv"], "{recipe}"]}))
    attempt = made.open()
    assert made.start(attempt, stdout=subprocess.DEVNULL).wait(60) == 0
    assert (made.attempt(attempt) / "rank-00000.log").read_text() == f"{made.spec.parent / 'recipe.toml'}\n"


def test_the_sent_copy_runs_without_lt_launch(stage: Callable[..., Stage], tmp_path: Path) -> None:
    """As `python3 <out>/launch/agent`, with nothing installed and from any folder."""
    from lt_launch.spec import agent_files

    made = stage("print('ran')", procs_per_node=1)
    folder = made.spec.parents[2] / "agent"
    folder.mkdir()
    for name, text in agent_files().items():
        (folder / name).write_text(text)
    where = ["--attempt", "0", "--node-rank", "0", "--master-addr", "x", "--master-port", "1"]
    command = [sys.executable, "-I", "-S", str(folder), "node", str(made.spec), *where]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")
