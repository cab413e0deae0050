"""Watchdog of a rank: a thread that ends the rank if the run hangs or another rank is lost.

A rank that exits, freezes or hangs leaves the others waiting in a collective forever. So a thread of every rank writes
a heartbeat to `<run>/alive/rank00003.json` every few seconds and reads those of others: rank 0 all, the others that of
rank 0. Once a rank has failed, every rank reads all. The thread ends the process with exit code 75 (rerun to resume) if

- the main thread has not called `mark` for the timeout: the stacks of all threads are written to the rank's log, and
  the ranks are compared to find the likely cause;
- the heartbeat of a rank is unchanged for the timeout: the rank is frozen, or its machine is lost;
- the process of a rank on this machine has exited without an exit message, or a rank has exited with an error. The main
  thread has a few beats to exit by itself first.

The message that names the faulty rank goes to standard error, to the rank's log and into its own heartbeat, from which
the others quote it. `heartbeat` has the rules.

Time is counted in beats of this thread, so if the thread stops, so does the count. Cost: one small write per beat and
rank, and about two small reads; `mark` stores a tuple.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from lt_trainer.constants import EXIT_REQUEUE
from lt_trainer.errors import PeerError, RunDirError
from lt_trainer.files import open_for_appending, open_lock_file, read_bytes
from lt_trainer.resilience.heartbeat import (
    PROCESS_GONE,
    PROCESS_UNKNOWN,
    START,
    Diagnosis,
    Heartbeat,
    HeartbeatMonitor,
    Observation,
    decode_heartbeat,
    describe_progress,
    failure_message,
)

if TYPE_CHECKING:
    from lt_trainer.run_directory.rank_log import RankLog

HEARTBEAT_FOLDER = "alive"
BEATS_PER_TIMEOUT = 40
"""Beats per timeout, within the limits below for the interval."""
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.05, 5.0
DEBUG_DUMP_TIMEOUT_S = 5.0
"""Time for the engine's debug dump before the process exits."""
SURVEY_ROUNDS = 3, 9
"""Observations of all ranks to find a cause: minimum, and maximum until all were seen alive."""


def heartbeat_path(run: Path, rank: int) -> Path:
    """Return the path of a rank's heartbeat in a run directory."""
    return run / HEARTBEAT_FOLDER / f"rank{rank:05}.json"


