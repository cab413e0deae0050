"""The watchdog in real processes that hang, are killed, stopped, or fail; its thread in this one; causes by reports."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from lt_trainer.errors import PeerError
from lt_trainer.resilience import watchdog as module
from lt_trainer.resilience.rank_report import RankReport, find_cause, is_gone, pid_namespace, read_reports, write_report
from lt_trainer.resilience.watchdog import Watchdog
from lt_trainer.run_directory.jsonl import RankLog

DEADLINE_S = 90.0

RANK = """
import ctypes, os, sys, time
from pathlib import Path
from lt_trainer.errors import PeerError
from lt_trainer.resilience import watchdog
from lt_trainer.run_directory.jsonl import RankLog

run, plan = Path(sys.argv[1]), sys.argv[5]
rank, world, timeout_s = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
watchdog.MAX_POLL_S = 0.1
if plan == "hang_in_c":
    watchdog.ALARM_MARGIN_S = 0.5
if plan == "lose":
    watchdog.MAX_WAIT_S = 1e9

def collective():
    os.read(0, 1)  # until the test closes our standard input, as a collective waits for a rank that does not come

def hang_in_loop():
    while True:
        pass

def hang_in_c():
    ctypes.PyDLL(None).sleep(600)  # calls of a PyDLL keep Python's lock

def train(dog):
    while len(list((run / "alive").glob("*.json"))) < world:  # a slow start is not what is tested
        time.sleep(0.02)
    for step in range(1, 10**9):
        dog.mark("data", step)
        if step == 5 and plan.startswith("hang"):
            globals()[plan]()
        dog.mark("step", step)
        if step == 5 and plan in ("wait", "lose"):
            print("waits", flush=True)
            collective()
        if step == 5 and plan == "raise":
            raise ValueError("the disk is on fire")
        if step == 5 and plan == "lose":
            raise PeerError(f"contact lost: {dog.diagnose()}")
        dog.mark("sync_stop", step)
        time.sleep(0.02)
        if step == 5 and plan == "end":
            return

with RankLog(run, rank) as log, watchdog.Watchdog(
    run, rank=rank, world_size=world, attempt="this", timeout_s=timeout_s, log=log
) as dog:
    train(dog)
"""


Start = Callable[..., "Ranks"]


@dataclass(frozen=True)
class Ranks:
    """Processes of a made-up run, each with its plan."""

    run: Path
    processes: list[Any]

    def end(self, rank: int) -> tuple[int, str]:
        """Return exit code and standard error of a rank, when it has ended."""
        return self.processes[rank].wait(DEADLINE_S), self.processes[rank].stderr.read()

    def reason(self, rank: int) -> str:
        """Check that the watchdog ended the rank, and that its log tells why; returns the reason."""
        code, error = self.end(rank)
        assert code == 75, error
        found = re.fullmatch(rf"error: rank {rank} exits: (.*)\n", error)
        assert found is not None, error
        assert f" rank {rank} exits: {found[1]}\n" in self.log(rank)
        assert "most recent call first" in self.log(rank)
        return found[1]

    def log(self, rank: int) -> str:
        return (self.run / "logs" / f"rank{rank:05}.log").read_text()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts ranks by their plans; all are killed at the end."""
    ranks = Ranks(tmp_path, [])

    def begin(plans: list[str], timeout_s: float) -> Ranks:
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        for rank, plan in enumerate(plans):
            args = [sys.executable, "-c", RANK, str(tmp_path), *map(str, (rank, len(plans), timeout_s)), plan]
            ranks.processes.append(subprocess.Popen(args, text=True, **pipes))
        return ranks

    yield begin
    for process in ranks.processes:
        process.kill()
        process.communicate()


def test_a_rank_that_hangs_before_the_others_wait_is_named(start: Start) -> None:
    ranks = start(["wait", "wait", "hang_in_loop"], timeout_s=3)
    for rank in range(3):
        reason = ranks.reason(rank)
        assert re.match(r"rank 2 on \S+ \(pid \d+\) is behind, in stage data of step 5, and blocks others in", reason)
        assert reason.endswith(f"; its log is {ranks.run}/logs/rank00002.log")
    assert " in hang_in_loop\n" in ranks.log(2)
    assert " in train\n" in ranks.log(2)
    assert " in collective\n" in ranks.log(0)


