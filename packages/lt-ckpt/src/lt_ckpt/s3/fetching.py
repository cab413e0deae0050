"""Checkpoints and other folders from a bucket, to a machine that may hold nothing.

Files come into a folder beside the target, which is verified, byte for byte, and renamed at the end. Its name holds a
hash of the list of files, so that what an earlier call left is taken up only for the very same content; files that are
there with their size are not fetched again. Which checkpoint is the newest is told by the highest step, as on a disk,
and one that is not whole is passed over, with the reason.

Cost: each byte is fetched and written once, and read once for verification.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from lt_ckpt import files
from lt_ckpt.errors import CheckpointError, storage
from lt_ckpt.folders import COMMIT, MANIFEST, STEP_FOLDER, new_token, step_name
from lt_ckpt.integrity import verify
from lt_ckpt.manifest import Manifest
from lt_ckpt.s3.client import S3Folder, ServiceError
from lt_ckpt.s3.contents import DamagedError, of_file
from lt_ckpt.s3.meter import Meter
from lt_ckpt.s3.parcel import MAX_COMMIT_BYTES, PART, Parcel, of_bucket
from lt_ckpt.summary import size


@dataclass(frozen=True, kw_only=True)
class RejectedRemote:
    """A folder in a bucket with a checkpoint's name that was passed over, and why."""

    url: str
    reason: str
    damaged: bool = False
    """It was there whole by the sizes, and its bytes are not those that were uploaded."""


@dataclass(frozen=True, kw_only=True)
class Downloaded:
    """What a download did.

    Attributes:
        url: Where the folder lies.
        path: Where it is now.
        fetched: Files that were fetched.
        kept: Files that were here already.
        n_bytes: Bytes that were fetched.
        seconds: How long all of it took, verification included.
    """

    url: str
    path: Path
    fetched: tuple[str, ...]
    kept: tuple[str, ...]
    n_bytes: int
    seconds: float


def remote_steps(url: str | S3Folder) -> list[tuple[int, S3Folder]]:
    """Returns the folders with a checkpoint's name, newest step first; nothing in them is looked at."""
    root = url if isinstance(url, S3Folder) else S3Folder(url)
    found = [(match, name) for name in root.folders() if (match := STEP_FOLDER.fullmatch(name)) and not match[2]]
    return sorted(((int(match[1]), root.below(name)) for match, name in found), key=lambda item: -item[0])


def whole(folder: S3Folder) -> Parcel:
    """Returns what a folder in a bucket holds, after checking that all of it is there, by size.

    Raises:
        CheckpointError: Something is missing or has another size.
    """
    parcel = of_bucket(folder)
    there = folder.sizes()
    for name, content in parcel.contents.items():
        if there.get(name) != content.n_bytes:
            found = f"has {there[name]} bytes" if name in there else "is not there"
            raise CheckpointError(f"{folder.url}/{name}: {found}, {content.n_bytes} were written")
    return parcel


def intact(folder: S3Folder) -> Parcel:
    """Returns what a folder in a bucket holds, after checking that every file in it is the one that was uploaded.

    The bytes themselves are not read: each object says what it was uploaded as, and the store keeps it as it was.

    Raises:
        CheckpointError: Something is missing, or was put there by others.
    """
    parcel = whole(folder)
    for name, content in parcel.contents.items():
        if folder.identity(name) != content.identity:
            raise CheckpointError(f"{folder.url}/{name}: is not what was uploaded")
    return parcel


def latest_remote(url: str | S3Folder) -> tuple[str | None, list[RejectedRemote]]:
    """Finds the newest checkpoint below an address that is there whole, by its COMMIT and the sizes of its files.

    Returns:
        Its address, or None; and the newer ones that were passed over.

    Raises:
        ServiceError: The store refuses or cannot be reached.
    """
    rejected: list[RejectedRemote] = []
    for _, folder, _ in _candidates(url, rejected):
        return folder.url, rejected
    return None, rejected


def newest_manifest(url: str | S3Folder) -> tuple[str, Manifest] | None:
    """Returns address and manifest of what `latest_remote` finds.

    Raises:
        ServiceError: The store refuses or cannot be reached.
    """
    for _, folder, parcel in _candidates(url, []):
        return folder.url, _manifest(folder, parcel)
    return None


def _manifest(folder: S3Folder, parcel: Parcel) -> Manifest:
    return Manifest.from_bytes(dict(parcel.last)[MANIFEST], f"{folder.url}/{MANIFEST}")


