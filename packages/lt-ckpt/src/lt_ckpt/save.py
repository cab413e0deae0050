"""Save protocol: no collectives, nothing visible before it is complete.

    rank 0      begin_save: a temporary folder beside the checkpoints, with our save marker
    every rank  write_rank_files: its tensor files, fsynced, and last its manifest (part-*.json)
    rank 0      commit_save: waits for all rank manifests, checks that the slices tile every tensor exactly once,
                writes the manifest, then COMMIT, and renames the folder to its step

Ranks communicate only through the shared folder; the caller passes the folder's path from rank 0 to the others. A
process killed at any point leaves either a folder that no reader opens, or the finished checkpoint. A rank that fails
leaves a `failed-` file, so that rank 0 need not wait for the timeout. Each rank writes its bytes once and hashes them
while writing; rank 0 also reads the rank manifests and the headers.
"""

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Protocol

import xxhash

from lt_ckpt import files, json_objects
from lt_ckpt.checkpoint import check_specs
from lt_ckpt.errors import CheckpointError, SaveCancelledError, translate_os_errors
from lt_ckpt.folders import (
    COMMIT,
    HF,
    MANIFEST,
    SAVE_MARKER,
    TOKENIZER,
    SaveMarker,
    read_save_marker,
    remove_abandoned_saves,
    remove_checkpoint,
    step_folder_name,
)
from lt_ckpt.integrity import hash_file, verify
from lt_ckpt.manifest import CheckpointManifest, CheckpointMetadata, make_commit
from lt_ckpt.records import (
    NXD_BEGIN_MARKER,
    NXD_DONE_MARKER,
    FileRecord,
    FileRecords,
    RankManifest,
    TensorRecord,
    TensorRecords,
    check_optimizer_slots,
    merge_rank_manifests,
    validate_records,
)
from lt_ckpt.shards import Shard
from lt_ckpt.stored_slices import StoredSlice
from lt_ckpt.tensorfile import TensorSpec, write_safetensors


def begin_save(root: str | os.PathLike[str], *, step: int, world_size: int) -> Path:
    """Begin a save (rank 0).

    Makes the root if it is missing, removes what killed saves of ours left in it, and makes a temporary folder.

    Args:
        root: Folder of checkpoints; a shared one for several machines.
        step: Optimizer steps taken.
        world_size: Number of ranks that will call `write_rank_files`.

    Returns:
        The temporary folder, to be passed to all ranks.

    Raises:
        CheckpointError: The root cannot be written.
    """
    assert step >= 0 and world_size >= 1, (step, world_size)  # noqa: PT018
    folder = Path(os.path.abspath(root))
    with translate_os_errors("beginning a save", folder):
        files.make_folders(folder)
        remove_abandoned_saves(folder)  # first: on a full disk what they hold makes the room
        marker = SaveMarker(step=step, world_size=world_size)
        tmp = folder / f".tmp-{step_folder_name(step)}-{marker.save_id}"
        try:
            files.make_folder(tmp)
            files.write_file(tmp / SAVE_MARKER, marker.to_bytes())
        except BaseException:
            shutil.rmtree(tmp, ignore_errors=True)
            raise
    return tmp


class RankFileWriter(Protocol):
    """Interface that writes a rank's shards as files of another format, e.g. `NxdRankWriter`."""

    def write(self, folder: Path, shards: Iterable[Shard]) -> tuple[FileRecords, TensorRecords]:
        """Write the shards and flush them to the disk, with the entries of all folders below `folder`.

        Returns:
            The records of the files, each hashed as a whole, and of the model's tensors in them.
        """
        ...


def write_rank_files(
    tmp: str | os.PathLike[str], *, rank: int, shards: Iterable[Shard], writer: RankFileWriter | None = None
) -> None:
    """Write one rank's shards (every rank, also one without shards).

    One file per group; within a file the shards keep their order, wide elements first. Empty slices of non-empty
    tensors are left out. When this returns, the bytes are on the disk.

    Args:
        tmp: What `begin_save` returned.
        rank: This rank.
        shards: Slices of tensors; over all ranks they must hold each element exactly once.
        writer: Writes the shards in another format and defines what they must be; by default safetensors.

    Raises:
        CheckpointError: The save is gone, the rank has written already, or the disk fails.
    """
    folder = Path(tmp)
    marker = read_save_marker(folder)
    assert 0 <= rank < marker.world_size, rank
    try:
        shard_list = list(shards)
        with translate_os_errors(f"writing the files of rank {rank}", folder):
            written, tensors = (
                writer.write(folder, shard_list)
                if writer is not None
                else _write_safetensors(folder, rank, marker.step, shard_list)
            )
            files.fsync_folder(folder)
            manifest = RankManifest(rank=rank, save_id=marker.save_id, files=written, tensors=tensors)
            files.write_file(folder / f"part-{rank:05d}.json", json_objects.dumps(manifest, "the rank manifest"))
    except BaseException:
        with suppress(OSError):  # spares rank 0 its timeout; the error itself is raised
            os.close(files.create_file(folder / f"failed-{rank:05d}"))
        raise