def test_a_rank_that_hangs_with_pythons_lock_is_ended_by_the_kernel(start: Start) -> None:
    """Nothing of Python runs in it, so the other finds it silent; its stacks are in its log."""
    ranks = start(["wait", "hang_in_c"], timeout_s=3)
    assert re.match(r"rank 1 on \S+ \(pid \d+\) does not answer: it was killed, is frozen", ranks.reason(0))
    assert ranks.end(1) == (-signal.SIGALRM, "")
    assert " in hang_in_c\n" in ranks.log(1)


def test_an_error_is_quoted_by_all_others_in_the_same_words_long_before_the_timeout(start: Start) -> None:
    ranks = start(["wait", "raise", "wait"], timeout_s=1000)
    (reason,) = {ranks.reason(rank) for rank in (0, 2)}
    assert re.fullmatch(
        r"rank 1 on \S+ \(pid \d+\) has failed in stage step of step 5: ValueError: the disk is on fire; "
        rf"its log is {ranks.run}/logs/rank00001\.log",
        reason,
    )
    code, error = ranks.end(1)
    assert code == 1  # its own error, its own exit code
    assert error.endswith("ValueError: the disk is on fire\n")


def test_who_loses_contact_finds_out_why_and_leaves_by_itself(start: Start) -> None:
    """It waits for the other that is alive, and not for the one that is gone: that would last 500 s."""
    ranks = start(["lose", "go", "lose"], timeout_s=1000)
    for rank in (0, 2):
        assert ranks.processes[rank].stdout.readline() == "waits\n"
    ranks.processes[1].kill()
    for rank in (0, 2):  # the collective returns, as if it had noticed that a rank is gone
        os.write(ranks.processes[rank].stdin.fileno(), b"x")
    for rank in (0, 2):
        code, error = ranks.end(rank)
        assert code == 1  # the main thread's own error ended it, not the watchdog
        assert re.search(r"PeerError: contact lost: rank 1 on \S+ \(pid \d+\) does not answer: it was killed", error)


def test_a_run_that_ends_leaves_no_word_and_no_timer(start: Start) -> None:
    ranks = start(["end", "end"], timeout_s=1000)
    for rank in (0, 1):
        assert ranks.end(rank) == (0, "")
        assert ranks.log(rank) == ""
    assert not list((ranks.run / "alive").glob("trouble-*"))