def _candidates(
    url: str | S3Folder, rejected: list[RejectedRemote], newer_than: int = -1
) -> Iterator[tuple[int, S3Folder, Parcel]]:
    """Gives the checkpoints that are there whole, newest first, and notes those that are not."""
    for step, folder in remote_steps(url):
        if step <= newer_than:
            return
        try:
            parcel = whole(folder)
        except ServiceError:
            raise
        except CheckpointError as exc:
            rejected.append(RejectedRemote(url=folder.url, reason=str(exc)))
        else:
            yield step, folder, parcel


def download(url: str | S3Folder, folder: str | os.PathLike[str], *, progress: files.Progress | None = None) -> Path:
    """Downloads a checkpoint, or another folder that was uploaded, as `bring` does; returns the folder."""
    return bring(url, folder, progress=progress).path


def bring(
    url: str | S3Folder,
    folder: str | os.PathLike[str],
    *,
    progress: files.Progress | None = None,
    stop: Callable[[], None] = lambda: None,
) -> Downloaded:
    """Downloads a checkpoint, or another folder that was uploaded; every byte is verified.

    Args:
        url: `s3://bucket/folder`.
        folder: The folder to make. A checkpoint that is there already, the very same and intact, is left as it is.
        progress: Told the bytes fetched, then those verified.
        stop: Called again and again; an exception that it raises ends the download, and the same call goes on later.

    Returns:
        What was fetched.

    Raises:
        DamagedError: What lies in the bucket is not what was uploaded.
        ServiceError: The store refuses or cannot be reached; the same call goes on later.
        CheckpointError: Nothing whole is there, something else stands at `folder`, or the disk fails.
    """
    source = url if isinstance(url, S3Folder) else S3Folder(url)
    return _bring(source, whole(source), Path(os.path.abspath(folder)), progress, stop)


def _bring(
    source: S3Folder, parcel: Parcel, target: Path, progress: files.Progress | None, stop: Callable[[], None]
) -> Downloaded:
    start, reused = time.monotonic(), list(parcel.contents)
    if os.path.lexists(target):
        if not _same(parcel, target, progress):
            raise CheckpointError(
                f"{target}: is there already and is not what lies at {source.url}; choose another folder"
            )
    else:
        reused = _fetch(source, parcel, target, progress, stop)
    fetched = tuple(name for name in parcel.contents if name not in reused)
    return Downloaded(
        url=source.url,
        path=target,
        fetched=fetched,
        kept=tuple(reused),
        n_bytes=sum(parcel.contents[name].n_bytes for name in fetched),
        seconds=time.monotonic() - start,
    )


def _fetch(
    source: S3Folder, parcel: Parcel, target: Path, progress: files.Progress | None, stop: Callable[[], None]
) -> list[str]:
    """Fetches, verifies and renames; returns the files that an earlier call had fetched."""
    identity = xxhash.xxh3_64_hexdigest(parcel.last[-1][1])
    tmp = target.with_name(f".{target.name}.{identity}.download")
    with storage("downloading", tmp):
        files.make_folders(target.parent)
        files.make_folders(tmp)
        with _locked(tmp):
            reused = _fill(source, parcel, tmp, progress, stop)
            problems = _problems(parcel, tmp, progress)
            if problems and reused:  # an earlier call left them, and the machine may have failed since
                for name in reused:
                    os.unlink(tmp / name)
                reused = _fill(source, parcel, tmp, progress, stop)
                problems = _problems(parcel, tmp, progress)
            if problems:
                _clear(parcel, tmp)
                raise DamagedError(f"{source.url}: is damaged: {'; '.join(problems)}")
            files.rename(tmp, target)
            files.fsync_folder(target.parent)
    return reused


def download_latest(
    url: str | S3Folder, root: str | os.PathLike[str], *, progress: files.Progress | None = None
) -> tuple[Path | None, list[RejectedRemote]]:
    """Downloads the newest checkpoint below an address, as `bring_latest` does.

    Returns:
        The checkpoint, or None when there is none; and the newer ones that were passed over, with the reasons.
    """
    found, rejected = bring_latest(url, root, progress=progress)
    return None if found is None else found.path, rejected


