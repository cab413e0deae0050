"""When a run waits for its saves, and when it does not.

In the foreground a save is `Checkpoints.save` and nothing else. In the background (`checkpoint.background`) the ranks
agree on the folder, each copies its state into memory kept for that, and training goes on; a thread per rank writes the
copy, and rank 0's thread commits (`lt_ckpt.BackgroundSaver`). The threads never talk to other ranks but through the
folder. The main threads do at two places only: the loop's agreement at each step boundary carries along whether a save
has failed somewhere (`look` is local), and `finish` ends the save in flight on all ranks together, as a save in the
foreground ends: with the checkpoint, or with the same error for all. Before the next save, a stop, the end and a way
back there is a `finish`; so one save is in flight at most. A run that is left with an error lets the save in flight
come to its end, if it can.

Saves at a stop and at the end are made in the foreground: there is nothing to be done meanwhile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from lt_ckpt import BackgroundSaver, CheckpointError
from lt_ckpt.errors import GivenUpError
from lt_trainer.errors import PeerError, RecipeError
from lt_trainer.saving import Checkpoints, another_failed

if TYPE_CHECKING:
    from lt_ckpt import Meta
    from lt_data import StreamState
    from lt_trainer.engine import Engine

PAUSE_S = 0.2
"""How often the watchdog hears of a main thread that waits for a save."""
PATIENCE_S = 10.0
"""How long rank 0, when another rank is lost, waits for parts that were perhaps about to be finished."""


@dataclass(frozen=True, kw_only=True)
class _InFlight:
    """A save that was begun."""

    step: int
    tmp: Path


class Saver:
    """The saves of one run, on one rank; a context around training.

    Args:
        checkpoints: Where they go.
        engine: What is saved.
        saved: Hears of each checkpoint that was committed: its step and folder; on rank 0 at least.
        go_on: Called now and then while this waits for bytes that are being written.
        at_step: Called at each step boundary.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        engine: Engine,
        *,
        saved: Callable[[int, Path], None],
        go_on: Callable[[], None],
        at_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._checkpoints, self._engine, self._saved, self._go_on = checkpoints, engine, saved, go_on
        self._at_step = at_step
        background = checkpoints.recipe.checkpoint.background
        self._writer = BackgroundSaver(engine.host_memory) if background else None
        self._in_flight: _InFlight | None = None
        self._committed: tuple[int, Path] | None = None
        """By the thread of rank 0, and not told yet."""

    def reserve(self) -> None:
        """Take the memory that background saves need, before the first step.

        Raises:
            RecipeError: this machine has not so much.
        """
        if self._writer is None:
            return
        need, free, why = self._engine.state_bytes(), _available_bytes(), ""
        try:
            if need <= free:
                self._writer.reserve(self._engine.state().shards)
                return
        except MemoryError as exc:
            why = f": {exc}"
        raise RecipeError(
            f"a copy of this rank's state takes {need / 2**30:.2f} GiB of the host's memory, of which "
            f"{free / 2**30:.2f} GiB can be had{why}",
            values={"checkpoint.background": True},
            remedy="set checkpoint.background to false, or use a machine with more memory",
        )

    def save(self, position: StreamState, *, wait: bool) -> None:
        """Save the engine's state; with `wait` the checkpoint is there when this returns.

        Raises:
            CheckpointError: this save, or the one in flight, could not be written by some rank; every rank raises.
        """
        self.finish()
        if self._writer is None or wait:
            self._saved(position.step, self._checkpoints.save(self._engine, position))
            return
        tmp = self._checkpoints.begin(self._engine, position.step)
        snapshot, first = self._engine.state(), self._engine.topology.rank == 0
        meta = self._checkpoints.meta(self._engine, position, snapshot)
        then = partial(self._commit, tmp, meta) if first else None
        rank, shards = self._engine.topology.rank, snapshot.shards
        self._writer.start(tmp, rank=rank, shards=shards, layout=snapshot.layout, then=then)
        self._in_flight = _InFlight(step=position.step, tmp=tmp)

    def _commit(self, tmp: Path, meta: Meta, given_up: Callable[[], bool]) -> None:
        """In rank 0's thread."""
        path = self._checkpoints.commit(tmp, meta, world=self._engine.topology.world, given_up=given_up)
        self._committed = (meta.step, path)
        self._checkpoints.prune()

    def look(self) -> bool:
        """Whether the save in flight has failed on this rank, as far as is known; one that was committed is told."""
        self._tell()
        self._at_step()
        return self._writer is not None and self._writer.failed

    def _tell(self) -> None:
        committed, self._committed = self._committed, None
        if committed is not None:
            self._saved(*committed)

    def finish(self, *, give_up: bool = False) -> None:
        """Wait for the save in flight on all ranks, if there is one; with `give_up` end it, as it cannot succeed.

        Raises:
            CheckpointError: it has failed on some rank; every rank raises.
        """
        if self._in_flight is None:
            return
        assert self._writer is not None
        tmp, control, first = self._in_flight.tmp, self._engine.control, self._engine.topology.rank == 0
        if give_up:
            self._writer.cancel()
        self._wait_part(self._writer)
        part_failed = control.all_max(int(self._writer.failed))
        if part_failed:
            self._writer.cancel()
        failure = self._end(self._writer)
        if first and failure is not None:
            self._checkpoints.discard(tmp)
        own = None if isinstance(failure, GivenUpError) else failure
        word = control.broadcast("" if own is None else str(own) or type(own).__name__)  # rank 0's, for all
        if own is not None:
            raise own
        if word:
            raise CheckpointError(word)
        if part_failed:
            raise another_failed(tmp)

    def _wait_part(self, writer: BackgroundSaver) -> None:
        seen = -1
        while not writer.wait_part(PAUSE_S):
            if writer.progress != seen:
                seen = writer.progress
                self._go_on()

    def _end(self, writer: BackgroundSaver) -> BaseException | None:
        """Wait for the thread; returns what it failed with."""
        failure = None
        try:
            writer.wait()
        except BaseException as exc:  # noqa: BLE001 - raised by the caller, when the other ranks know
            failure = exc
        self._in_flight = None
        self._tell()
        return failure

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._in_flight is None or self._writer is None:
            return
        assert error is not None, "a run that ends well has finished its saves"
        self._wait_part(self._writer)
        patience_s = self._checkpoints.recipe.guard.timeout_s / 2
        until = time.monotonic() + (min(PATIENCE_S, patience_s) if isinstance(error, PeerError) else patience_s)
        while not self._ended(self._writer, error):
            if time.monotonic() > until:
                self._writer.cancel()
        self._in_flight = None
        self._tell()

    def _ended(self, writer: BackgroundSaver, error: BaseException) -> bool:
        try:
            return writer.wait(PAUSE_S)
        except BaseException as exc:  # noqa: BLE001 - the error that ends the run goes on, with this beside it
            assert self._in_flight is not None
            error.add_note(f"the save of step {self._in_flight.step}, which was in flight, was not finished: {exc}")
            return True


def _available_bytes() -> int:
    """Memory that this machine can still give, as far as it tells; else all that it has."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            table = dict(line.split(":") for line in lines)
        return int(table["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
