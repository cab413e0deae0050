"""A rehearsal of a save, for the start of a run: what would spoil the first checkpoint is found before the first step.

    rank 0      begin_trial: a temporary folder, as for a save
    every rank  write_trial: a file that holds how many bytes its part of a save will need
    rank 0      finish_trial: waits for all files, reads them back, compares the need with the free space,
                and removes the folder

All of it goes the way of a save (`lt_ckpt.save`): the same calls, fsyncs and renames, the same waiting and checking. So
a folder that is not shared, cannot be written or is too small shows itself as it would at a checkpoint, after a day.
The needs travel in the files and in nothing else: that rank 0 knows them proves that it sees what the others wrote.
A trial's folder has the name of an unfinished save; no reader looks at it, and what a killed trial leaves is swept by
the next save or trial.

Cost: for each rank a few hundred bytes in two files and four fsyncs.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from lt_ckpt.checkpoint import read_slices
from lt_ckpt.direct import refusal
from lt_ckpt.errors import CheckpointError, storage
from lt_ckpt.folders import MARK, TMP_FOLDER, read_mark
from lt_ckpt.records import check, merge
from lt_ckpt.save import begin, discard, read_parts, wait_for_parts, write_part
from lt_ckpt.shards import Shard
from lt_ckpt.summary import size
from lt_ckpt.tensorfile import TensorSpec

GROUP, NAME, DTYPE = "trial", "need_bytes", "I64"


@dataclass(frozen=True, kw_only=True)
class TrialReport:
    """What a rehearsal found.

    Attributes:
        root: The folder of checkpoints.
        need_bytes: Bytes of one checkpoint's tensors, all ranks together.
        free_bytes: Bytes that are free on the root's file system.
        slow_because: Why big files go through the page cache there, as rank 0 sees it; empty when they do not.
    """

    root: Path
    need_bytes: int
    free_bytes: int
    slow_because: str = ""


def begin_trial(root: str | os.PathLike[str], *, world: int) -> Path:
    """Begins a rehearsal (rank 0); makes the root when it is missing and removes what killed saves left in it.

    Args:
        root: Folder of checkpoints; on several machines a shared one.
        world: Number of ranks that will call `write_trial`.

    Returns:
        The temporary folder, to be handed to all ranks.

    Raises:
        CheckpointError: The root cannot be written.
    """
    return begin(root, step=0, world=world)


def write_trial(tmp: str | os.PathLike[str], *, rank: int, need_bytes: int) -> None:
    """Writes one rank's file (every rank).

    Args:
        tmp: What `begin_trial` returned.
        rank: This rank.
        need_bytes: Bytes that this rank's part of a save will have.

    Raises:
        CheckpointError: The folder is not there (not shared?), or cannot be written.
    """
    if not 0 <= need_bytes < 2**63:
        raise CheckpointError(f"write_trial: need_bytes must be from 0 to 2^63 - 1, is {need_bytes}")
    mine = Shard(
        group=GROUP,
        name=NAME,
        dtype=DTYPE,
        global_shape=(read_mark(Path(tmp)).world,),
        offset=(rank,),
        shape=(1,),
        data=np.array([need_bytes], "<i8").view(np.uint8),
    )
    write_part(tmp, rank=rank, shards=[mine])


def finish_trial(tmp: str | os.PathLike[str], *, world: int, timeout_s: float = 600) -> TrialReport:
    """Ends a rehearsal (rank 0). The trial's folder is removed, however this ends.

    Args:
        tmp: What `begin_trial` returned.
        world: Number of ranks.
        timeout_s: How long to wait for the ranks' files, in seconds.

    Returns:
        The bytes that a checkpoint needs and those that are free.

    Raises:
        CheckpointError: A rank's file is missing or is not seen here as it was written, one whole checkpoint does not
            fit into the free space, or the folder cannot be read or removed.
    """
    folder = Path(tmp)
    try:
        with storage("rehearsing a save", folder):
            report = _examine(folder, world, timeout_s)
    except BaseException:
        with suppress(CheckpointError):  # the first error is the one to be told
            discard(folder)
        raise
    discard(folder)
    return report


def _examine(folder: Path, world: int, timeout_s: float) -> TrialReport:
    mark = read_mark(folder)
    if world != mark.world:
        raise CheckpointError(f"{folder}: begun for {mark.world} ranks, not {world}")
    wait_for_parts(folder, world, timeout_s)
    need = _read_needs(folder, world)
    root = folder.parent
    space = os.statvfs(root)
    free = space.f_bavail * space.f_frsize
    if free < need:
        others = sorted(name for name in os.listdir(root) if TMP_FOLDER.fullmatch(name) and name != folder.name)
        left = f"; unfinished saves lie there too, remove them if no process writes them: {', '.join(others)}"
        raise CheckpointError(
            f"{root}: a checkpoint needs {need} bytes ({size(need)}), {free} ({size(free)}) are free; "
            f"free some space on that disk or save to another one{left if others else ''}"
        )
    return TrialReport(root=root, need_bytes=need, free_bytes=free, slow_because=refusal(folder / MARK))


def _read_needs(folder: Path, world: int) -> int:
    """Returns the sum of what the ranks wrote, after checking every byte of it."""
    parts, _ = read_parts(folder, read_mark(folder))
    found, tensors = merge(parts)
    check(found, tensors, str(folder))
    record = tensors[GROUP][NAME]
    assert record.spec == TensorSpec(DTYPE, (world,)), record
    need = 0
    for piece in record.slices:
        data = read_slices(folder, [(record, f"{folder}: {NAME}", (piece.offset, piece.shape))])[0]
        if xxhash.xxh3_128_hexdigest(data.data) != piece.xxh3_128:
            rank = piece.offset[0]
            raise CheckpointError(f"{folder / piece.file}: is not what rank {rank} wrote; is the folder really shared?")
        need += int(data.view("<i8")[0])
    return need