def bring_latest(
    url: str | S3Folder,
    root: str | os.PathLike[str],
    *,
    newer_than: int = -1,
    accept: Callable[[Manifest], None] = lambda manifest: None,
    progress: files.Progress | None = None,
    stop: Callable[[], None] = lambda: None,
) -> tuple[Downloaded | None, list[RejectedRemote]]:
    """Downloads the newest checkpoint below an address that is whole and intact into a folder of checkpoints.

    Args:
        url: `s3://bucket/folder`.
        root: The folder of checkpoints; a broken checkpoint of the same step is moved aside there.
        newer_than: Only steps above this one.
        accept: Sees the manifest of what will be fetched; what it raises comes out of here, and nothing was fetched.
        progress: Told the bytes fetched, then those verified.
        stop: Called again and again; an exception that it raises ends the download, and the same call goes on later.

    Returns:
        What was fetched, or None when there is none; and the newer ones that were passed over, with the reasons.

    Raises:
        CheckpointError: As `bring`, but not for what is damaged in the bucket.
    """
    rejected: list[RejectedRemote] = []
    for step, source, parcel in _candidates(url, rejected, newer_than):
        accept(_manifest(source, parcel))
        target = Path(os.path.abspath(root)) / step_name(step)
        try:
            if os.path.lexists(target) and not _same(parcel, target, progress):
                _move_aside(target)
            return _bring(source, parcel, target, progress, stop), rejected
        except DamagedError as exc:
            rejected.append(RejectedRemote(url=source.url, reason=str(exc), damaged=True))
    return None, rejected


def _move_aside(target: Path) -> None:
    """Makes way for a checkpoint, as a save of the same step does: for one that is broken, never for a valid one."""
    if (target / COMMIT).is_file() and verify(target).loadable:
        raise CheckpointError(f"{target}: another valid checkpoint of this step is there already")
    with storage("moving aside", target):
        files.rename(target, target.with_name(f"{target.name}.aside-{new_token()}"))
        files.fsync_folder(target.parent)


def _same(parcel: Parcel, target: Path, progress: files.Progress | None) -> bool:
    if not parcel.checkpoint or not (target / COMMIT).is_file():
        return False
    with storage("comparing", target):
        commit = files.read_small(target / COMMIT, MAX_COMMIT_BYTES)
    return commit == parcel.last[-1][1] and verify(target, progress=progress).loadable


def _fill(
    source: S3Folder, parcel: Parcel, tmp: Path, progress: files.Progress | None, stop: Callable[[], None]
) -> list[str]:
    """Fetches what is missing; returns the files that were there."""
    reused = [
        name
        for name, content in parcel.contents.items()
        if (tmp / name).is_file() and (tmp / name).stat().st_size == content.n_bytes
    ]
    meter = Meter(parcel.n_bytes, progress, stop)
    meter.add(sum(parcel.contents[name].n_bytes for name in reused))
    need, free = parcel.n_bytes - meter.done, shutil.disk_usage(tmp).free
    if need > free:
        raise CheckpointError(f"{tmp}: {size(need)} have to be fetched and {size(free)} are free; free some space")
    for name in sorted(set(parcel.contents) - set(reused)):
        files.make_folders((tmp / name).parent)
        source.fetch(name, tmp / PART, meter.add)
        files.rename(tmp / PART, tmp / name)
        files.fsync_folder((tmp / name).parent)
    if parcel.checkpoint:
        for name, data in parcel.last:
            for left in (name, f"{name}.tmp"):
                (tmp / left).unlink(missing_ok=True)
            files.write_file(tmp / name, data)
    return reused


def _problems(parcel: Parcel, tmp: Path, progress: files.Progress | None) -> list[str]:
    """Reads everything that was fetched; returns what is not as it was uploaded."""
    if parcel.checkpoint:
        return list(verify(tmp, progress=progress).problems)
    meter = Meter(parcel.n_bytes, progress)
    return [
        f"{name}: its bytes have changed since they were uploaded"
        for name, content in parcel.contents.items()
        if of_file(tmp / name, meter.add) != content
    ]


def _clear(parcel: Parcel, tmp: Path) -> None:
    """Removes what was fetched of a folder that is damaged in the bucket, so that it does not fill the disk."""
    for name in (*parcel.contents, *(name for name, _ in parcel.last)):
        (tmp / name).unlink(missing_ok=True)
    folders = {folder for name in parcel.contents for folder in (tmp / name).parents if folder.is_relative_to(tmp)}
    for folder in sorted(folders, reverse=True):  # those inside before those around them
        os.rmdir(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder; it ends with the process."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise CheckpointError(f"{folder}: another process is downloading it: wait for that one") from exc
        yield
    finally:
        os.close(descriptor)