def _write_safetensors(
    folder: Path, rank: int, step: int, shards: Iterable[Shard]
) -> tuple[FileRecords, TensorRecords]:
    """Write shards as our own files, one per group.

    In a file a shard's key is its name, with `#1`, `#2`, ... from the tensor's second shard on.
    """
    groups: dict[str, dict[str, Shard]] = {}
    numbers: Counter[tuple[str, str]] = Counter()
    for shard in shards:
        if prod(shard.shape) or not prod(shard.global_shape):
            number = numbers[shard.group, shard.name]
            numbers[shard.group, shard.name] += 1
            groups.setdefault(shard.group, {})[f"{shard.name}#{number}" if number else shard.name] = shard
    written: FileRecords = {}
    tensors: TensorRecords = {}
    for group, members in groups.items():
        path = folder / f"{group}-{rank:05d}.safetensors"
        metadata = {"format": "lt", "group": group, "rank": str(rank), "step": str(step)}
        specs = {key: TensorSpec(shard.dtype, shard.shape) for key, shard in members.items()}
        header, placed, hashes = write_safetensors(path, specs, metadata, lambda key, held=members: held[key].bytes())
        slices: dict[str, list[StoredSlice]] = {}
        wholes: dict[str, TensorSpec] = {}
        for key, stored in placed.items():
            shard = members[key]
            whole = TensorSpec(shard.dtype, shard.global_shape)
            assert wholes.setdefault(shard.name, whole) == whole, f"two shards of {group}/{shard.name} differ"
            piece = StoredSlice(
                file=path.name,
                key=key,
                byte_offset=stored.byte_offset,
                offset=shard.offset,
                shape=shard.shape,
                xxh3_128=hashes[key],
            )
            slices.setdefault(shard.name, []).append(piece)
        n_bytes = len(header) + sum(spec.n_bytes for spec in specs.values())
        written[path.name] = replace(_record_of_bytes(header), n_bytes=n_bytes)
        tensors[group] = {
            name: TensorRecord(dtype=spec.dtype, shape=spec.shape, slices=tuple(slices[name]))
            for name, spec in wholes.items()
        }
    return written, tensors


def _record_of_bytes(data: bytes) -> FileRecord:
    """Return the record of a file hashed as a whole."""
    return FileRecord(n_bytes=len(data), hashed_bytes=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data))


