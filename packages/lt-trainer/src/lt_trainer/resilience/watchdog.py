"""Watchdog of a rank: ends it if the run hangs or another rank has failed.

A rank that exits, freezes or hangs leaves the others waiting in a collective forever. So each rank has

- a thread that ends it with exit code 75 (rerun to resume) once the main thread has not called `mark` for the timeout,
  or a few seconds after another rank has reported an error. Before, the ranks report where they are (`rank_report`);
  the message that names the cause goes to standard error and to the rank's log;
- for a main thread that hangs and holds Python's lock, so that no other thread runs: `faulthandler` writes all stacks
  to the log at the timeout, and `ALARM_MARGIN_S` later the kernel's timer ends the process by SIGALRM, whose action is
  the default. `lt train torchrun` and lt-launch take that end as 75. A process that was stopped for longer ends
  likewise when it is continued.

`mark` re-arms these once per poll. Cost: a system call per poll to see whether a rank is in trouble; `mark` stores a
tuple and the time.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from lt_trainer.constants import EXIT_REQUEUE
from lt_trainer.errors import PeerError
from lt_trainer.resilience import rank_report
from lt_trainer.resilience.rank_report import RankReport, pid_namespace

if TYPE_CHECKING:
    from lt_trainer.run_directory.jsonl import RankLog

POLLS_PER_TIMEOUT, MIN_POLL_S, MAX_POLL_S = 40, 0.05, 5.0
MAX_WAIT_S = 15.0
"""Time to wait for the reports of all ranks, at most; half of a shorter timeout. Ranks that are seen to be gone are not
waited for."""
GRACE_POLLS = 6
"""Polls for which a rank may still exit by itself after another has failed."""
ALARM_MARGIN_S = 30.0
"""Time from the timeout to the kernel's timer: longer than the thread takes to end the rank."""
DEBUG_DUMP_TIMEOUT_S = 5.0
"""Time for the engine's debug dump before the process exits."""


class Watchdog:
    """Watchdog of this rank's main thread and of other ranks' errors; a context.

    Before the first `mark` the main thread is not watched: a start may take long.

    Args:
        run: run directory, shared by all ranks.
        rank: this rank.
        world_size: number of ranks.
        attempt: random name of this start of the run, equal on all ranks.
        timeout_s: time that the main thread may take between two marks.
        log: this rank's log.
        dump_debug_info: dumps hang diagnostics and returns a description of what to read, or "".
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
        dump_debug_info: Callable[[], str] = lambda: "",
    ) -> None:
        self._alive = run / rank_report.ALIVE_FOLDER
        self._trouble = self._alive / f"trouble-{attempt}"
        self._rank, self._world_size, self._log_path = rank, world_size, log.path
        self._timeout_s, self._dump_debug_info = timeout_s, dump_debug_info
        self._poll_s = min(max(timeout_s / POLLS_PER_TIMEOUT, MIN_POLL_S), MAX_POLL_S)
        self._mark = (rank_report.STAGES[0], -1)
        self._marked_at = self._armed_at = 0.0
        """`time.monotonic`; 0 before the first mark."""
        self._is_leaving = False
        self._log_file = -1
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def mark(self, stage: str, step: int) -> None:
        """Record that the main thread begins `stage` of `step`, or has completed a part of it."""
        self._mark, self._marked_at = (stage, step), time.monotonic()
        if self._marked_at - self._armed_at > self._poll_s:
            self._armed_at = self._marked_at
            faulthandler.dump_traceback_later(self._timeout_s, file=self._log_file)
            signal.setitimer(signal.ITIMER_REAL, self._timeout_s + ALARM_MARGIN_S)

    def heartbeat(self) -> None:
        """Record that the main thread makes progress in its current stage."""
        self.mark(*self._mark)

    def diagnose(self) -> str:
        """Return a sentence that says which rank failed, is silent or behind.

        Called by the main thread after a failed collective, before it exits with a `PeerError`. Waits for the reports
        of the other ranks and dumps the engine's diagnostics: the other rank may have exited because of a hang.
        """
        self._is_leaving = True
        self.heartbeat()
        text = self._find_cause()
        self._log(self._dump())
        self.heartbeat()
        return text

    def __enter__(self) -> Watchdog:
        # A separate file object: the main thread may hang while it holds the lock of the log's.
        self._log_file = os.open(self._log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._report(self._alive)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._over.set()
        self._thread.join()
        if error is not None and not isinstance(error, PeerError):
            self._report(self._trouble, " ".join(f"{type(error).__name__}: {error}".split()))
        os.close(self._log_file)

    def _run(self) -> None:
        """Run the thread."""
        polls_after_failure = 0
        while not self._over.wait(self._poll_s):
            if self._trouble.is_dir() and not self._is_leaving:
                self._report(self._trouble)
                polls_after_failure += any(report.error for report in rank_report.read_reports(self._trouble).values())
            if self._marked_at and time.monotonic() - self._marked_at > self._timeout_s:
                self._log(f"the main thread has made no progress for {self._timeout_s:g} s {self._place().place}")
            elif polls_after_failure > GRACE_POLLS:
                faulthandler.dump_traceback(file=self._log_file)
            else:
                continue
            self._exit()
            break

    def _exit(self) -> None:
        """End the process. All writes here are unbuffered, so nothing is left to flush."""
        text = f"rank {self._rank} exits: {self._find_cause()}"
        if not self._over.is_set():
            self._log(text)
            dump = self._dump()
            self._log(dump)
            with suppress(OSError):  # standard error may be closed
                os.write(2, f"error: {text}{'; ' if dump else ''}{dump}\n".encode())
            os._exit(EXIT_REQUEUE)

    def _find_cause(self) -> str:
        """Report, wait for the reports of the other ranks that are alive, and return the cause."""
        self._report(self._trouble)
        starts = rank_report.read_reports(self._alive)
        deadline = time.monotonic() + min(self._timeout_s / 2, MAX_WAIT_S)
        while True:
            # Before the reports are read: a rank may report and end in between.
            gone = {rank for rank, start in starts.items() if rank_report.is_gone(start)}
            reports = {self._rank: self._place()} | rank_report.read_reports(self._trouble)
            is_known = any(report.error for report in reports.values())
            if is_known or time.monotonic() > deadline or gone.union(reports).issuperset(range(self._world_size)):
                return rank_report.find_cause(reports, starts, self._world_size, self._log_path.parent)
            time.sleep(self._poll_s)

    def _dump(self) -> str:
        """Dump the engine's diagnostics in a thread, since that may hang like the main thread, or fail."""
        result: list[str] = []
        thread = threading.Thread(target=lambda: result.append(self._dump_debug_info()), name="debug dump", daemon=True)
        thread.start()
        thread.join(DEBUG_DUMP_TIMEOUT_S)
        return result[0] if result else ""

    def _place(self, error: str = "") -> RankReport:
        stage, step = self._mark
        return RankReport(self._rank, os.getpid(), socket.gethostname(), step, stage, error, pid_namespace())

    def _report(self, folder: Path, error: str = "") -> None:
        with suppress(OSError):  # a full disk must not stop the watchdog; the others say that this rank is silent
            rank_report.write_report(folder, self._place(error))

    def _log(self, text: str) -> None:
        """Append lines with UTC timestamps to the rank's log."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        with suppress(OSError):
            os.write(self._log_file, "".join(f"{now} {line}\n" for line in text.splitlines()).encode())