# One watchdog in this process.


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RankLog]:
    with RankLog(tmp_path, 0) as log:
        yield log


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Waits until the process would have ended."""
    codes, seen = SimpleQueue[int](), list[int]()
    monkeypatch.setattr(module.os, "_exit", codes.put)
    yield lambda: seen.append(codes.get(timeout=DEADLINE_S))
    assert seen in ([], [75])
    assert codes.empty(), "once"


def watchdog(log: RankLog, *, timeout_s: float = 0.3, dump: Callable[[], str] = lambda: "", world: int = 1) -> Watchdog:
    run = log.path.parent.parent
    return Watchdog(run, rank=0, world_size=world, attempt="this", timeout_s=timeout_s, log=log, dump_debug_info=dump)


def test_nothing_is_asked_of_the_main_thread_before_its_first_mark(log: RankLog, ended: Callable[[], None]) -> None:
    with watchdog(log) as dog:
        time.sleep(0.5)  # longer than the timeout
        assert log.path.read_text() == ""
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
        dog.mark("data", 1)
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 20
        ended()
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    text = log.path.read_text()
    assert "the main thread has made no progress for 0.3 s in stage data of step 1" in text
    assert "in test_nothing_is_asked_of_the_main_thread_before_its_first_mark\n" in text
    assert re.search(r"rank 0 exits: rank 0 on .* has made no progress in stage data of step 1; its log is", text)


@pytest.mark.parametrize(("error", "reported"), [(ValueError("no\nspace"), True), (PeerError("no space"), False)])
def test_an_error_that_ends_the_context_is_reported(
    tmp_path: Path, log: RankLog, error: Exception, reported: bool
) -> None:
    def save() -> None:
        with watchdog(log, timeout_s=1000, world=2) as dog:
            dog.mark("save", 6)
            raise error

    with pytest.raises(type(error)):
        save()
    found = read_reports(tmp_path / "alive" / "trouble-this")
    assert {rank: (one.stage, one.step, one.error) for rank, one in found.items()} == (
        {0: ("save", 6, "ValueError: no space")} if reported else {}
    )
    assert "watchdog" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_ends_with_the_engines_dump_and_though_it_hangs(
    log: RankLog, ended: Callable[[], None], capfd: pytest.CaptureFixture[str], monkeypatch, fails: bool
) -> None:
    """Where the dump hangs, the disk refuses reports, too."""
    released = threading.Event()
    if fails:
        monkeypatch.setattr(module, "DEBUG_DUMP_TIMEOUT_S", 0.05)
        (log.path.parents[1] / "alive").write_text("a file, not a folder")
    heard: list[str] = []

    def dump() -> str:
        heard.append(threading.current_thread().name)
        return str(released.wait()) if fails else "the last collectives are in flight/x"

    with watchdog(log, dump=dump, timeout_s=0.1) as dog:
        dog.mark("fetch_metrics", 7)
        ended()
    released.set()
    assert heard == ["debug dump"]
    text, error = log.path.read_text(), capfd.readouterr().err
    assert "rank 0 exits: rank 0 on " in text
    assert fails or "the last collectives are in flight/x\n" in text  # stacks may follow: both have timers
    assert fails or "; the last collectives are in flight/x\n" in error


def test_a_rank_that_reports_and_ends_between_two_looks_is_not_taken_for_silent(log: RankLog, monkeypatch) -> None:
    def read(folder: Path) -> dict[int, RankReport]:
        found = read_reports(folder)
        if folder.name == "trouble-this":
            write_report(folder, report(1, error="E: no"))
        return found

    write_report(log.path.parents[1] / "alive", report(1))
    monkeypatch.setattr(module.rank_report, "read_reports", read)
    monkeypatch.setattr(
        module.rank_report, "is_gone", lambda start: list(log.path.parents[1].glob("*/trouble*/rank00001*"))
    )
    with watchdog(log, timeout_s=1000, world=2) as dog:
        assert dog.diagnose().startswith("rank 1 on node1 (pid 101) has failed in stage step of step 5: E: no")


# Causes from reports alone.


def report(rank: int, step: int = 5, stage: str = "step", error: str = "") -> RankReport:
    return RankReport(rank, 100 + rank, f"node{rank}", step, stage, error)


@pytest.mark.parametrize(
    ("reports", "cause"),
    [
        ([report(0), report(1, stage="data"), report(2)], "rank 1 on node1 (pid 101) is behind, in stage data of step"),
        ([report(0, 6, "data"), report(1), report(2, 6)], "rank 1 on node1 (pid 101) is behind, in stage step of step"),
        ([report(0), report(1, error="E: no"), report(2, 4)], "rank 1 on node1 (pid 101) has failed in stage step of"),
        ([report(0), report(2, 4)], "rank 1 on node1 (pid 101) does not answer: it was killed"),
        ([report(2)], "rank 0 on node0 (pid 100) does not answer (nor do 1 more, such as rank 1): it was killed"),
        ([report(0), report(1), report(2)], "no rank has made progress, all in stage step of step 5; their stacks are"),
        ([report(0), report(1, stage="other"), report(2)], "rank 0 on node0 (pid 100) is behind (nor do 1 more"),
    ],
)
def test_the_cause_is_a_ranks_own_error_else_a_silent_rank_else_the_one_behind(
    tmp_path: Path, reports: list[RankReport], cause: str
) -> None:
    for one in reports:
        write_report(tmp_path / "trouble", one)
    (tmp_path / "trouble" / "rank00009.json").write_text('{"rank": 9')  # damaged
    found = read_reports(tmp_path / "trouble")
    assert sorted(found.values(), key=lambda one: one.rank) == sorted(reports, key=lambda one: one.rank)
    assert find_cause(found, {rank: report(rank) for rank in range(3)}, 3, Path("logs")).startswith(cause)


def test_a_process_is_gone_when_the_kernel_says_so_on_this_host() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        here = RankReport(1, process.pid, socket.gethostname(), 5, "step", namespace=pid_namespace())
        assert not is_gone(here)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_gone(here), "its parent has not asked for it yet"
        process.wait()
        assert is_gone(here)
        assert not is_gone(replace(here, host="elsewhere")), "nothing is known of it"
        assert not is_gone(replace(here, namespace=here.namespace + 1)), "nor of a process in another container"
