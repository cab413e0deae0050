"""Saving while training goes on: the state is copied into memory that is kept for it, and a thread writes the copy.

`BackgroundSaver.start` returns when the copy is made; from then on the caller may change its tensors. The thread does
what `lt_ckpt.save` does in the foreground: it writes this rank's files and its part list; on rank 0 it then does what
the caller gave it to do, which is `commit`. Ranks still meet only through the shared folder. A process that is killed
leaves the old checkpoints and an unfinished folder that nobody reads.

Nothing that goes wrong is lost: it is raised by the next call of `poll`, `wait` or `start`. One save is in flight at a
time.

Why a thread and no process: it spends its time in copying, hashing and writing, all of which leave the interpreter to
others, and it needs no second copy of the state in shared memory.

Cost: memory for this rank's slices, taken once; `start` takes as long as copying them.
"""

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from lt_ckpt.errors import GivenUpError
from lt_ckpt.save import PartFiles, write_part
from lt_ckpt.shards import Shard

ALIGN = 64
"""Where a copy begins: enough for every dtype and for the widest vector instructions."""

Then = Callable[[Callable[[], bool]], None]
"""What follows a part; it is handed a function that tells whether the save was given up."""


def host_memory(n_bytes: int) -> np.ndarray:
    """Returns aligned memory that is really there, so that the first copy is no slower than the others."""
    memory = np.empty(n_bytes + ALIGN, np.uint8)
    memory[::4096] = 0
    skip = -memory.ctypes.data % ALIGN
    return memory[skip : skip + n_bytes]


def _begins(shards: Iterable[Shard]) -> list[int]:
    """Where the copy of each shard begins, and in the end where the last one ends."""
    begins = [0]
    for shard in shards:
        begins.append(begins[-1] + -(-shard.n_bytes // ALIGN) * ALIGN)
    return begins


class BackgroundSaver:
    """Saves of one rank, one at a time.

    Args:
        allocate: Makes the memory for the copies: one-dimensional uint8. A device may copy faster into its own kind.
    """

    def __init__(self, allocate: Callable[[int], np.ndarray] = host_memory) -> None:
        self._allocate = allocate
        self._memory = np.empty(0, np.uint8)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._cancelled = False
        self._part_ended = threading.Event()
        self.progress = 0
        """Grows while a part is written."""

    def reserve(self, shards: Iterable[Shard]) -> int:
        """Takes the memory for the copies of such shards, unless it is there; returns its bytes."""
        assert self._thread is None, "a save is in flight"
        n_bytes = _begins(shards)[-1]
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
        layout: PartFiles | None = None,
        then: Then | None = None,
    ) -> None:
        """Copies the shards, and writes them in the background as `write_part` does. Waits for the save before.

        Args:
            tmp: What `begin` returned.
            rank: This rank.
            shards: Slices of tensors; nothing of them is used after this returns.
            layout: What makes files of them, as for `write_part`.
            then: What follows when the part is written: on rank 0 `commit`.

        Raises:
            CheckpointError: The save before has failed.
        """
        self.wait()
        copies = self._copy(list(shards))
        self._cancelled = False
        self._part_ended.clear()
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(
            target=self._save, args=(Path(tmp), rank, copies, layout, then), name="lt-ckpt-save", daemon=True
        )
        self._thread.start()

    def _copy(self, shards: list[Shard]) -> list[Shard]:
        self.reserve(shards)
        copies: list[Shard] = []
        for shard, begin in zip(shards, _begins(shards), strict=False):
            memory = self._memory[begin : begin + shard.n_bytes]
            shard.copy_into(memory)
            copies.append(replace(shard, data=self._handing_out(memory), into=None))
        return copies

    def _handing_out(self, memory: np.ndarray) -> Callable[[], np.ndarray]:
        def hand_out() -> np.ndarray:
            if self._cancelled:
                raise GivenUpError("the save was given up before this rank's part was written")
            self.progress += 1
            return memory

        return hand_out

    def _save(self, tmp: Path, rank: int, shards: list[Shard], layout: PartFiles | None, then: Then | None) -> None:
        """The thread."""
        self._attempt(lambda: write_part(tmp, rank=rank, shards=shards, layout=layout))
        self.progress += 1
        self._part_ended.set()
        if then is not None and self._failure is None:
            self._attempt(lambda: then(lambda: self._cancelled))

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as exc:  # noqa: BLE001 - raised by the next call, whatever it is
            self._failure = exc

    def cancel(self) -> None:
        """Gives up the save in flight, if any: it ends at the next tensor, with a `GivenUpError`."""
        self._cancelled = True

    @property
    def failed(self) -> bool:
        """Whether a failure waits to be raised."""
        return self._failure is not None

    def wait_part(self, timeout_s: float | None = None) -> bool:
        """Waits until this rank's part is written or has failed; True when that is so. Raises nothing."""
        return self._thread is None or self._part_ended.wait(timeout_s)

    def poll(self) -> bool:
        """Tells whether no save is in flight.

        Raises:
            CheckpointError: It has failed; this is told once. Also whatever else ended it.
        """
        return self.wait(0)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the save in flight, at most so long; True when there is none any more.

        Raises:
            CheckpointError: It has failed; this is told once. Also whatever else ended it.
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
