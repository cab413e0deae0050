"""The watchdog of a rank: a thread that ends the rank, with a reason, when the run hangs or another rank is lost.

A rank that dies, freezes or hangs leaves the others waiting in a collective for ever. So every rank has a thread that
writes a heartbeat to `<run>/alive/rank00003.json` every few seconds and looks at others' heartbeats: rank 0 at all,
the others at rank 0. Once something is wrong everybody looks at everybody. The thread ends the process with exit code
75 (start the run again) when

- the main thread has not called `mark` for the timeout: the stacks of all threads go to the rank's log, and the ranks
  are compared to name the likely cause;
- a rank's heartbeat has stood still for the timeout: it is frozen, or its machine is lost;
- a rank on this machine is gone without having left, or a rank has left with an error. The main thread first has a few
  beats to leave by itself.

The sentence that names the rank at fault goes to standard error, to the rank's log and into its own heartbeat, where
the others find it and say the same. What proves what is in `heartbeat.py`.

Time is counted in beats of this thread, so what stops the thread stops the count. The cost is one small write a beat
and rank, and about two small reads; `mark` stores a tuple.
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

from lt_trainer.errors import PeerError, RunDirError
from lt_trainer.heartbeat import ELSEWHERE, GONE, START, Observer, Record, Sight, Verdict, at, decode, failure

if TYPE_CHECKING:
    from lt_trainer.journal import RankLog

EXIT_REQUEUE = 75
ALIVE = "alive"
BEATS = 40
"""Beats of one timeout, unless that makes a beat shorter or longer than these."""
SHORTEST_S, LONGEST_S = 0.05, 5.0
LAST_WORDS_S = 5.0
"""How long a rank that ends may take to write what shows why."""
LOOKS = 3, 9
"""How often every rank is looked at to find a cause: at least, and until each was seen alive at most."""


def heartbeat_path(run: Path, rank: int) -> Path:
    """Where a rank's heartbeat lies in a run directory."""
    return run / ALIVE / f"rank{rank:05}.json"


