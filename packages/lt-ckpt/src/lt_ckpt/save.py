"""The save protocol: no collectives, nothing visible before it is complete.

    rank 0      begin: a temporary folder beside the checkpoints, with our mark
    every rank  write_part: its tensor files, fsynced, and last of all its part list
    rank 0      commit: waits for all part lists, checks that the slices tile every tensor exactly once,
                writes the manifest, then COMMIT, and renames the folder to its step

Ranks meet only through the shared folder; the caller hands the folder's path from rank 0 to the others. A process
killed at any point leaves either a folder that no reader looks at, or the finished checkpoint. A rank that fails leaves
a `failed-` file, so that rank 0 need not wait for the timeout. Each rank writes its bytes once and hashes them on their
way to the disk; rank 0 besides reads the part lists and the headers.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Protocol

import xxhash

from lt_ckpt import files
from lt_ckpt.checkpoint import differences
from lt_ckpt.errors import AlreadySavedError, CheckpointError, GivenUpError, storage
from lt_ckpt.folders import (
    COMMIT,
    MANIFEST,
    MARK,
    TOKENIZER,
    Mark,
    machine,
    new_token,
    process,
    read_mark,
    remove,
    step_name,
    sweep,
)
from lt_ckpt.integrity import verify
from lt_ckpt.manifest import Manifest, Meta, commit_bytes
from lt_ckpt.records import BEGUN, DONE, NXD_FILE, FileRecord, Files, Part, Slice, TensorRecord, Tensors, check, merge
from lt_ckpt.shards import Shard
from lt_ckpt.tensorfile import TensorSpec, TensorWriter, file_order


def begin(root: str | os.PathLike[str], *, step: int, world: int) -> Path:
    """Begins a save (rank 0).

    Makes the root when it is missing, removes what killed saves of ours left in it, and makes a temporary folder.

    Args:
        root: Folder of checkpoints; on several machines a shared one.
        step: Optimizer steps taken.
        world: Number of ranks that will call `write_part`.

    Returns:
        The temporary folder, to be handed to all ranks.

    Raises:
        CheckpointError: The root cannot be written.
    """
    if step < 0 or world < 1:
        raise CheckpointError(f"begin: step must be >= 0 and world >= 1, are {step} and {world}")
    folder = Path(os.path.abspath(root))
    with storage("beginning a save", folder):
        files.make_folders(folder)
        token = new_token()
        tmp = folder / f".tmp-{step_name(step)}-{token}"
        mark = Mark(token=token, step=step, world=world, machine=machine(), process=process(os.getpid()))
        try:
            files.make_folder(tmp)
            files.write_file(tmp / MARK, mark.to_bytes())
            sweep(folder)
        except BaseException:
            # Without a whole mark nobody would ever remove it, and each try on a full disk would leave one more.
            with suppress(OSError):
                for name in (f"{MARK}.tmp", MARK):
                    (tmp / name).unlink(missing_ok=True)
                tmp.rmdir()
            raise
    return tmp


class PartFiles(Protocol):
    """How a rank's shards become files of another program's format, `lt_ckpt.nxd.part.NxdPart` for example."""

    def write(self, folder: Path, shards: Iterable[Shard]) -> tuple[Files, Tensors]:
        """Writes the shards and puts them on the disk, with the entries of all folders below `folder`.

        Returns:
            The records of the files, each hashed as a whole, and where the model's tensors lie in them.
        """
        ...


def write_part(
    tmp: str | os.PathLike[str], *, rank: int, shards: Iterable[Shard], layout: PartFiles | None = None
) -> None:
    """Writes one rank's shards (every rank, also one without shards).

    One file per group; within a file the shards keep their order, wide elements first. Empty slices of tensors that
    are not empty are left out. When this returns, the bytes are on the disk.

    Args:
        tmp: What `begin` returned.
        rank: This rank.
        shards: Slices of tensors; over all ranks they must hold each element exactly once.
        layout: What makes files of the shards, which are then as it wants them; without it they become safetensors.

    Raises:
        CheckpointError: The save is not there, the rank has written already, or the disk fails.
    """
    folder = Path(tmp)
    mark = read_mark(folder)
    if not 0 <= rank < mark.world:
        raise CheckpointError(f"{folder}: rank {rank} is not one of the {mark.world} that this save was begun for")
    try:
        given = list(shards)
        with storage(f"writing the part of rank {rank}", folder):
            written, tensors = (layout or _Safetensors(rank, mark.step)).write(folder, given)
            files.fsync_folder(folder)
            part = Part(rank=rank, token=mark.token, files=written, tensors=tensors)
            files.write_file(folder / f"part-{rank:05d}.json", part.to_bytes())
    except BaseException:
        with suppress(OSError):  # a courtesy to rank 0, which otherwise waits for its timeout; the error itself goes on
            os.close(files.create(folder / f"failed-{rank:05d}"))
        raise


class _Safetensors:
    """Our own files: one per group, of any slices."""

    def __init__(self, rank: int, step: int) -> None:
        self._rank, self._step = rank, step

    def write(self, folder: Path, shards: Iterable[Shard]) -> tuple[Files, Tensors]:
        groups: dict[str, list[Shard]] = {}
        for shard in shards:
            if prod(shard.shape) or not prod(shard.global_shape):
                groups.setdefault(shard.group, []).append(shard)
        written: Files = {}
        tensors: Tensors = {}
        for group, members in groups.items():
            name = f"{group}-{self._rank:05d}.safetensors"
            metadata = {"format": "lt", "group": group, "rank": str(self._rank), "step": str(self._step)}
            written[name], tensors[group] = _write_group(folder / name, members, metadata)
        return written, tensors


def _keyed(shards: Iterable[Shard]) -> dict[str, Shard]:
    """Gives each shard its key in the file: its name, and from the second of that name on `#1`, `#2`, ..."""
    keyed: dict[str, Shard] = {}
    seen: dict[str, int] = {}
    for shard in shards:
        number = seen.get(shard.name, 0)
        seen[shard.name] = number + 1
        keyed[f"{shard.name}#{number}" if number else shard.name] = shard
    return keyed


def _write_group(
    path: Path, shards: Iterable[Shard], metadata: Mapping[str, str]
) -> tuple[FileRecord, dict[str, TensorRecord]]:
    keyed = _keyed(shards)
    entries = {key: TensorSpec(shard.dtype, shard.shape) for key, shard in keyed.items()}
    records: dict[str, TensorRecord] = {}
    with TensorWriter(path, entries, metadata) as writer:
        for key in file_order(entries):
            shard = keyed[key]
            piece = Slice(
                file=path.name,
                key=key,
                begin=writer.file.tensors[key].begin,
                offset=shard.offset,
                shape=shard.shape,
                xxh3_128=writer.write(key, [shard.bytes()]),
            )
            old = records.get(shard.name)
            spec = TensorSpec(shard.dtype, shard.global_shape)
            if old is not None and old.spec != spec:
                raise CheckpointError(f"tensor {shard.group}/{shard.name}: two shards differ in dtype or global shape")
            slices = (*(old.slices if old else ()), piece)
            records[shard.name] = TensorRecord(dtype=spec.dtype, shape=spec.shape, slices=slices)
    file = writer.file
    return FileRecord(n_bytes=file.n_bytes, hashed_bytes=file.header_bytes, xxh3_128=file.header_hash), records


def _whole(data: bytes) -> FileRecord:
    """Returns the record of a file that is hashed as a whole."""
    return FileRecord(n_bytes=len(data), hashed_bytes=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data))


def _never() -> bool:
    return False


def wait_for_parts(folder: Path, world: int, timeout_s: float, given_up: Callable[[], bool] = _never) -> None:
    """Returns when the part lists of all ranks are there."""
    deadline = time.monotonic() + timeout_s
    pause = 0.01
    while True:
        names = set(os.listdir(folder))
        failed = sorted(name for name in names if name.startswith("failed-"))
        if failed:
            raise CheckpointError(
                f"{folder}: rank {int(failed[0][7:])} failed to write its part; see that rank's error"
            )
        missing = [rank for rank in range(world) if f"part-{rank:05d}.json" not in names]
        if not missing:
            return
        if given_up():
            raise GivenUpError(f"{folder}: the save was given up before all parts had come")
        if time.monotonic() >= deadline:
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise CheckpointError(
                f"{folder}: after {timeout_s:g} s the part of rank {shown} is missing; "
                "check that those ranks live and that all machines see the same folder"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def _seen(path: Path, hashed_bytes: int) -> FileRecord:
    """Returns the record of a file as this machine sees it; its leading bytes are the header, whose hash tells all."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        hashed, digest = min(hashed_bytes, size), xxhash.xxh3_128()
        block = memoryview(bytearray(min(hashed, files.BLOCK_BYTES)))
        for begin in range(0, hashed, files.BLOCK_BYTES):  # a file of NxD's is hashed whole, and may be very large
            part = block[: min(len(block), hashed - begin)]
            files.read_exactly(descriptor, begin, part, path)
            digest.update(part)
    finally:
        os.close(descriptor)
    return FileRecord(n_bytes=size, hashed_bytes=hashed, xxh3_128=digest.hexdigest())


