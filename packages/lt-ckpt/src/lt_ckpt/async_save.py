"""Asynchronous saving: the state is copied into reserved host memory, and a thread writes the copy.

`AsyncRankSaver.start` returns once the copy is made; from then on the caller may change its tensors. The thread does
what `lt_ckpt.save` does in the foreground: it writes this rank's files and its manifest, then calls the caller's
`on_written`, which on rank 0 is the commit. Ranks still communicate only through the shared folder. A killed process
leaves the old checkpoints and an unfinished folder that no reader opens.

Failures are never lost: the next call of `poll`, `wait` or `start` raises them. One save is in flight at a time.

A thread rather than a process: it spends its time in copying, hashing and writing, which release the interpreter lock,
and it needs no second copy of the state in shared memory.

The way of a tensor to the disk, and what each hop adds; none only forwards:

    CheckpointSaver.save (lt-trainer)   whether to wait; all ranks end a save alike
    AsyncRankSaver.start                the copy, after which training goes on; the thread
    write_rank_files                    the rank's manifest, after its files; `failed-` for rank 0
    RankFileWriter.write                the files: one per group, or those of NxD
    write_safetensors                   header, order and a hash per slice; fsync

A blocking save leaves out the second; `CheckpointManager.save` calls `write_rank_files` itself.

Cost: memory for this rank's slices, allocated once; `start` takes as long as copying them.
"""

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np

from lt_ckpt.errors import SaveCancelledError
from lt_ckpt.save import RankFileWriter, write_rank_files
from lt_ckpt.shards import Shard

ALIGN = 64
"""Alignment of each copied shard: enough for every dtype and for the widest vector instructions."""

OnWritten = Callable[[Callable[[], bool]], None]
"""Callback after the rank's files are written; its argument returns True once the save is cancelled."""


def allocate_host_memory(n_bytes: int) -> np.ndarray:
    """Allocate aligned memory with all pages touched, so that the first copy is as fast as the next."""
    memory = np.empty(n_bytes + ALIGN, np.uint8)
    memory[::4096] = 0
    skip = -memory.ctypes.data % ALIGN
    return memory[skip : skip + n_bytes]


def _buffer_offsets(shards: Iterable[Shard]) -> list[int]:
    """Return each shard's offset in the copy buffer, followed by the buffer's size."""
    return [*accumulate((-(-shard.n_bytes // ALIGN) * ALIGN for shard in shards), initial=0)]


class AsyncRankSaver:
    """Asynchronous saver of one rank's files, one save at a time.

    Args:
        allocate: Allocates the copy buffer, one-dimensional uint8. A device may copy faster into memory of its own
            kind.
    """

    def __init__(self, allocate: Callable[[int], np.ndarray] = allocate_host_memory) -> None:
        self._allocate = allocate
        self._memory = np.empty(0, np.uint8)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._cancelled = False
        self._written = threading.Event()
        self.progress_count = 0
        """Increases while the rank's files are written."""

    def reserve(self, shards: Iterable[Shard]) -> int:
        """Allocate the copy buffer for such shards unless it is large enough; return its bytes."""
        assert self._thread is None, "a save is in flight"
        n_bytes = _buffer_offsets(shards)[-1]
        if self._memory.size < n_bytes:
            self._memory = np.empty(0, np.uint8)  # never both at once
            self._memory = self._allocate(n_bytes)
        return n_bytes

    def start(
        self,
        tmp: str | os.PathLike[str],
        *,
        rank: int,
        shards: Iterable[Shard],
        writer: RankFileWriter | None = None,
        on_written: OnWritten | None = None,
    ) -> None:
        """Copy the shards and write them in the background as `write_rank_files` does.

        Waits for the previous save first.

        Args:
            tmp: What `begin_save` returned.
            rank: This rank.
            shards: Slices of tensors; not used after this returns.
            writer: Writes the files, as for `write_rank_files`.
            on_written: Called once the files are written: on rank 0 the commit.

        Raises:
            CheckpointError: The previous save has failed.
        """
        self.wait()
        copies = self._copy_shards(list(shards))
        self._cancelled = False
        self._written.clear()
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(
            target=self._save, args=(Path(tmp), rank, copies, writer, on_written), name="lt-ckpt-save", daemon=True
        )
        self._thread.start()

    def _copy_shards(self, shards: list[Shard]) -> list[Shard]:
        self.reserve(shards)
        copies: list[Shard] = []
        for shard, offset in zip(shards, _buffer_offsets(shards), strict=False):
            memory = self._memory[offset : offset + shard.n_bytes]
            shard.copy_into(memory)
            copies.append(replace(shard, data=partial(self._take_copy, memory), copy_fn=None))
        return copies

    def _take_copy(self, memory: np.ndarray) -> np.ndarray:
        if self._cancelled:
            raise SaveCancelledError("the save was cancelled before this rank's files were written")
        self.progress_count += 1
        return memory

    def _save(
        self, tmp: Path, rank: int, shards: list[Shard], writer: RankFileWriter | None, on_written: OnWritten | None
    ) -> None:
        """Write the rank's files, then call `on_written` (thread body)."""
        try:
            write_rank_files(tmp, rank=rank, shards=shards, writer=writer)
            self.progress_count += 1
            self._written.set()
            if on_written is not None:
                on_written(lambda: self._cancelled)
        except BaseException as exc:  # noqa: BLE001 - raised by the next call, whatever it is
            self._failure = exc
        finally:
            self._written.set()

    def cancel(self) -> None:
        """Cancel the save in flight, if any: it ends at the next tensor with a `SaveCancelledError`."""
        self._cancelled = True

    @property
    def has_failed(self) -> bool:
        """True while a failure waits to be raised."""
        return self._failure is not None

    def wait_until_written(self, timeout_s: float | None = None) -> bool:
        """Wait until this rank's files are written or have failed; return True if so. Raises nothing."""
        return self._thread is None or self._written.wait(timeout_s)

    def poll(self) -> bool:
        """Return True if no save is in flight.

        Raises:
            CheckpointError: It has failed; raised once. Likewise any other exception that ended it.
        """
        return self.wait(0)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait up to `timeout_s` for the save in flight; return True if none is left.

        Raises:
            CheckpointError: It has failed; raised once. Likewise any other exception that ended it.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return True
