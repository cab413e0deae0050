"""All processes of one node, from their start to the node's exit code: one loop over pipes, signals and time.

How it ends the processes:

    a stop signal, or an order to stop      goes on to all of them, once; `grace_s` later SIGKILL
    one has failed, here or elsewhere       the others may find out themselves (SETTLE_S), then SIGTERM, and SIGKILL
                                            after FAILED_S: there is nothing left that a long save could be made of
    one has left with 75 unasked            the others have `grace_s` to do the same, then SIGKILL
    orders have stopped coming              SIGTERM at once, SIGKILL after `lost_grace_s` (with --control)

Everything that happens is one record: appended to the attempt's folder and, with --control, sent to whoever gave the
orders. Cost: idle but for one stat() and one record a second.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from .command import Start, argv_of, environment_of, torchrun
from .outbox import Outbox
from .policy import Place, Table, completed, events_size, newest_step, record_file
from .ranks import Rank
from .spawned import codes_of_torchrun

REQUEUE = 75
STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP") if hasattr(signal, name)
)
SETTLE_S, FAILED_S, BEAT_S = 3.0, 10.0, 1.0


class Node:
    """The agent of one node.

    Args:
        spec: what to run.
        place: where records go.
        start: which processes are ours, and where they meet.
        attempt: the number of the attempt.
        outbox: takes the lines of rank 0 (as they are), or records and lines as JSON with `control`.
        control: the descriptor that orders come from; None for none.
    """

    def __init__(
        self, spec: Table, place: Place, start: Start, attempt: int, outbox: Outbox, control: int | None = None
    ) -> None:
        self.spec, self.start, self.folder, self.outbox = spec, start, place.attempt(attempt), outbox
        self.place, self.attempt, self.control = place, attempt, control
        self.ranks: list[Rank] = []
        self.alone = False
        """Whether whoever gave the orders is gone: nobody reads what is written any more."""
        self.host = socket.gethostname()
        self.run_dir = _inside(spec.get("cwd", ""), spec.get("run_dir", ""))
        self.events_before = events_size(self.run_dir) if self.run_dir else 0
        self._kill_at: float | None = None
        self._term_at: float | None = None
        self._asked = self._failed = self._unstarted = False
        self._first: int | None = None
        self._heard = time.monotonic()
        self._orders = b""
        self._records: int | None = None

    # --- records

    def note(self, event: str, **values: Any) -> None:
        """Keep a record, and send it on."""
        record = {"time": time.time(), "event": event, "node": self.start.node, "host": self.host, **values}
        data = json.dumps(record).encode() + b"\n"
        if self._records is not None:
            with suppress(OSError):
                os.write(self._records, data)
        if self.control is not None:
            self.outbox.put(data, may_drop=False)

    def show(self, rank: int, lines: bytes) -> None:
        """Lines of a process for people: rank 0's alone, the others' are in their logs."""
        if rank != 0 and self.spec.get("show") != "all":
            return
        if self.control is None:
            self.outbox.put(lines, may_drop=True)
            return
        text = lines.decode("utf-8", "replace")
        self.outbox.put(json.dumps({"lines": text, "rank": rank}).encode() + b"\n", may_drop=True)

    # --- the whole of it

    def run(self) -> int:
        """Start the processes and stay until the last has ended; the node's exit code."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = record_file(self.folder, self.start.node)
        self._records = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        step = newest_step(self.run_dir) if self.run_dir else -1
        wake = _Signals()
        try:
            self.note("began", pid=os.getpid(), ranks=list(self.start.ranks), step=step, attempt=self.attempt)
            self._spawn()
            self.outbox.start()
            self._loop(wake)
        finally:
            for rank in self.ranks:  # an error of ours must not leave processes behind
                rank.send(signal.SIGKILL)
                rank.finish(None)
            wake.close()
        code = self.code()
        done = bool(self.run_dir) and completed(self.run_dir, self.events_before)
        step = newest_step(self.run_dir) if self.run_dir else -1
        self.note("left", code=code, asked=self._asked, step=step, completed=done)
        os.close(self._records)
        return code

    def _spawn(self) -> None:
        for rank in self.start.ranks[:1] if torchrun(self.spec) else self.start.ranks:
            argv = argv_of(self.spec, self.start, self.place.stage, self.place.index)
            env = environment_of(self.spec, self.start, rank, self.place.index, self.attempt, self.folder)
            try:
                started = Rank(rank, argv, env, self.spec.get("cwd", ""), self.folder)
            except OSError as exc:
                text = f"cannot run {argv[0]!r} in {self.spec.get('cwd') or os.getcwd()}: {exc.strerror}"
                self.note("ended", rank=rank, code=127, told=False, tail=[text])
                self._unstarted = self._failed = True
                self._claim(rank, 127)
                self._settle()
                continue
            self.ranks.append(started)
            self.note("started", rank=rank, pid=started.pid)

    def code(self) -> int:
        """The node's own exit code: the first failure's, else 75 when one left so, else 0."""
        codes = [rank.code or 0 for rank in self.ranks]
        if self._unstarted:
            return 127
        if self._first is not None:
            return self._first if self._first > 0 else 128 - self._first
        if REQUEUE in codes:
            return REQUEUE
        killed = [code for code in codes if code]
        return 0 if not killed else killed[0] if killed[0] > 0 else 128 - killed[0]

    # --- the loop

    def _loop(self, wake: _Signals) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(wake.descriptor, selectors.EVENT_READ, self._on_wake(wake))
            for rank in self.ranks:
                selector.register(rank.output, selectors.EVENT_READ, self._on_output(selector, rank))
            if self.control is not None:
                os.set_blocking(self.control, False)
                selector.register(self.control, selectors.EVENT_READ, self._on_orders(selector, self.control))
            beat = time.monotonic()
            while not all(rank.ended for rank in self.ranks):
                for key, _ in selector.select(timeout=0.2):
                    key.data()
                self._bury()
                now = time.monotonic()
                if now - beat >= BEAT_S:
                    beat = now
                    self._beat(now)
                self._due(now)
        for rank in self.ranks:
            rank.read(self.show)
            rank.finish(self.show)

    def _on_output(self, selector: selectors.BaseSelector, rank: Rank) -> Callable[[], None]:
        descriptor = rank.output

        def ready() -> None:
            rank.read(self.show)
            if not rank.open:
                selector.unregister(descriptor)

        return ready

    def _on_wake(self, wake: _Signals) -> Callable[[], None]:
        def ready() -> None:
            for number in wake.take():
                if number in STOP_SIGNALS:
                    self.stop(number)

        return ready

    def _bury(self) -> None:
        for rank in self.ranks:
            if rank.bury():
                rank.read(self.show)
                self._ended(rank)

    def _ended(self, ended: Rank) -> None:
        number, code = ended.rank, ended.code or 0
        if torchrun(self.spec):
            number, ended.code = codes_of_torchrun(self.folder, self.start.node, number, code, ended.last_lines())
            code = ended.code
        failed = not ended.told and code not in (0, REQUEUE)
        self.note("ended", rank=number, code=code, told=ended.told, tail=ended.last_lines() if code else [])
        if failed and self._first is None:
            self._first = code
            self._claim(number, code)
        if failed:
            self._failed = True
            self._settle()
        elif code == REQUEUE and not self._asked:
            self._kill_by(time.monotonic() + float(self.spec["grace_s"]))

    def _claim(self, rank: int, code: int) -> None:
        """Say that this was the first failure, if nobody else has; the file's maker is who came first."""
        record = {"rank": rank, "code": code, "host": self.host, "node": self.start.node, "time": time.time()}
        with suppress(OSError), open(self.folder / "first.json", "x", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _beat(self, now: float) -> None:
        if self.control is not None:
            self.outbox.put(b'{"beat": 1}\n', may_drop=True)
            patience = float(self.spec.get("link_timeout_s") or 0)
            if patience and now - self._heard > patience:
                self._lost(f"no order came for {now - self._heard:.0f} s")
        if not self._failed and (self.folder / "first.json").exists():
            self._failed = True
            self._settle()

    def _due(self, now: float) -> None:
        if self._term_at is not None and now >= self._term_at:
            self._term_at = None
            for rank in self.ranks:
                rank.send(signal.SIGTERM)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            left = [rank.rank for rank in self.ranks if not rank.ended]
            self.note("killed", ranks=left)
            for rank in self.ranks:
                rank.send(signal.SIGKILL)

    def _kill_by(self, when: float) -> None:
        """SIGKILL at that time, or earlier if that was decided before."""
        self._kill_at = when if self._kill_at is None else min(when, self._kill_at)

    def _settle(self) -> None:
        now = time.monotonic()
        settle_s = float(self.spec.get("settle_s", SETTLE_S))
        if not self._asked and self._term_at is None:
            self._term_at = now + settle_s
        self._kill_by(now + settle_s + float(self.spec.get("failed_s", FAILED_S)))

    # --- orders

    def stop(self, number: int) -> None:
        """Hand a stop signal on, the first one only: a second would cut short what the first began."""
        if self._asked:
            return
        self._asked = True
        self.note("signal", number=int(number), name=signal.Signals(number).name)
        for rank in self.ranks:
            rank.send(number)
        self._kill_by(time.monotonic() + float(self.spec["grace_s"]))

    def _lost(self, why: str) -> None:
        if self.control is None:
            return
        self.control = None
        self._asked = self.alone = True
        self.note("lost", reason=why)
        for rank in self.ranks:
            rank.send(signal.SIGTERM)
        self._kill_by(time.monotonic() + float(self.spec.get("lost_grace_s", 3.0)))

    def _on_orders(self, selector: selectors.BaseSelector, descriptor: int) -> Callable[[], None]:
        def ready() -> None:
            try:
                data = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                selector.unregister(descriptor)
                self._lost("whoever started this is gone")
                return
            self._heard = time.monotonic()
            *rows, self._orders = (self._orders + data).split(b"\n")
            for row in rows:
                self._obey(json.loads(row))

        return ready

    def _obey(self, order: dict[str, Any]) -> None:
        if "signal" in order:
            self.stop(signal.Signals[order["signal"]])
        if order.get("failed"):
            self._failed = True
            self._settle()
        if order.get("kill"):
            self._kill_by(time.monotonic())


class _Signals:
    """Stop signals and SIGCHLD as bytes in a pipe; given back when closed."""

    def __init__(self) -> None:
        self.descriptor, self._end = os.pipe()
        for descriptor in (self.descriptor, self._end):
            os.set_blocking(descriptor, False)
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # under nohup
        numbers = [number for number in (*STOP_SIGNALS, signal.SIGCHLD) if not (ignored and number == signal.SIGHUP)]
        self._before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        self._wakeup = signal.set_wakeup_fd(self._end, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # held back by who started this, until it can take them

    def take(self) -> list[int]:
        """The signals since the last call."""
        try:
            return list(os.read(self.descriptor, 4096))
        except BlockingIOError:
            return []

    def close(self) -> None:
        """Put back what was there."""
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self.descriptor)
        os.close(self._end)


def _inside(cwd: str, path: str) -> str:
    return str(Path(cwd) / path) if path else ""
