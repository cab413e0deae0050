"""Preflight of a save at the start of a run.

It finds what would break the first checkpoint before the first step is taken.

    rank 0      begin_preflight: a temporary folder, as for a save
    every rank  write_preflight: a file with the number of bytes that its part of a save will need
    rank 0      finish_preflight: waits for all files, reads them back, compares the sum with the free space,
                and removes the folder

It takes the path of a save (`lt_ckpt.save`): the same calls, fsyncs and renames, the same waiting and checking. So a
folder that is not shared, not writable or too small fails now instead of at a checkpoint a day later. The required
bytes travel in the files only: that rank 0 knows them proves that it sees what the others wrote. The folder has the
name of an unfinished save; no reader opens it, and the next save or preflight removes what a killed one leaves.

Cost: per rank a few hundred bytes in two files and four fsyncs.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lt_ckpt.checkpoint import read_slices
from lt_ckpt.direct_io import direct_io_unsupported_reason
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.folders import SAVE_MARKER, TMP_FOLDER, read_save_marker
from lt_ckpt.records import merge_rank_manifests, validate_records
from lt_ckpt.save import begin_save, discard_save, read_rank_manifests, wait_for_rank_manifests, write_rank_files
from lt_ckpt.shards import Shard
from lt_ckpt.summary import format_bytes
from lt_ckpt.tensorfile import TensorSpec

PREFLIGHT_GROUP, PREFLIGHT_TENSOR, PREFLIGHT_DTYPE = "preflight", "required_bytes", "I64"


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """Result of a preflight.

    Attributes:
        root: The folder of checkpoints.
        required_bytes: Bytes of one checkpoint's tensors, all ranks together.
        free_bytes: Free bytes on the root's file system.
        buffered_io_reason: Why large files there use the page cache, as rank 0 sees it; empty if they do not.
    """

    root: Path
    required_bytes: int
    free_bytes: int
    buffered_io_reason: str = ""


def begin_preflight(root: str | os.PathLike[str], *, world_size: int) -> Path:
    """Begin a preflight (rank 0); make the root if it is missing and remove what killed saves left in it.

    Args:
        root: Folder of checkpoints; a shared one for several machines.
        world_size: Number of ranks that will call `write_preflight`.

    Returns:
        The temporary folder, to be passed to all ranks.

    Raises:
        CheckpointError: The root cannot be written.
    """
    return begin_save(root, step=0, world_size=world_size)


def write_preflight(tmp: str | os.PathLike[str], *, rank: int, required_bytes: int) -> None:
    """Write one rank's file (every rank).

    Args:
        tmp: What `begin_preflight` returned.
        rank: This rank.
        required_bytes: Bytes that this rank's part of a save will need.

    Raises:
        CheckpointError: The folder does not exist (not shared?), or cannot be written.
    """
    if not 0 <= required_bytes < 2**63:
        raise CheckpointError(f"required_bytes = {required_bytes}: must be from 0 to 2^63 - 1")
    shard = Shard(
        group=PREFLIGHT_GROUP,
        name=PREFLIGHT_TENSOR,
        dtype=PREFLIGHT_DTYPE,
        global_shape=(read_save_marker(Path(tmp)).world_size,),
        offset=(rank,),
        shape=(1,),
        data=np.array([required_bytes], "<i8").view(np.uint8),
    )
    write_rank_files(tmp, rank=rank, shards=[shard])


def finish_preflight(tmp: str | os.PathLike[str], *, world_size: int, timeout_s: float = 600) -> PreflightReport:
    """Finish a preflight (rank 0). The temporary folder is removed in any case.

    Args:
        tmp: What `begin_preflight` returned.
        world_size: Number of ranks.
        timeout_s: Time limit for the ranks' files, in seconds.

    Returns:
        The required and the free bytes.

    Raises:
        CheckpointError: A rank's file is missing or is not seen here as it was written, a checkpoint does not fit into
            the free space, or the folder cannot be read or removed.
    """
    folder = Path(tmp)
    try:
        with translate_os_errors("the preflight of a save", folder):
            report = _check_save(folder, world_size, timeout_s)
    except BaseException:
        with suppress(CheckpointError):  # the first error is the one to raise
            discard_save(folder)
        raise
    discard_save(folder)
    return report


def _check_save(folder: Path, world_size: int, timeout_s: float) -> PreflightReport:
    marker = read_save_marker(folder)
    if world_size != marker.world_size:
        raise CheckpointError(f"{folder}: begun for {marker.world_size} ranks, not {world_size}")
    wait_for_rank_manifests(folder, world_size, timeout_s)
    required_bytes = _read_required_bytes(folder, world_size)
    root = folder.parent
    space = os.statvfs(root)
    free_bytes = space.f_bavail * space.f_frsize
    if free_bytes < required_bytes:
        unfinished = sorted(name for name in os.listdir(root) if TMP_FOLDER.fullmatch(name) and name != folder.name)
        hint = f"; unfinished saves are there too, remove them if no process writes them: {', '.join(unfinished)}"
        raise CheckpointError(
            f"{root}: a checkpoint needs {required_bytes} bytes ({format_bytes(required_bytes)}), {free_bytes} "
            f"({format_bytes(free_bytes)}) are free; free some space on that disk or save to another one"
            f"{hint if unfinished else ''}"
        )
    return PreflightReport(
        root=root,
        required_bytes=required_bytes,
        free_bytes=free_bytes,
        buffered_io_reason=direct_io_unsupported_reason(folder / SAVE_MARKER),
    )


def _read_required_bytes(folder: Path, world_size: int) -> int:
    """Return the sum of the ranks' required bytes, after verifying every byte of their files."""
    manifests, _ = read_rank_manifests(folder, read_save_marker(folder))
    files, tensors = merge_rank_manifests(manifests)
    validate_records(files, tensors, str(folder))
    record = tensors[PREFLIGHT_GROUP][PREFLIGHT_TENSOR]
    assert record.spec == TensorSpec(PREFLIGHT_DTYPE, (world_size,)), record
    required_bytes = 0
    for piece in record.slices:
        rank, name = piece.offset[0], f"{folder}: {PREFLIGHT_TENSOR}"
        try:
            data = read_slices(folder, [(record, name, (piece.offset, piece.shape))])[0]
        except CheckpointError as exc:
            raise CheckpointError(
                f"{folder / piece.file}: is not what rank {rank} wrote; is the folder really shared? ({exc})"
            ) from exc
        required_bytes += int(data.view("<i8")[0])
    return required_bytes
