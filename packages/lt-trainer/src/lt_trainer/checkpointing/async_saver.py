"""Checkpoint saver: blocking and asynchronous saves of a run.

A blocking save is `CheckpointManager.save`. In an asynchronous one (`checkpoint.async_save`) the ranks agree on the
folder, each copies its state into reserved host memory, and training continues; a thread per rank writes the copy, and
rank 0's thread commits (`lt_ckpt.AsyncRankSaver`). The threads communicate only through the folder. The main threads
synchronize at two places: the stop synchronization of each step includes whether a save has failed on any rank
(`has_failed` is local), and `finish` ends the save in flight on all ranks like a blocking one: with the checkpoint, or
with the same error on all. `finish` precedes the next save, a stop, the end and a rollback, so at most one save is in
flight. If an error ends the run, the save in flight is completed if possible.

Saves at a stop and at the end are blocking.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from lt_ckpt import AsyncRankSaver, CheckpointError
from lt_ckpt.errors import SaveCancelledError
from lt_trainer.checkpointing.checkpoint_manager import CheckpointManager, peer_write_error
from lt_trainer.constants import GIB
from lt_trainer.errors import PeerError, RecipeError

if TYPE_CHECKING:
    from lt_ckpt import CheckpointMetadata
    from lt_data import StreamState
    from lt_trainer.engine import Engine

POLL_INTERVAL_S = 0.2
"""Interval of watchdog heartbeats while the main thread waits for a save."""
PEER_LOST_TIMEOUT_S = 10.0
"""Time that rank 0, after losing another rank, waits for parts that may be almost complete."""


@dataclass(frozen=True, kw_only=True)
class _InFlight:
    """Save in flight."""

    step: int
    tmp: Path


class CheckpointSaver:
    """Saves of one run on one rank; a context around training.

    Args:
        checkpoints: Checkpoints of the run.
        engine: Engine to save.
        on_saved: Called with step and folder of each committed checkpoint, at least on rank 0.
        heartbeat: Called regularly while waiting for bytes to be written.
        on_step: Called at each step boundary.
    """

    def __init__(
        self,
        checkpoints: CheckpointManager,
        engine: Engine,
        *,
        on_saved: Callable[[int, Path], None],
        heartbeat: Callable[[], None],
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._checkpoints, self._engine, self._on_saved, self._heartbeat = checkpoints, engine, on_saved, heartbeat
        self._on_step = on_step
        is_async = checkpoints.recipe.checkpoint.async_save
        self._writer = AsyncRankSaver(engine.allocate_host_memory) if is_async else None
        self._in_flight: _InFlight | None = None
        self._committed: tuple[int, Path] | None = None
        """Committed by the thread of rank 0, not reported yet."""

    def reserve_memory(self) -> None:
        """Reserve the host memory for asynchronous saves, before the first step; collective.

        Every rank reads the available memory before any reserves, and the copies of all ranks of a node must fit.

        Raises:
            RecipeError: not enough memory on a node; all ranks raise.
        """
        if self._writer is None:
            return
        control = self._engine.control
        needs = control.all_gather([os.uname().nodename, self._engine.state_bytes(), _available_bytes()])
        problem = memory_shortage([(node, required, available) for node, required, available in needs])
        if not problem:
            try:
                self._writer.reserve(self._engine.state().shards)
            except MemoryError as exc:
                problem = f"a copy of this rank's state cannot be allocated: {exc}"
        problem = next((text for text in control.all_gather(problem) if text), "")
        if problem:
            raise RecipeError(
                problem,
                values={"checkpoint.async_save": True},
                remedy="set checkpoint.async_save to false, or use a machine with more memory",
            )

    def save(self, position: StreamState, *, wait: bool) -> None:
        """Save the engine state; with `wait`, block until the checkpoint is committed.

        Raises:
            CheckpointError: this save, or the one in flight, failed on a rank; all ranks raise.
        """
        self.finish()
        if self._writer is None or wait:
            self._on_saved(position.step, self._checkpoints.save(self._engine, position))
            return
        tmp = self._checkpoints.begin_save(self._engine, position.step)
        snapshot, rank = self._engine.state(), self._engine.topology.rank
        metadata = self._checkpoints.metadata(self._engine, position, snapshot)
        commit = partial(self._commit, tmp, metadata) if rank == 0 else None
        self._writer.start(tmp, rank=rank, shards=snapshot.shards, writer=snapshot.file_layout, on_written=commit)
        self._in_flight = _InFlight(step=position.step, tmp=tmp)

    def _commit(self, tmp: Path, metadata: CheckpointMetadata, is_cancelled: Callable[[], bool]) -> None:
        """Commit and prune, in rank 0's thread."""
        world_size = self._engine.topology.world_size
        path = self._checkpoints.commit(tmp, metadata, world_size=world_size, is_cancelled=is_cancelled)
        self._committed = (metadata.step, path)
        self._checkpoints.prune()

    def has_failed(self) -> bool:
        """Return True if the save in flight is known to have failed on this rank; report a committed one."""
        self._report_committed()
        self._on_step()
        return self._writer is not None and self._writer.has_failed

    def _report_committed(self) -> None:
        committed, self._committed = self._committed, None
        if committed is not None:
            self._on_saved(*committed)

    def finish(self, *, cancel: bool = False) -> None:
        """Wait for the save in flight on all ranks; with `cancel`, end it, since it cannot succeed.

        Raises:
            CheckpointError: it failed on a rank; all ranks raise.
        """
        if self._in_flight is None:
            return
        assert self._writer is not None
        tmp, control, is_rank0 = self._in_flight.tmp, self._engine.control, self._engine.topology.rank == 0
        if cancel:
            self._writer.cancel()
        self._wait_part(self._writer)
        has_failed = control.all_reduce_max(int(self._writer.has_failed))
        if has_failed:
            self._writer.cancel()
        failure = self._join(self._writer)
        if is_rank0 and failure is not None:
            self._checkpoints.discard(tmp)
        error = None if isinstance(failure, SaveCancelledError) else failure
        rank0_error = control.broadcast("" if error is None else str(error) or type(error).__name__)
        if error is not None:
            raise error
        if rank0_error:
            raise CheckpointError(rank0_error)
        if has_failed:
            raise peer_write_error(tmp)

    def _wait_part(self, writer: AsyncRankSaver) -> None:
        previous = -1
        while not writer.wait_until_written(POLL_INTERVAL_S):
            if writer.progress_count != previous:
                previous = writer.progress_count
                self._heartbeat()

    def _join(self, writer: AsyncRankSaver) -> BaseException | None:
        """Wait for the thread; return its exception."""
        failure = None
        try:
            writer.wait()
        except BaseException as exc:  # noqa: BLE001 - raised by the caller, on all ranks
            failure = exc
        self._in_flight = None
        self._report_committed()
        return failure

    def __enter__(self) -> CheckpointSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._in_flight is None or self._writer is None:
            return
        assert error is not None, "a run without an error has finished its saves"
        self._wait_part(self._writer)
        timeout_s = self._checkpoints.recipe.fault_tolerance.hang_timeout_s / 2
        if isinstance(error, PeerError):
            timeout_s = min(PEER_LOST_TIMEOUT_S, timeout_s)
        deadline = time.monotonic() + timeout_s
        while not self._poll_done(self._writer, error):
            if time.monotonic() > deadline:
                self._writer.cancel()
        self._in_flight = None
        self._report_committed()

    def _poll_done(self, writer: AsyncRankSaver, error: BaseException) -> bool:
        try:
            return writer.wait(POLL_INTERVAL_S)
        except BaseException as exc:  # noqa: BLE001 - becomes a note of the error that ends the run
            assert self._in_flight is not None
            error.add_note(f"the save in flight, of step {self._in_flight.step}, failed: {exc}")
            return True


def memory_shortage(needs: Sequence[tuple[str, int, int]]) -> str:
    """Return the first node's lack of memory for the copies of all its ranks; "" if there is none.

    Args:
        needs: by rank: name of its node, bytes of its copy, bytes available on the node.
    """
    for node in dict.fromkeys(name for name, _, _ in needs):
        copies = [required for name, required, _ in needs if name == node]
        available = min(free for name, _, free in needs if name == node)
        if sum(copies) > available:
            return (
                f"a copy of the state of {len(copies)} rank(s) needs {sum(copies) / GIB:.2f} GiB of host memory on "
                f"{node}, {available / GIB:.2f} GiB are available"
            )
    return ""


def _available_bytes() -> int:
    """Return the available memory of this machine if known, otherwise its total memory."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            table = dict(line.split(":") for line in lines)
        return int(table["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