class Watchdog:
    """Watchdog of this rank's main thread and the other ranks; a context, entered by the main thread.

    Before the first `mark` the main thread is not watched: a start may take long.

    Args:
        run: run directory, shared by all ranks.
        rank: this rank.
        world_size: number of ranks.
        attempt: random name of this start of the run, equal on all ranks; heartbeats of other attempts are ignored.
        timeout_s: time that a rank may hang or be silent.
        log: this rank's log.
        heartbeat_interval_s: time between heartbeats, equal on all ranks; default a fortieth of the timeout, at most
            5 s.
        dump_debug_info: dumps hang diagnostics and returns a description of what to read, or "".
        exit_process: ends the process with an exit code.
    """

    def __init__(
        self,
        run: Path,
        *,
        rank: int,
        world_size: int,
        attempt: str,
        timeout_s: float,
        log: RankLog,
        heartbeat_interval_s: float | None = None,
        dump_debug_info: Callable[[], str] = lambda: "",
        exit_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._folder, self._logs, self._log_path = run / HEARTBEAT_FOLDER, log.path.parent, log.path
        self._rank, self._attempt, self._exit_process = rank, attempt, exit_process
        self._dump_debug_info, self._has_dumped = dump_debug_info, False
        self._interval_s = (
            min(max(timeout_s / BEATS_PER_TIMEOUT, MIN_INTERVAL_S), MAX_INTERVAL_S)
            if heartbeat_interval_s is None
            else heartbeat_interval_s
        )
        self._limit = max(math.ceil(timeout_s / self._interval_s), 2)
        self._others = [other for other in range(world_size) if other != rank]
        self._watched = self._others if rank == 0 else [0]
        self._monitor = self._new_monitor(self._others)
        self._pid, self._host, self._machine_id = os.getpid(), socket.gethostname(), _read_machine_id()
        self._process_start_time = _read_proc_stat(self._pid)[1]
        self._main_thread_id = threading.get_ident()
        self._mark = self._first_mark = (START, -1, 0)
        self._main_frame_text = ""
        self._exit_diagnosis: Diagnosis | None = None
        self._diagnosed: Diagnosis | None = None
        self._leaving = False
        self._beat = 0
        self._write_failed = False
        self._log_file = -1
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def mark(self, stage: str, step: int) -> None:
        """Record that the main thread begins `stage` of `step`, or has completed a part of it."""
        _, previous, n_rollbacks = self._mark
        # always a new tuple: the thread compares identities
        self._mark = (stage, step, n_rollbacks + (step < previous))

    def diagnose(self) -> str:
        """Return a sentence that says which rank exited or is silent, or that all seem alive.

        Called by the main thread after a failed collective, before it exits with a `PeerError`. Observes all ranks for
        a few beats, at most a quarter of the timeout, and dumps the engine's diagnostics: the other rank may have
        exited because of a hang.
        """
        self._leaving = True
        self.heartbeat()
        self._diagnosed = self._survey(lambda: False).diagnose()
        if dump := self._dump_debug_info_with_timeout():
            self._log(dump)
        self.heartbeat()
        if self._diagnosed is None:
            return "all other ranks seem to be alive"
        return self._diagnosed.text

    def __enter__(self) -> Watchdog:
        self._main_thread_id = threading.get_ident()
        # A separate file object: the main thread may hang while it holds the lock of the log's.
        try:
            self._log_file = open_for_appending(self._log_path)
        except OSError as exc:
            raise RunDirError(
                f"cannot write {self._log_path}: {exc.strerror}; fix its permissions or disk, then rerun"
            ) from exc
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            self._log_write_failure(exc)
        self._write_heartbeat()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._exit_diagnosis is not None:
            pass  # the thread has made a diagnosis
        elif error is None:
            self._exit_diagnosis = Diagnosis(text="", faulty_rank=None)
        elif isinstance(error, PeerError) and self._diagnosed is not None:
            self._exit_diagnosis = self._diagnosed
        else:
            text = failure_message(self._own_heartbeat(), f"{type(error).__name__}: {error}", self._log_path)
            self._exit_diagnosis = Diagnosis(
                text=text, faulty_rank=None if isinstance(error, PeerError) else self._rank
            )
        self._write_heartbeat()
        os.close(self._log_file)
        self._log_file = -1

    def _run(self) -> None:
        """Run the thread: write a heartbeat, observe other ranks, check the main thread."""
        seen, idle = self._mark, 0
        while not self._stop.wait(self._interval_s):
            mark = self._mark
            idle = idle + 1 if mark is seen and mark is not self._first_mark else 0
            seen = mark
            self._main_frame_text = self._main_frame() if 2 * idle >= self._limit else ""
            is_reliable = self._write_heartbeat()
            diagnosis = None
            if not self._leaving:
                watched = self._others if self._monitor.has_alarm else self._watched
                diagnosis = self._monitor.observe(self._observe_ranks(watched), is_reliable=is_reliable)
            if diagnosis is None and idle >= self._limit:
                diagnosis = self._diagnose_hang(seen)
                idle = 0
            elif diagnosis is not None:
                self._log(self._stacks())
            if diagnosis is not None and not self._stop.is_set():
                self._exit(diagnosis)
                return

    def _diagnose_hang(self, seen: tuple[str, int, int]) -> Diagnosis | None:
        """Log the stacks and find the cause; None if the main thread makes progress meanwhile."""
        self._log(
            f"the main thread has made no progress for {self._limit * self._interval_s:g} s "
            f"{describe_progress(self._own_heartbeat())}, at {self._main_frame_text}\n{self._stacks()}"
        )
        monitor = self._survey(lambda: self._mark is not seen)
        if self._mark is not seen:
            self._log("the main thread makes progress again")
            return None
        return monitor.diagnose_hang(self._own_heartbeat())

    def _survey(self, should_stop: Callable[[], bool]) -> HeartbeatMonitor:
        """Observe all other ranks for some beats, or until `should_stop`."""
        monitor = self._new_monitor(self._others)
        min_rounds, max_rounds = SURVEY_ROUNDS
        for number in range(1, max_rounds + 1):
            monitor.observe(self._observe_ranks(self._others))
            cause = monitor.find_cause()
            is_known = monitor.all_seen_alive or (cause is not None and cause.faulty_rank is not None)
            if should_stop() or (number >= min_rounds and is_known):
                break
            if number < max_rounds and self._stop.wait(self._interval_s):
                break
            if threading.current_thread() is self._thread:
                self._write_heartbeat()
        return monitor

    def _exit(self, diagnosis: Diagnosis) -> None:
        """End the process. All writes here are unbuffered, so nothing is left to flush."""
        self._exit_diagnosis = diagnosis
        text = f"rank {self._rank} exits: {diagnosis.text}"
        self._log(text)
        self._write_heartbeat()
        if dump := self._dump_debug_info_with_timeout():
            self._log(dump)
            text = f"{text}; {dump}"
        with suppress(OSError):  # standard error may be closed
            os.write(2, f"error: {text}\n".encode())
        self._exit_process(EXIT_REQUEUE)

    def _dump_debug_info_with_timeout(self) -> str:
        """Dump the engine's diagnostics once, in a thread, since it may hang like the main thread."""
        if self._has_dumped:
            return ""
        self._has_dumped = True
        result: list[str] = []

        def dump() -> None:
            try:
                result.append(self._dump_debug_info())
            except Exception as exc:  # noqa: BLE001 - the rank must exit whatever the dump raises
                result.append(f"the debug dump failed: {type(exc).__name__}: {exc}")

        thread = threading.Thread(target=dump, name="debug dump", daemon=True)
        thread.start()
        thread.join(DEBUG_DUMP_TIMEOUT_S)
        return result[0] if result else ""

    def _new_monitor(self, ranks: Iterable[int]) -> HeartbeatMonitor:
        return HeartbeatMonitor(ranks, limit=self._limit, interval_s=self._interval_s, logs=self._logs)

    def heartbeat(self) -> None:
        """Record a heartbeat of the main thread in its current stage."""
        stage, step, n_rollbacks = self._mark
        self._mark = (stage, step, n_rollbacks)  # also starts watching if nothing was marked: exiting must complete

    def _own_heartbeat(self) -> Heartbeat:
        stage, step, n_rollbacks = self._mark
        diagnosis = self._exit_diagnosis
        return Heartbeat(
            attempt=self._attempt,
            rank=self._rank,
            pid=self._pid,
            process_start_time=self._process_start_time,
            host=self._host,
            machine_id=self._machine_id,
            beat=self._beat,
            n_rollbacks=n_rollbacks,
            step=step,
            stage=stage,
            main_frame=self._main_frame_text,
            exit_message=None if diagnosis is None else diagnosis.text,
            faulty_rank=None if diagnosis is None else diagnosis.faulty_rank,
        )

    def _write_heartbeat(self) -> bool:
        """Write the next heartbeat; return False if the file system fails."""
        self._beat += 1
        try:
            file = open_lock_file(self._heartbeat_path(self._rank))
            try:
                os.write(file, self._own_heartbeat().encode())
            finally:
                os.close(file)  # a network file system may send the data, and fail, here
        except OSError as exc:
            self._log_write_failure(exc)
            return False
        return True

    def _log_write_failure(self, exc: OSError) -> None:
        if not self._write_failed:
            self._log(
                f"cannot write the heartbeat {self._heartbeat_path(self._rank)}: {exc.strerror}; other ranks may "
                "consider this one frozen"
            )
        self._write_failed = True

    def _observe_ranks(self, ranks: Iterable[int]) -> dict[int, Observation]:
        return {rank: self._observe_rank(rank) for rank in ranks}

    def _observe_rank(self, rank: int) -> Observation:
        heartbeat = self._read_heartbeat(rank)
        if heartbeat is None or heartbeat.exit_message is not None or heartbeat.machine_id != self._machine_id:
            return Observation(heartbeat=heartbeat)
        state = _process_state(heartbeat.pid, heartbeat.process_start_time)
        if state == PROCESS_GONE:
            heartbeat = self._read_heartbeat(rank)
        return Observation(heartbeat=heartbeat, process_state=state)

    def _read_heartbeat(self, rank: int) -> Heartbeat | None:
        try:
            heartbeat = decode_heartbeat(read_bytes(self._heartbeat_path(rank)))
        except OSError:
            return None
        if heartbeat is None or (heartbeat.attempt, heartbeat.rank) != (self._attempt, rank):
            return None
        return heartbeat

    def _heartbeat_path(self, rank: int) -> Path:
        return heartbeat_path(self._folder.parent, rank)

    def _log(self, text: str) -> None:
        """Append lines with UTC timestamps to the rank's log."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        with suppress(OSError):  # a full disk must not stop the watchdog
            os.write(self._log_file, "".join(f"{now} {line}\n" for line in text.splitlines()).encode())

    def _main_frame(self) -> str:
        frame = sys._current_frames().get(self._main_thread_id)
        return "" if frame is None else _format_frame(frame)

    def _stacks(self) -> str:
        """Return the stacks of all other threads, without source lines: reading them could hang as well."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines: list[str] = []
        for ident, innermost in sorted(sys._current_frames().items(), key=lambda item: item[0] != self._main_thread_id):
            if ident == threading.get_ident():
                continue
            lines.append(f"stack of thread {names.get(ident, ident)}, innermost frame last:")
            frames: list[str] = []
            frame: FrameType | None = innermost
            while frame is not None:
                frames.append(f"  {_format_frame(frame)}")
                frame = frame.f_back
            lines.extend(reversed(frames))
        return "\n".join(lines)


def _format_frame(frame: FrameType) -> str:
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"


def _read_machine_id() -> str:
    """Return a name that two processes share only if each would find the other under its pid."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _read_proc_stat(pid: int) -> tuple[str, str]:
    """Return state letter and start time of a process; empty without /proc or the process.

    Raises:
        OSError: the process may exist, but cannot be inspected (too many open files).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "", ""
    values = stat.rpartition(")")[2].split()  # the command may have any characters; values[0] is field 3 of proc(5)
    return values[0], values[19]


def _process_state(pid: int, start_time: str) -> str:
    """Return the state of the process on this machine with this pid and start time."""
    if not start_time:  # without /proc, only the pid is known
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return PROCESS_GONE
        except PermissionError:
            pass  # it exists, under another user
        return PROCESS_UNKNOWN
    try:
        state, current_start_time = _read_proc_stat(pid)
    except OSError:
        return PROCESS_UNKNOWN
    return PROCESS_GONE if current_start_time != start_time or state in "ZX" else state
