"""The watchdog in real processes that hang, are killed, stopped, or leave; and its files and thread in this one."""

import dis
import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from lt_trainer.errors import PeerError
from lt_trainer.resilience import watchdog as module
from lt_trainer.resilience.heartbeat import HEARTBEAT_BYTES, Heartbeat, decode_heartbeat
from lt_trainer.resilience.watchdog import Watchdog
from lt_trainer.run_directory.rank_log import RankLog

DEADLINE_S = 90.0
HAS_PROC = Path("/proc/self/stat").exists()

RANK = """
import os, sys, threading, time
from pathlib import Path
from lt_trainer.errors import PeerError
from lt_trainer.run_directory.rank_log import RankLog
from lt_trainer.resilience.watchdog import Watchdog

run, rank, world, timeout_s, interval_s, plan = Path(sys.argv[1]), *map(float, sys.argv[2:6]), sys.argv[6]
rank, world = int(rank), int(world)

def collective():
    os.read(0, 1)  # until the test closes our standard input, as a collective waits for a rank that does not come

def hang_in_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def hang_in_loop():
    while True:
        pass

def train(dog):
    while len(list((run / "alive").iterdir())) < world:  # a slow start is not what is tested
        time.sleep(0.02)
    for step in range(1, 10**9):
        dog.mark("data", step)
        if step == 5 and plan in ("lock", "loop"):
            {"lock": hang_in_lock, "loop": hang_in_loop}[plan]()
        dog.mark("step", step)
        if step == 5:
            if plan in ("wait", "lose"):
                print("waits", flush=True)
                collective()
            if plan == "lock in step":
                hang_in_lock()
            if plan == "raise":
                raise ValueError("the disk is on fire")
            if plan == "lose":
                raise PeerError(f"contact lost: {dog.diagnose()}")
            if plan == "leave":
                return
        dog.mark("sync_stop", step)
        time.sleep(0.02)
        print(step, flush=True)
        if (run / "stop").exists():
            return

with RankLog(run, rank) as log, Watchdog(
    run, rank=rank, world_size=world, attempt="this", timeout_s=timeout_s, heartbeat_interval_s=interval_s, log=log
) as dog:
    train(dog)
"""