def wait_for_rank_manifests(
    folder: Path, world_size: int, timeout_s: float, is_cancelled: Callable[[], bool] = lambda: False
) -> None:
    """Wait until the rank manifests of all ranks exist."""
    deadline = time.monotonic() + timeout_s
    pause = 0.01
    while True:
        names = set(os.listdir(folder))
        failed = sorted(name for name in names if name.startswith("failed-"))
        if failed:
            raise CheckpointError(
                f"{folder}: rank {int(failed[0][7:])} failed to write its files; see that rank's error"
            )
        missing = [rank for rank in range(world_size) if f"part-{rank:05d}.json" not in names]
        if not missing:
            return
        if is_cancelled():
            raise SaveCancelledError(f"{folder}: the save was cancelled before all ranks had written")
        if time.monotonic() >= deadline:
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise CheckpointError(
                f"{folder}: after {timeout_s:g} s the manifest of rank {shown} is missing; "
                "check that those ranks are alive and that all machines see the same folder"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def read_rank_manifests(folder: Path, marker: SaveMarker) -> tuple[list[RankManifest], FileRecords]:
    """Read the rank manifests and check that this machine sees their files as they were written."""
    manifests: list[RankManifest] = []
    own_files: FileRecords = {SAVE_MARKER: _record_of_bytes(marker.to_bytes())}
    for rank in range(marker.world_size):
        path = folder / f"part-{rank:05d}.json"
        raw = files.read_bounded(path, 2**31)
        manifest = RankManifest.from_bytes(raw, str(path))
        if (manifest.rank, manifest.save_id) != (rank, marker.save_id):
            raise CheckpointError(f"{path}: is of rank {manifest.rank} of save {manifest.save_id}, not of this save")
        for name, record in manifest.files.items():
            if hash_file(folder / name, record.hashed_bytes) != record:
                raise CheckpointError(f"{folder / name}: is not what rank {rank} wrote; is the folder really shared?")
        own_files[path.name] = _record_of_bytes(raw)
        manifests.append(manifest)
    return manifests, own_files


def _write_small_files(folder: Path, metadata: CheckpointMetadata, *, is_nxd: bool) -> FileRecords:
    """Write the files of tokenizer and model, then the markers of NxD's loader; all before our own COMMIT."""
    contents = {f"{TOKENIZER}/{name}": data for name, data in sorted(metadata.tokenizer_files.items())}
    contents |= {f"{HF}/{name}": data for name, data in sorted(metadata.hf_files.items())}
    contents |= dict.fromkeys((NXD_BEGIN_MARKER, NXD_DONE_MARKER), b"1") if is_nxd else {}
    for name, data in contents.items():
        files.make_folders((folder / name).parent)
        files.write_file(folder / name, data)
    return {name: _record_of_bytes(data) for name, data in contents.items()}


def commit_save(
    tmp: str | os.PathLike[str],
    *,
    world_size: int,
    metadata: CheckpointMetadata,
    expected_specs: Mapping[str, Mapping[str, TensorSpec]] | None = None,
    overwrite: bool = False,
    timeout_s: float = 600,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> Path:
    """Commit the save as a checkpoint (rank 0).

    Args:
        tmp: What `begin_save` returned.
        world_size: Number of ranks.
        metadata: Everything besides the tensors; its step must be that of `begin_save`.
        expected_specs: Group → name → dtype and global shape: if given, the groups named there must hold exactly these
            tensors.
        overwrite: Replace a valid checkpoint of the same step, which is an error otherwise. An invalid one is always
            moved aside, never written into.
        timeout_s: Time limit for the ranks' files, in seconds.
        is_cancelled: Polled while waiting; True ends the wait with a `SaveCancelledError`.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: A rank's files are missing, the slices do not tile a tensor exactly, or the disk fails. The
            temporary folder stays; `discard_save` removes it.
    """
    folder = Path(tmp)
    marker = read_save_marker(folder)
    assert (world_size, metadata.step) == (marker.world_size, marker.step), "not the step and the ranks of `begin_save`"
    target = folder.parent / step_folder_name(marker.step)
    with translate_os_errors("committing", folder):
        wait_for_rank_manifests(folder, world_size, timeout_s, is_cancelled)
        with json_objects.translate_format_errors(str(folder)):
            parts, own_files = read_rank_manifests(folder, marker)
            written, tensors = merge_rank_manifests(parts)
            validate_records(written, tensors, str(folder))
        check_optimizer_slots(metadata.optimizer, tensors, str(folder))
        if expected_specs is not None:
            specs = {
                group: {name: record.spec for name, record in members.items()} for group, members in tensors.items()
            }
            check_specs(expected_specs, specs, str(folder))
        saved = {name: value for name, value in vars(metadata).items() if name not in ("tokenizer_files", "hf_files")}
        is_nxd = any(name.startswith(("model/", "optim/")) for name in written)
        all_files = {**written, **own_files, **_write_small_files(folder, metadata, is_nxd=is_nxd)}
        manifest = CheckpointManifest(**saved, world_size=world_size, files=all_files, tensors=tensors).to_bytes()
        aside = target.with_name(f"{target.name}.aside-{marker.save_id}") if os.path.lexists(target) else None
        if aside is not None and not overwrite and verify(target).is_loadable:
            raise CheckpointError(
                f"{target}: a valid checkpoint of this step already exists; resume from it, or save to another folder"
            )
        files.write_file(folder / MANIFEST, manifest)
        files.write_file(folder / COMMIT, make_commit(manifest, marker.step))
        if aside is not None:
            files.rename(target, aside)
        files.rename(folder, target)
        files.fsync_folder(folder.parent)
        if aside is not None and overwrite:
            remove_checkpoint(aside)
    return target


def discard_save(tmp: str | os.PathLike[str]) -> None:
    """Remove the temporary folder of a failed save (rank 0), so that its bytes do not fill the disk.

    Raises:
        CheckpointError: The folder is not a save of ours, or the system refuses.
    """
    folder = Path(tmp)
    read_save_marker(folder)
    if not remove_checkpoint(folder):
        raise CheckpointError(f"{folder}: not removed: it contains files that no save of ours wrote")