class Watchdog:
    """Watches this rank's main thread and the other ranks; a context around training, entered by the main thread.

    Nothing is asked of the main thread before its first `mark`: a start may take its time.

    Args:
        run: the run directory, which all ranks see.
        rank: this rank.
        world: the number of ranks.
        attempt: a random name of this start of the run, the same on all ranks; heartbeats of others prove nothing.
        timeout_s: how long a rank may hang or be silent.
        log: this rank's log.
        beat_s: time between heartbeats, the same on all ranks; by default a fortieth of the timeout, up to 5 s.
        last_words: writes what shows why a run hangs and says what to read; "" where there is nothing.
        end: what ends the process, with the exit code.
    """

    def __init__(
        self,
        run: Path,
        *,
        rank: int,
        world: int,
        attempt: str,
        timeout_s: float,
        log: RankLog,
        beat_s: float | None = None,
        last_words: Callable[[], str] = lambda: "",
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._folder, self._logs, self._log_path = run / ALIVE, log.path.parent, log.path
        self._rank, self._attempt, self._end = rank, attempt, end
        self._last_words = last_words
        self._beat_s = min(max(timeout_s / BEATS, SHORTEST_S), LONGEST_S) if beat_s is None else beat_s
        self._limit = max(math.ceil(timeout_s / self._beat_s), 2)
        self._others = [other for other in range(world) if other != rank]
        self._watched = self._others if rank == 0 else [0]
        self._observer = self._observe(self._others)
        self._pid, self._host, self._machine = os.getpid(), socket.gethostname(), _machine()
        self._born = _stat(self._pid)[1]
        self._main = threading.get_ident()
        self._mark = self._first_mark = (START, -1, 0)
        self._where = ""
        self._left: Verdict | None = None
        self._explained: Verdict | None = None
        self._leaving = False
        self._beat = 0
        self._write_failed = False
        self._log_file = -1
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def mark(self, stage: str, step: int) -> None:
        """Say that the main thread goes on: it begins `stage` of `step`, or has done a part of it."""
        _, before, lap = self._mark
        self._mark = (stage, step, lap + (step < before))  # a new tuple every time: the thread compares identities

    def explain(self) -> str:
        """Say in a sentence who is gone, frozen or has left, or that all other ranks seem alive.

        For the main thread, when a collective has failed and it is about to leave with a `PeerError`. Looks at every
        rank for a few beats, at most for a quarter of the timeout.
        """
        self._leaving = True
        self.go_on()
        self._explained = self._survey(lambda: False).explain()
        self.go_on()
        if self._explained is None:
            return "all other ranks seem to be alive"
        return self._explained.text

    def __enter__(self) -> Watchdog:
        self._main = threading.get_ident()
        # A file of our own: the main thread may hang while it holds the lock of another.
        try:
            self._log_file = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as exc:
            raise RunDirError(
                f"cannot write {self._log_path}: {exc.strerror}; mend its permissions or its disk, then start again"
            ) from exc
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            self._unwritable(exc)
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._left is not None:
            pass  # the thread has judged already
        elif error is None:
            self._left = Verdict(text="", culprit=None)
        elif isinstance(error, PeerError) and self._explained is not None:
            self._left = self._explained
        else:
            text = failure(self._record(), f"{type(error).__name__}: {error}", self._log_path)
            self._left = Verdict(text=text, culprit=None if isinstance(error, PeerError) else self._rank)
        self._write()
        os.close(self._log_file)
        self._log_file = -1

    def _watch(self) -> None:
        """The thread: a beat, a look at others, a look at the main thread."""
        seen, idle = self._mark, 0
        while not self._stop.wait(self._beat_s):
            mark = self._mark
            idle = idle + 1 if mark is seen and mark is not self._first_mark else 0
            seen = mark
            self._where = self._main_frame() if 2 * idle >= self._limit else ""
            counts = self._write()
            verdict = None
            if not self._leaving:
                watched = self._others if self._observer.alarmed else self._watched
                verdict = self._observer.observe(self._sights(watched), counts=counts)
            if verdict is None and idle >= self._limit:
                verdict = self._stuck(seen)
                idle = 0
            elif verdict is not None:
                self._say(self._stacks())
            if verdict is not None and not self._stop.is_set():
                self._finish(verdict)
                return

    def _stuck(self, seen: tuple[str, int, int]) -> Verdict | None:
        """Dump the stacks and find out who is the cause; None when the main thread goes on meanwhile."""
        self._say(
            f"the main thread has not gone on for {self._limit * self._beat_s:g} s {at(self._record())}, at "
            f"{self._where}\n{self._stacks()}"
        )
        observer = self._survey(lambda: self._mark is not seen)
        if self._mark is not seen:
            self._say("the main thread goes on")
            return None
        return observer.stuck(self._record())

    def _survey(self, over: Callable[[], bool]) -> Observer:
        """Look at every other rank for some beats, or until `over`."""
        observer = self._observe(self._others)
        least, most = LOOKS
        for look in range(1, most + 1):
            observer.observe(self._sights(self._others))
            known = observer.cause()
            if over() or (look >= least and (observer.seen_alive or (known is not None and known.culprit is not None))):
                break
            if look < most and self._stop.wait(self._beat_s):
                break
            if threading.current_thread() is self._thread:
                self._write()  # who waits for others shows that it lives
        return observer

    def _finish(self, verdict: Verdict) -> None:
        """End the process. Every write here is unbuffered, so that nothing is left to flush."""
        self._left = verdict
        text = f"rank {self._rank} ends, as the run cannot go on: {verdict.text}"
        self._say(text)
        self._write()
        words = self._hear_last_words()
        if words:
            self._say(words)
            text = f"{text}; {words}"
        with suppress(OSError):  # nobody may be there to read it
            os.write(2, f"error: {text}\n".encode())
        self._end(EXIT_REQUEUE)

    def _hear_last_words(self) -> str:
        """What the engine has to show, from a thread of its own: it may hang just as the main thread does."""
        heard: list[str] = []

        def listen() -> None:
            try:
                heard.append(self._last_words())
            except Exception as exc:  # noqa: BLE001 - whatever a torch of another release raises, the rank must end
                heard.append(f"its last collectives could not be written: {type(exc).__name__}: {exc}")

        listener = threading.Thread(target=listen, name="last words", daemon=True)
        listener.start()
        listener.join(LAST_WORDS_S)
        return heard[0] if heard else ""

    def _observe(self, ranks: Iterable[int]) -> Observer:
        return Observer(ranks, limit=self._limit, beat_s=self._beat_s, logs=self._logs)

    def go_on(self) -> None:
        """Say that the main thread goes on with the stage that it is in."""
        stage, step, lap = self._mark
        self._mark = (stage, step, lap)  # also starts the watch where nothing was marked: who leaves must get done

    def _record(self) -> Record:
        stage, step, lap = self._mark
        left = self._left
        return Record(
            attempt=self._attempt,
            rank=self._rank,
            pid=self._pid,
            born=self._born,
            host=self._host,
            machine=self._machine,
            beat=self._beat,
            lap=lap,
            step=step,
            stage=stage,
            where=self._where,
            left=None if left is None else left.text,
            culprit=None if left is None else left.culprit,
        )

    def _write(self) -> bool:
        """Write the next heartbeat; False when the file system refuses."""
        self._beat += 1
        try:
            file = os.open(self._path(self._rank), os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                os.write(file, self._record().encode())
            finally:
                os.close(file)  # a network file system sends what was written, and may fail, here
        except OSError as exc:
            self._unwritable(exc)
            return False
        return True

    def _unwritable(self, exc: OSError) -> None:
        if not self._write_failed:
            self._say(
                f"cannot write the heartbeat {self._path(self._rank)}: {exc.strerror}; other ranks may take this one "
                "for frozen"
            )
        self._write_failed = True

    def _sights(self, ranks: Iterable[int]) -> dict[int, Sight]:
        return {rank: self._sight(rank) for rank in ranks}

    def _sight(self, rank: int) -> Sight:
        record = self._read(rank)
        if record is None or record.left is not None or record.machine != self._machine:
            return Sight(record=record)
        process = _process(record.pid, record.born)
        return Sight(record=self._read(rank) if process == GONE else record, process=process)

    def _read(self, rank: int) -> Record | None:
        try:
            record = decode(self._path(rank).read_bytes())
        except OSError:
            return None
        return record if record is not None and (record.attempt, record.rank) == (self._attempt, rank) else None

    def _path(self, rank: int) -> Path:
        return heartbeat_path(self._folder.parent, rank)

    def _say(self, text: str) -> None:
        """Append lines to the rank's log, each with the time in UTC as its other lines have it."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        with suppress(OSError):  # a full disk must not keep the watchdog from its work
            os.write(self._log_file, "".join(f"{now} {line}\n" for line in text.splitlines()).encode())

    def _main_frame(self) -> str:
        frame = sys._current_frames().get(self._main)
        return "" if frame is None else _place(frame)

    def _stacks(self) -> str:
        """The stacks of all threads but this one. No source lines: reading them could hang as well."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines: list[str] = []
        for ident, innermost in sorted(sys._current_frames().items(), key=lambda item: item[0] != self._main):
            if ident == threading.get_ident():
                continue
            lines.append(f"stack of thread {names.get(ident, ident)}, innermost frame last:")
            frames: list[str] = []
            frame: FrameType | None = innermost
            while frame is not None:
                frames.append(f"  {_place(frame)}")
                frame = frame.f_back
            lines.extend(reversed(frames))
        return "\n".join(lines)


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"


def _machine() -> str:
    """A name that two processes share only if each would find the other under its pid."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _stat(pid: int) -> tuple[str, str]:
    """State letter and start time of a process; both empty where the system has no /proc or not this process.

    Raises:
        OSError: the process may be there, but cannot be looked at (too many files are open).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "", ""
    values = stat.rpartition(")")[2].split()  # the command before it may hold anything; values[0] is field 3 of proc(5)
    return values[0], values[19]


def _process(pid: int, born: str) -> str:
    """What is known of the process on this machine that had this pid and start time."""
    if not born:  # no /proc when it started: the pid alone must do
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return GONE
        except PermissionError:
            pass  # it lives, under another user
        return ELSEWHERE
    try:
        state, found = _stat(pid)
    except OSError:
        return ELSEWHERE
    return GONE if found != born or state in "ZX" else state