class Ranks:
    """Processes of a made-up run, each with its plan; all are killed at the end."""

    def __init__(self, run: Path, plans: list[str], *, timeout_s: float, beat_s: float) -> None:
        self.run = run
        self.processes: list[subprocess.Popen[str]] = []
        for rank, plan in enumerate(plans):
            args = [sys.executable, "-c", RANK, str(run), *map(str, (rank, len(plans), timeout_s, beat_s)), plan]
            self.processes.append(
                subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def signal(self, number: signal.Signals, *ranks: int) -> None:
        for rank in ranks:
            self.processes[rank].send_signal(number)

    def wait_for(self, rank: int, text: str) -> None:
        """Read the rank's output up to that line."""
        stdout = self.processes[rank].stdout
        assert stdout is not None
        for line in stdout:
            if line.strip() == text:
                return
        raise AssertionError(f"rank {rank} ended before {text!r}: {self.error(rank)}")

    def lose(self, *ranks: int) -> None:
        """Let the ranks' collective return, as if it had noticed that a rank is gone."""
        for rank in ranks:
            stdin = self.processes[rank].stdin
            assert stdin is not None
            stdin.write("x")
            stdin.flush()

    def error(self, rank: int) -> str:
        """The rank's standard error, when it has ended."""
        stderr = self.processes[rank].stderr
        assert stderr is not None
        return stderr.read()

    def code(self, rank: int) -> int:
        """The exit code, when it has ended."""
        process = self.processes[rank]
        stdout = process.stdout
        assert stdout is not None
        reader = threading.Thread(target=stdout.read)  # a full pipe must not be what it waits for
        reader.start()
        try:
            return process.wait(DEADLINE_S)
        finally:
            if process.returncode is not None:
                reader.join()

    def ended(self, rank: int) -> str:
        """Check that the watchdog ended the rank, and that its log and its heartbeat tell why; returns the reason."""
        assert self.code(rank) == 75
        found = re.fullmatch(rf"error: rank {rank} exits: (.*)\n", self.error(rank))
        assert found is not None
        assert f" rank {rank} exits: {found[1]}\n" in self.log(rank)
        assert "stack of thread MainThread, innermost frame last:" in self.log(rank)
        assert self.record(rank).exit_message == found[1]
        return found[1]

    def name(self, rank: int) -> str:
        return f"rank {rank} on {os.uname().nodename} (pid {self.processes[rank].pid})"

    def log(self, rank: int) -> str:
        return (self.run / "logs" / f"rank{rank:05}.log").read_text()

    def record(self, rank: int) -> Heartbeat:
        found = decode_heartbeat((self.run / "alive" / f"rank{rank:05}.json").read_bytes())
        assert found is not None
        return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    with ExitStack() as stack:

        def begin(plans: list[str], *, timeout_s: float, beat_s: float) -> Ranks:
            ranks = Ranks(tmp_path, plans, timeout_s=timeout_s, beat_s=beat_s)
            stack.callback(ranks.close)
            return ranks

        yield begin


@pytest.mark.parametrize(("plan", "function"), [("lock", "hang_in_lock"), ("loop", "hang_in_loop")])
def test_a_rank_that_hangs_before_the_others_wait_is_named(
    start: Callable[..., Ranks], plan: str, function: str
) -> None:
    ranks = start(["wait", "wait", plan], timeout_s=3, beat_s=0.25)
    reasons = [ranks.ended(rank) for rank in range(3)]
    for reason in reasons:
        assert reason.startswith(f"{ranks.name(2)} is behind, in stage data of step 5")
        assert reason.endswith(f"; its stack is in {ranks.run}/logs/rank00002.log")
    assert f" {function} (<string>:" in ranks.log(2)
    assert "train (<string>:" in ranks.log(2)
    assert f" at {function} (<string>:" in reasons[2]
    for rank in (0, 1):
        assert " collective (<string>:" in ranks.log(rank)
        assert ranks.record(rank).faulty_rank == 2
        assert ranks.record(rank).main_frame.startswith("collective (<string>:")


def test_a_rank_that_hangs_in_the_stage_in_which_the_others_wait_is_the_likely_one(start: Callable[..., Ranks]) -> None:
    ranks = start(["wait", "lock in step", "wait", "wait"], timeout_s=3, beat_s=0.25)
    for rank in range(4):
        reason = ranks.ended(rank)
        assert f"{ranks.name(1)}, which unlike most is in stage step of step 5 at hang_in_lock (<str" in reason
    assert "hang_in_lock" in ranks.log(1)


@pytest.mark.skipif(not HAS_PROC, reason="needs /proc to see that a killed process is gone while nobody waits for it")
def test_a_killed_rank_is_named_long_before_the_timeout(start: Callable[..., Ranks]) -> None:
    ranks = start(["wait", "go", "wait"], timeout_s=1000, beat_s=0.1)
    for rank, text in enumerate(("waits", "5", "waits")):
        ranks.wait_for(rank, text)
    ranks.signal(signal.SIGKILL, 1)  # a zombie from now on: this process does not wait for it
    reasons = [ranks.ended(rank) for rank in (0, 2)]
    assert reasons[0] == reasons[1]
    assert reasons[0].startswith(f"the process of {ranks.name(1)} has exited without an error message, ")
    assert reasons[0].endswith(f"; its log is {ranks.run}/logs/rank00001.log")


@pytest.mark.skipif(not HAS_PROC, reason="needs /proc to see that a killed process is gone while nobody waits for it")
def test_the_others_watch_rank_0(start: Callable[..., Ranks]) -> None:
    ranks = start(["go", "wait", "wait"], timeout_s=1000, beat_s=0.1)
    for rank, text in enumerate(("5", "waits", "waits")):
        ranks.wait_for(rank, text)
    ranks.signal(signal.SIGKILL, 0)
    for rank in (1, 2):
        assert ranks.ended(rank).startswith(f"the process of {ranks.name(0)} has exited without an error message")


def test_a_stopped_rank_is_named_and_ends_itself_when_it_is_continued(start: Callable[..., Ranks]) -> None:
    ranks = start(["go", "go", "go"], timeout_s=2, beat_s=0.1)
    for rank in range(3):
        ranks.wait_for(rank, "5")
    ranks.signal(signal.SIGSTOP, 1)
    reasons = [ranks.ended(rank) for rank in (0, 2)]
    assert reasons[0] == reasons[1]
    assert reasons[0].startswith(f"{ranks.name(1)} has had no heartbeat for 2 s, last in stage ")
    if HAS_PROC:
        assert ": its process is stopped by a signal; its log is " in reasons[0]
    ranks.signal(signal.SIGCONT, 1)
    assert ranks.ended(1) == reasons[0]


def test_a_run_that_was_stopped_and_continued_as_a_whole_goes_on(start: Callable[..., Ranks]) -> None:
    ranks = start(["go", "go", "go"], timeout_s=2, beat_s=0.1)
    for rank in range(3):
        ranks.wait_for(rank, "5")
    before = [ranks.record(rank).beat for rank in range(3)]
    ranks.signal(signal.SIGSTOP, 0, 1, 2)
    time.sleep(4)
    ranks.signal(signal.SIGCONT, 0, 1, 2)
    while min(ranks.record(rank).beat - before[rank] for rank in range(3)) < 40:  # two timeouts
        assert all(process.poll() is None for process in ranks.processes)
        time.sleep(0.1)
    (ranks.run / "stop").touch()
    for rank in range(3):
        assert ranks.code(rank) == 0
        assert ranks.error(rank) == ranks.log(rank) == ""
        assert (ranks.record(rank).exit_message, ranks.record(rank).faulty_rank) == ("", None)


def test_an_error_is_quoted_by_all_others_in_the_same_words(start: Callable[..., Ranks]) -> None:
    ranks = start(["wait", "raise", "wait"], timeout_s=1000, beat_s=0.1)
    reasons = [ranks.ended(rank) for rank in (0, 2)]
    assert reasons[0] == reasons[1]
    assert reasons[0] == (
        f"{ranks.name(1)} has failed in stage step of step 5: ValueError: the disk is on fire; its log is "
        f"{ranks.run}/logs/rank00001.log"
    )
    assert ranks.code(1) == 1  # its own error, its own exit code
    assert "ValueError: the disk is on fire" in ranks.log(1)


def test_a_rank_that_left_because_all_is_done_is_no_fault(start: Callable[..., Ranks]) -> None:
    ranks = start(["go", "leave"], timeout_s=1, beat_s=0.05)
    assert ranks.code(1) == 0
    before = ranks.record(0).beat
    while ranks.record(0).beat < before + 60:
        assert ranks.processes[0].poll() is None
        time.sleep(0.1)
    (ranks.run / "stop").touch()
    assert ranks.code(0) == 0
    assert ranks.error(0) == ranks.log(0) == ""


@pytest.mark.skipif(not HAS_PROC, reason="needs /proc to see that a killed process is gone while nobody waits for it")
def test_who_loses_contact_finds_out_why_and_leaves_by_itself(start: Callable[..., Ranks]) -> None:
    ranks = start(["lose", "go", "lose", "go"], timeout_s=1000, beat_s=0.8)  # a grace of some seconds
    for rank, text in enumerate(("waits", "5", "waits", "5")):
        ranks.wait_for(rank, text)
    ranks.signal(signal.SIGKILL, 1)
    ranks.lose(0, 2)
    process = rf"the process of {re.escape(ranks.name(1))}"
    sentence = process + " has exited without an error message, .*, perhaps killed; its log is .*"
    for rank in (0, 2):
        assert ranks.code(rank) == 1  # the main thread's own error ended it, not the watchdog
        error = ranks.error(rank)
        assert re.search(rf"PeerError: contact lost: {sentence}\n$", error)
        assert re.fullmatch(sentence, ranks.record(rank).exit_message or "")
        assert ranks.record(rank).faulty_rank == 1
    assert re.fullmatch(sentence, ranks.ended(3))  # from rank 0, which named the rank at fault


def test_who_loses_contact_while_all_are_well_says_so(start: Callable[..., Ranks]) -> None:
    ranks = start(["lose", "go"], timeout_s=1000, beat_s=0.3)
    ranks.wait_for(0, "waits")
    ranks.wait_for(1, "5")
    ranks.lose(0)
    assert ranks.code(0) == 1
    assert ranks.error(0).endswith("PeerError: contact lost: all other ranks seem to be alive\n")
    assert ranks.record(0).faulty_rank is None
    reason = ranks.ended(1)
    assert reason.startswith(f"{ranks.name(0)} has failed in stage step of step 5: PeerError: contact lost")
    assert ranks.record(1).faulty_rank is None


# One watchdog in this process, the others made up.


class Ended:
    """Stands in for the end of the process."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self._event = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self._event.set()

    def wait(self) -> None:
        assert self._event.wait(DEADLINE_S)
        assert self.codes == [75]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RankLog]:
    with RankLog(tmp_path, 0) as log:
        yield log


def watchdog(
    log: RankLog, ended: Ended, *, rank: int = 0, world: int = 2, timeout_s: float = 0.3, beat_s: float = 0.03
) -> Watchdog:
    run = log.path.parent.parent
    return Watchdog(
        run,
        rank=rank,
        world_size=world,
        attempt="this",
        timeout_s=timeout_s,
        heartbeat_interval_s=beat_s,
        log=log,
        exit_process=ended,
    )


def peer(run: Path, **changes: object) -> Path:
    """Write a heartbeat of rank 1, by default of another machine."""
    values: dict[str, object] = {
        "attempt": "this",
        "rank": 1,
        "pid": os.getpid(),
        "process_start_time": "1",
        "host": "node1",
        "machine_id": "node1 boot",
        "beat": 1,
        "n_rollbacks": 0,
        "step": 10,
        "stage": "step",
        **changes,
    }
    path = run / "alive" / "rank00001.json"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(Heartbeat(**values).encode())  # type: ignore[arg-type]
    return path


def until(condition: Callable[[], bool], then: Callable[[], object] = lambda: None) -> None:
    """Wait for it, doing `then` in between."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        then()
        time.sleep(0.005)


def beats(run: Path, more: int) -> None:
    """Wait until rank 0 has beaten that many times more."""
    path = run / "alive" / "rank00000.json"

    def beat() -> int:
        found = None
        while found is None:
            found = decode_heartbeat(path.read_bytes())
        return found.beat

    end = beat() + more
    until(lambda: beat() >= end)


def test_marking_costs_no_call_no_lock_and_no_file() -> None:
    names = {instruction.opname for instruction in dis.get_instructions(Watchdog.mark)}
    assert not [name for name in names if "CALL" in name or "GLOBAL" in name or "WITH" in name]


def test_the_beat_is_a_fortieth_of_the_timeout_within_bounds(tmp_path: Path, log: RankLog) -> None:
    for timeout_s, beat_s, limit in ((600.0, 5.0, 120), (100.0, 2.5, 40), (1.0, 0.05, 20), (0.01, 0.05, 2)):
        dog = Watchdog(tmp_path, rank=0, world_size=1, attempt="this", timeout_s=timeout_s, log=log)
        assert (dog._interval_s, dog._limit) == (beat_s, limit)


def test_a_silent_heartbeat_of_another_machine_ends_the_run(tmp_path: Path, log: RankLog) -> None:
    ended = Ended()
    peer(tmp_path)
    with watchdog(log, ended):
        ended.wait()
    text = log.path.read_text()
    assert f"rank 1 on node1 (pid {os.getpid()}) has had no heartbeat for 0.3 s" in text
    assert "test_a_silent_heartbeat_of_another_machine_ends_the_run (" in text  # our own stack
    own = decode_heartbeat((tmp_path / "alive" / "rank00000.json").read_bytes())
    assert own is not None
    assert own.faulty_rank == 1
    assert own.exit_message in text


@pytest.mark.parametrize("what", ["an earlier attempt", "a torn file", "another rank's record", "no file"])
def test_what_is_no_record_of_this_attempt_proves_nothing(tmp_path: Path, log: RankLog, what: str) -> None:
    ended = Ended()
    changes = {
        "an earlier attempt": {"attempt": "before", "exit_message": "an old error"},
        "another rank's record": {"rank": 2},
    }
    path = peer(tmp_path, **changes.get(what, {}))
    if what == "a torn file":
        path.write_bytes(path.read_bytes()[:100])
    if what == "no file":
        path.unlink()
    with watchdog(log, ended):
        beats(tmp_path, 40)
    assert ended.codes == []
    assert log.path.read_text() == ""


def test_a_rank_that_leaves_while_its_process_is_looked_at_is_no_fault(
    tmp_path: Path, log: RankLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = Ended()
    peer(tmp_path, machine_id=module._read_machine_id())

    def leave(pid: int, process_start_time: str) -> str:
        peer(tmp_path, machine_id=module._read_machine_id(), beat=2, exit_message="")
        return module.PROCESS_GONE

    monkeypatch.setattr(module, "_process_state", leave)
    with watchdog(log, ended) as dog:
        sight = dog._observe_rank(1)
        beats(tmp_path, 40)
    assert sight.heartbeat is not None
    assert sight.heartbeat.exit_message == ""
    assert ended.codes == []


@pytest.mark.parametrize(("rank", "watched"), [(0, {1, 2, 3, 4}), (3, {0})])
def test_all_look_at_rank_0_only_until_something_is_wrong(
    tmp_path: Path, log: RankLog, monkeypatch: pytest.MonkeyPatch, rank: int, watched: set[int]
) -> None:
    ended, looked, real = Ended(), set[int](), Watchdog._read_heartbeat
    wrong: list[Heartbeat] = []

    def read(self: Watchdog, other: int) -> Heartbeat | None:
        looked.add(other)
        return wrong[0] if wrong and other == min(watched) else real(self, other)

    monkeypatch.setattr(Watchdog, "_read_heartbeat", read)
    path = peer(tmp_path)
    with watchdog(log, ended, rank=rank, world=5, timeout_s=1000):
        until(lambda: len(looked) >= len(watched))
        time.sleep(0.3)
        assert looked == watched
        record = decode_heartbeat(path.read_bytes())
        assert record is not None
        wrong.append(replace(record, exit_message="rank 1 is frozen", faulty_rank=1))
        ended.wait()
    assert looked == {0, 1, 2, 3, 4} - {rank}


def test_who_has_explained_is_left_to_leave_by_itself_unless_it_hangs(tmp_path: Path, log: RankLog) -> None:
    ended = Ended()
    peer(tmp_path)
    with watchdog(log, ended, timeout_s=3) as dog:
        assert dog.diagnose().startswith("rank 1 on node1")
        peer(tmp_path, exit_message="rank 1 has failed", faulty_rank=1)
        beats(tmp_path, 30)
        assert ended.codes == []
        ended.wait()
    assert "the main thread has made no progress for 3 s before its first step, at " in log.path.read_text()
    assert "exits: rank 1 has failed" in log.path.read_text()


@pytest.mark.skipif(not HAS_PROC, reason="needs /proc to tell one process from another with its pid")
def test_a_pid_that_was_used_again_is_not_the_rank(tmp_path: Path, log: RankLog) -> None:
    ended = Ended()
    state, born = module._read_proc_stat(os.getpid())
    assert state in "RS"
    machine = module._read_machine_id()
    assert machine.startswith(os.uname().nodename)
    assert module._process_state(os.getpid(), born) == "R" or module._process_state(os.getpid(), born) == "S"
    peer(tmp_path, machine_id=machine, process_start_time=str(int(born) - 1))
    with watchdog(log, ended, timeout_s=1000):
        ended.wait()
    assert (
        f"the process of rank 1 on node1 (pid {os.getpid()}) has exited without an error message"
        in log.path.read_text()
    )


def test_without_proc_the_pid_alone_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module._process_state(os.getpid(), "") == module.PROCESS_UNKNOWN
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert module._process_state(child.pid, "") == module.PROCESS_GONE


def test_a_process_that_cannot_be_looked_at_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_files_left(self: Path, **options: object) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Path, "read_text", no_files_left)
    assert module._process_state(os.getpid(), "1") == module.PROCESS_UNKNOWN


def test_nothing_is_asked_of_the_main_thread_before_its_first_mark(tmp_path: Path, log: RankLog) -> None:
    ended = Ended()
    with watchdog(log, ended, world=1) as dog:
        beats(tmp_path, 40)
        assert ended.codes == []
        dog.mark("data", 1)
        ended.wait()
    text = log.path.read_text()
    assert "the main thread has made no progress for 0.3 s in stage data of step 1, at " in text
    assert "test_nothing_is_asked_of_the_main_thread_before_its_first_mark (" in text
    assert re.search(r"rank 0 exits: rank 0 on .* in stage data of step 1 at ", text)


def test_the_same_mark_again_is_progress(tmp_path: Path, log: RankLog) -> None:
    ended = Ended()
    with watchdog(log, ended, world=1, timeout_s=2) as dog:
        until(lambda: dog._beat >= 150, lambda: dog.mark("validate", 7))
    assert ended.codes == []
    assert log.path.read_text() == ""


def test_a_main_thread_that_goes_on_while_the_cause_is_sought_is_forgiven(tmp_path: Path, log: RankLog) -> None:
    ended = Ended()
    # The others never come: they are looked at for eight beats, in which the main thread must go on here.
    with watchdog(log, ended, world=3, timeout_s=2, beat_s=1) as dog:
        dog.mark("data", 1)
        until(lambda: "has made no progress" in log.path.read_text())
        until(lambda: "the main thread makes progress again" in log.path.read_text(), lambda: dog.mark("step", 1))
    assert ended.codes == []


def test_stepping_back_is_a_new_lap(tmp_path: Path, log: RankLog) -> None:
    with watchdog(log, Ended(), world=1, timeout_s=1000) as dog:
        for step in (1, 2, 2, 3, 1, 2, 1):
            dog.mark("data", step)
        beats(tmp_path, 2)
        record = decode_heartbeat((tmp_path / "alive" / "rank00000.json").read_bytes())
    assert record is not None
    assert (record.stage, record.step, record.n_rollbacks, record.exit_message, record.attempt) == (
        "data",
        1,
        2,
        None,
        "this",
    )


@pytest.mark.parametrize(
    ("error", "culprit"),
    [(ValueError("no\nspace"), 0), (KeyboardInterrupt("no space"), 0), (PeerError("no space"), None)],
)
def test_an_error_that_ends_the_context_is_left_behind(
    tmp_path: Path, log: RankLog, error: BaseException, culprit: int | None
) -> None:
    def save() -> None:
        with watchdog(log, Ended(), timeout_s=1000) as dog:
            dog.mark("save", 6)
            raise error

    with pytest.raises(type(error)):
        save()
    record = decode_heartbeat((tmp_path / "alive" / "rank00000.json").read_bytes())
    assert record is not None
    assert record.exit_message == (
        f"rank 0 on {os.uname().nodename} (pid {os.getpid()}) has failed in stage save of step 6: "
        f"{type(error).__name__}: no space; its log is {log.path}"
    )
    assert record.faulty_rank == culprit
    assert "watchdog" not in {thread.name for thread in threading.enumerate()}


def test_the_file_is_overwritten_in_place_and_never_empty(
    tmp_path: Path, log: RankLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "alive" / "rank00000.json", os.open
    found: list[tuple[int, int]] = []

    def open_(opened: Path, flags: int, mode: int = 0o777) -> int:
        file = real(opened, flags, mode)
        if Path(opened) == path:
            found.append((os.fstat(file).st_ino, os.fstat(file).st_size))
        return file

    monkeypatch.setattr(module.os, "open", open_)
    with watchdog(log, Ended(), world=1, timeout_s=1000):
        until(lambda: len(found) >= 4)
    inode = path.stat().st_ino
    assert found == [(inode, 0), *[(inode, HEARTBEAT_BYTES)] * (len(found) - 1)]


def test_a_heartbeat_that_cannot_be_written_is_noted_once_and_proves_nothing(
    tmp_path: Path, log: RankLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, real, refused, full = Ended(), os.open, [], [False]

    def open_(path: Path, flags: int, mode: int = 0o777) -> int:
        if full[0] and Path(path).suffix == ".json":
            refused.append(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, flags, mode)

    monkeypatch.setattr(module.os, "open", open_)
    peer(tmp_path)  # silent, perhaps for the same reason
    full[0] = True
    with watchdog(log, ended):
        until(lambda: len(refused) >= 40)
        assert ended.codes == []
        full[0] = False
        ended.wait()  # now its silence counts
    assert log.path.read_text().count("cannot write the heartbeat") == 1
    assert "rank00000.json: No space left on device; other ranks may" in log.path.read_text()


def test_a_log_that_cannot_be_opened_is_an_error_for_the_person(log: RankLog, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_(path: Path, flags: int, mode: int = 0o777) -> int:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(module.os, "open", open_)
    with pytest.raises(module.RunDirError, match=r"cannot write .*rank00000\.log: Permission denied; fix its"):
        watchdog(log, Ended()).__enter__()