def read_parts(folder: Path, mark: Mark) -> tuple[list[Part], Files]:
    """Reads the part lists and checks that the files they name are seen here as they were written."""
    parts: list[Part] = []
    lists: Files = {MARK: _whole(mark.to_bytes())}
    for rank in range(mark.world):
        path = folder / f"part-{rank:05d}.json"
        raw = files.read_small(path, 2**31)
        part = Part.from_bytes(raw, str(path))
        if part.rank != rank or part.token != mark.token:
            raise CheckpointError(f"{path}: belongs to rank {part.rank} of save {part.token}, not to this save")
        for name, record in part.files.items():
            if _seen(folder / name, record.hashed_bytes) != record:
                raise CheckpointError(f"{folder / name}: is not what rank {rank} wrote; is the folder really shared?")
        lists[path.name] = _whole(raw)
        parts.append(part)
    return parts, lists


def _write_tokenizer(folder: Path, tokenizer: Mapping[str, bytes]) -> Files:
    if not tokenizer:
        return {}
    files.make_folder(folder / TOKENIZER)
    for name in sorted(tokenizer):
        files.write_file(folder / TOKENIZER / name, tokenizer[name])
    return {f"{TOKENIZER}/{name}": _whole(data) for name, data in sorted(tokenizer.items())}


