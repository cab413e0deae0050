"""Faults to plant in a rank before it starts: `lt_test_helpers.start_run(prepare=...)` calls one with the rank."""

import copy
import datetime
import errno
import os
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

BAD_STEPS = (10, 11, 12)


def infinite_loss_on_rank_1(rank: int) -> None:
    """Rank 1's part of some steps is divided by no tokens at all; the other ranks' parts are sound."""
    from lt_trainer_gpu.engine import GpuEngine

    step, calls = GpuEngine.step, [0]

    def poisoned(self: GpuEngine, batch, lr: float):
        calls[0] += 1
        if calls[0] in BAD_STEPS and rank == self.topology.world_size - 1:
            batch = copy.copy(batch)
            batch._batch = replace(batch._batch, valid_tokens=0)
        return step(self, batch, lr)

    GpuEngine.step = poisoned


def data_loader_hangs_on_rank_1(rank: int) -> None:
    """Rank 1 never gets its fifth batch."""
    from lt_data import Stream

    following, calls = Stream.take, [0]

    def stuck_reader(self: Stream):
        calls[0] += 1
        while rank == 1 and calls[0] == 5:
            time.sleep(1)
        return following(self)

    Stream.take = stuck_reader


def data_loader_keeps_pythons_lock_on_rank_1(rank: int) -> None:
    """Rank 1 hangs in a C call for its fifth batch, during which no thread of Python runs."""
    import ctypes

    from lt_data import Stream
    from lt_trainer.resilience import watchdog

    following, calls = Stream.take, [0]
    watchdog.ALARM_MARGIN_S = 30.0 if rank == 0 else 2.0

    def stuck_reader(self: Stream):
        calls[0] += 1
        if rank == 1 and calls[0] == 5:
            ctypes.PyDLL(None).sleep(600)
        return following(self)

    Stream.take = stuck_reader


def disk_error_on_rank_1(rank: int) -> None:
    """The disk of rank 1 cannot read the fifth batch."""
    from lt_data import DataError, Stream

    following, calls = Stream.take, [0]

    def failing(self: Stream):
        calls[0] += 1
        if rank == 1 and calls[0] == 5:
            raise DataError(f"shards/00000.bin: {os.strerror(errno.EIO)}; check the disk")
        return following(self)

    Stream.take = failing


def wall_clock_jumps(rank: int) -> None:
    """The wall clock of each rank starts in another century, and then jumps back and forth by years."""
    from lt_trainer.run_directory import jsonl, run_dir

    ticks = [0]

    def jump() -> float:
        ticks[0] += 1
        return [-2e9, 4e9, 0.0, 1e9][(ticks[0] + rank) % 4]

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None):
            return cls.fromtimestamp(max(0.0, jump()), tz)

    time.time = jump
    jsonl.datetime = run_dir.datetime = Clock


def disk_fills_up_after_step_10(rank: int) -> None:
    """Somebody else fills the disk that the checkpoints are on, before the save after step 16."""
    _at_step(10, rank, lambda folder: _fill(folder / "of-somebody-else"))


def checkpoints_become_read_only_after_step_10(rank: int) -> None:
    """The file system of the checkpoints turns read-only, as ext4 does after an error."""

    def turn(folder: Path) -> None:
        checkpoints = str(folder / "run" / "checkpoints")
        subprocess.run(["mount", "--bind", checkpoints, checkpoints], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", checkpoints], check=True)

    _at_step(10, rank, turn)


def _at_step(number: int, rank: int, action) -> None:
    from lt_trainer_gpu.engine import GpuEngine

    step, calls = GpuEngine.step, [0]

    def acting(self: GpuEngine, batch, lr: float):
        calls[0] += 1
        if rank == 0 and calls[0] == number:
            action(Path("disk"))
        return step(self, batch, lr)

    GpuEngine.step = acting


def _fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