def _write_markers(folder: Path, found: Files) -> Files:
    """Writes what tells NxD's loader that its files here are whole, if there are any; theirs comes before ours."""
    if not any(NXD_FILE.fullmatch(name) for name in found):
        return {}
    for name in (BEGUN, DONE):
        files.write_file(folder / name, b"1")
    return {name: _whole(b"1") for name in (BEGUN, DONE)}


def commit(
    tmp: str | os.PathLike[str],
    *,
    world: int,
    meta: Meta,
    expect: Mapping[str, Mapping[str, TensorSpec]] | None = None,
    replace: bool = False,
    timeout_s: float = 600,
    given_up: Callable[[], bool] = _never,
) -> Path:
    """Makes the save a checkpoint (rank 0).

    Args:
        tmp: What `begin` returned.
        world: Number of ranks.
        meta: Everything besides the tensors; its step must be that of `begin`.
        expect: Group → name → dtype and global shape: when given, the groups named there must hold exactly these
            tensors (`lt_ckpt.expected` makes it from a model's configuration).
        replace: Let a valid checkpoint of the same step give way. Else it is an `AlreadySavedError`. A broken one is
            always moved aside, never written into.
        timeout_s: How long to wait for the parts, in seconds.
        given_up: Asked while it waits; when it says True, the waiting ends in a `GivenUpError`.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: A part is missing, the slices do not tile a tensor exactly, or the disk fails. The temporary
            folder stays; `discard` removes it.
    """
    folder = Path(tmp)
    mark = read_mark(folder)
    if (world, meta.step) != (mark.world, mark.step):
        raise CheckpointError(
            f"{folder}: begun for step {mark.step} and {mark.world} ranks, not step {meta.step} and {world} ranks"
        )
    target = folder.parent / step_name(mark.step)
    with storage("committing", folder):
        wait_for_parts(folder, world, timeout_s, given_up)
        parts, listed = read_parts(folder, mark)
        found, tensors = merge(parts)
        check(found, tensors, str(folder))
        if expect is not None:
            specs = {group: {name: record.spec for name, record in tensors.get(group, {}).items()} for group in expect}
            trouble = differences(expect, specs)
            if trouble:
                raise CheckpointError(f"{folder}: not the state that was expected: {'; '.join(trouble)}")
        manifest = Manifest(
            step=meta.step,
            world=world,
            created_at=float(meta.created_at),
            recipe=dict(meta.recipe),
            model=dict(meta.model),
            layout=dict(meta.layout),
            small=dict(meta.small),
            data=None if meta.data is None else dict(meta.data),
            files={
                **found,
                **listed,
                **_write_tokenizer(folder, meta.tokenizer_files),
                **_write_markers(folder, found),
            },
            tensors=tensors,
        ).to_bytes()
        aside = _make_way(target, mark.token, replace=replace)
        files.write_file(folder / MANIFEST, manifest)
        files.write_file(folder / COMMIT, commit_bytes(manifest, mark.step))
        if aside is not None:
            files.rename(target, aside)
        files.rename(folder, target)
        files.fsync_folder(folder.parent)
        if aside is not None and replace:
            remove(aside)
    return target


def _make_way(target: Path, token: str, *, replace: bool) -> Path | None:
    """Returns where an existing folder of the same step has to go, or None when there is none."""
    if not os.path.lexists(target):
        return None
    if not replace and verify(target).loadable:
        raise AlreadySavedError(target)
    return target.with_name(f"{target.name}.aside-{token}")


def discard(tmp: str | os.PathLike[str]) -> None:
    """Removes the temporary folder of a save that failed (rank 0), so that its bytes do not fill the disk.

    Raises:
        CheckpointError: The folder is not a save of ours, or the system refuses.
    """
    folder = Path(tmp)
    read_mark(folder)
    if not remove(folder):
        raise CheckpointError(f"{folder}: not removed, it holds files that no save of ours wrote")
