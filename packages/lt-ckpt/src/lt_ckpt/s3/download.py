"""Verified download of checkpoints and other folders from a bucket.

Files are downloaded into a folder beside the target, which is verified, byte for byte, and renamed at the end. Its name
contains a hash of the list of files, so that leftovers of an earlier call are resumed only for the same content; files
that exist with their size are not downloaded again. The newest checkpoint is the one with the highest step, as on a
disk, and incomplete ones are rejected with the reason.

Cost: each byte is downloaded and written once, and read once for verification.
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
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.finished_folder import PARTIAL_FILE
from lt_ckpt.folders import COMMIT, MANIFEST, STEP_FOLDER, random_id, step_folder_name
from lt_ckpt.integrity import verify
from lt_ckpt.manifest import CheckpointManifest
from lt_ckpt.s3.byte_progress import ByteProgress
from lt_ckpt.s3.client import S3Folder, ServiceError
from lt_ckpt.s3.file_digest import DamagedError, digest_file
from lt_ckpt.s3.folder_manifest import MAX_COMMIT_BYTES, FolderManifest, read_folder_manifest
from lt_ckpt.summary import format_bytes


@dataclass(frozen=True, kw_only=True)
class RejectedRemoteCheckpoint:
    """Folder in a bucket with a checkpoint's name that was rejected, and the reason."""

    url: str
    reason: str
    damaged: bool = False
    """It is complete by the sizes, but its bytes differ from those that were uploaded."""


@dataclass(frozen=True, kw_only=True)
class DownloadReport:
    """Result of a download.

    Attributes:
        url: Address of the folder.
        path: Local folder.
        downloaded: Files that were downloaded.
        skipped: Files that were already here.
        n_bytes: Bytes that were downloaded.
        seconds: Duration, verification included.
    """

    url: str
    path: Path
    downloaded: tuple[str, ...]
    skipped: tuple[str, ...]
    n_bytes: int
    seconds: float


def list_remote_steps(url: str | S3Folder) -> list[tuple[int, S3Folder]]:
    """Return the folders with a checkpoint's name, newest step first, without reading them."""
    root = url if isinstance(url, S3Folder) else S3Folder(url)
    found = [(match, name) for name in root.list_folders() if (match := STEP_FOLDER.fullmatch(name)) and not match[2]]
    return sorted(((int(match[1]), root.subfolder(name)) for match, name in found), key=lambda item: -item[0])


def check_complete(folder: S3Folder) -> FolderManifest:
    """Return the manifest of a folder in a bucket, after checking that all files exist with their sizes.

    Raises:
        CheckpointError: A file is missing or has another size.
    """
    manifest = read_folder_manifest(folder)
    sizes = folder.list_sizes()
    for name, content in manifest.files.items():
        if sizes.get(name) != content.n_bytes:
            found = f"has {sizes[name]} bytes" if name in sizes else "is missing"
            raise CheckpointError(f"{folder.url}/{name}: {found}, {content.n_bytes} were written")
    return manifest


def check_intact(folder: S3Folder) -> FolderManifest:
    """Return the manifest of a folder in a bucket, after checking that every file is as uploaded.

    The bytes themselves are not read: each object stores its content identity, and the store keeps objects unchanged.

    Raises:
        CheckpointError: A file is missing, or was put there by others.
    """
    manifest = check_complete(folder)
    for name, content in manifest.files.items():
        if folder.read_identity(name) != content.identity:
            raise CheckpointError(f"{folder.url}/{name}: is not what was uploaded")
    return manifest


def find_latest_remote(url: str | S3Folder) -> tuple[str | None, list[RejectedRemoteCheckpoint]]:
    """Find the newest complete checkpoint below an address, by its COMMIT and the sizes of its files.

    Returns:
        Its address, or None; and the newer ones that were rejected.

    Raises:
        ServiceError: The store refuses or cannot be reached.
    """
    rejected: list[RejectedRemoteCheckpoint] = []
    for _, folder, _ in _iter_complete_checkpoints(url, rejected):
        return folder.url, rejected
    return None, rejected


def read_latest_manifest(url: str | S3Folder) -> tuple[str, CheckpointManifest] | None:
    """Return address and manifest of the checkpoint that `find_latest_remote` finds.

    Raises:
        ServiceError: The store refuses or cannot be reached.
    """
    for _, folder, manifest in _iter_complete_checkpoints(url, []):
        return folder.url, _parse_manifest(folder, manifest)
    return None


def _parse_manifest(folder: S3Folder, manifest: FolderManifest) -> CheckpointManifest:
    return CheckpointManifest.from_bytes(dict(manifest.commit_objects)[MANIFEST], f"{folder.url}/{MANIFEST}")


def _iter_complete_checkpoints(
    url: str | S3Folder, rejected: list[RejectedRemoteCheckpoint], after_step: int = -1
) -> Iterator[tuple[int, S3Folder, FolderManifest]]:
    """Yield the complete checkpoints, newest first; append the others to `rejected`."""
    for step, folder in list_remote_steps(url):
        if step <= after_step:
            return
        try:
            manifest = check_complete(folder)
        except ServiceError:
            raise
        except CheckpointError as exc:
            rejected.append(RejectedRemoteCheckpoint(url=folder.url, reason=str(exc)))
        else:
            yield step, folder, manifest


def download(
    url: str | S3Folder,
    folder: str | os.PathLike[str],
    *,
    progress: files.ProgressCallback | None = None,
    check_stop: Callable[[], None] = lambda: None,
) -> DownloadReport:
    """Download a checkpoint, or another folder that was uploaded; every byte is verified.

    Args:
        url: `s3://bucket/folder`.
        folder: The folder to make. If the same intact checkpoint exists there, it is kept.
        progress: Called with the bytes downloaded, then those verified.
        check_stop: Called repeatedly; an exception from it ends the download, and the same call resumes it later.

    Returns:
        What was downloaded.

    Raises:
        DamagedError: The bucket does not hold what was uploaded.
        ServiceError: The store refuses or cannot be reached; the same call resumes later.
        CheckpointError: Nothing complete is there, something else exists at `folder`, or the disk fails.
    """
    source = url if isinstance(url, S3Folder) else S3Folder(url)
    return _download_folder(source, check_complete(source), Path(os.path.abspath(folder)), progress, check_stop)


def _download_folder(
    source: S3Folder,
    manifest: FolderManifest,
    target: Path,
    progress: files.ProgressCallback | None,
    check_stop: Callable[[], None],
) -> DownloadReport:
    start, reused = time.monotonic(), list(manifest.files)
    if os.path.lexists(target):
        if not _is_same_checkpoint(manifest, target, progress):
            raise CheckpointError(f"{target}: already exists and differs from {source.url}; choose another folder")
    else:
        reused = _download_new(source, manifest, target, progress, check_stop)
    downloaded = tuple(name for name in manifest.files if name not in reused)
    return DownloadReport(
        url=source.url,
        path=target,
        downloaded=downloaded,
        skipped=tuple(reused),
        n_bytes=sum(manifest.files[name].n_bytes for name in downloaded),
        seconds=time.monotonic() - start,
    )


def _download_new(
    source: S3Folder,
    manifest: FolderManifest,
    target: Path,
    progress: files.ProgressCallback | None,
    check_stop: Callable[[], None],
) -> list[str]:
    """Download, verify and rename; return the files that an earlier call had downloaded."""
    identity = xxhash.xxh3_64_hexdigest(manifest.commit_objects[-1][1])
    tmp = target.with_name(f".{target.name}.{identity}.download")
    with translate_os_errors("downloading", tmp):
        files.make_folders(target.parent)
        _make_real_folders(tmp.parent, tmp)
        with _lock_folder(tmp):
            reused = _download_missing(source, manifest, tmp, progress, check_stop)
            problems = _verify_downloaded(manifest, tmp, progress)
            if problems and reused:  # from an earlier call; the machine may have failed since
                for name in reused:
                    os.unlink(tmp / name)
                reused = _download_missing(source, manifest, tmp, progress, check_stop)
                problems = _verify_downloaded(manifest, tmp, progress)
            if problems:
                _remove_downloaded(manifest, tmp)
                raise DamagedError(f"{source.url}: is damaged: {'; '.join(problems)}")
            files.rename(tmp, target)
            files.fsync_folder(target.parent)
    return reused


def download_latest(
    url: str | S3Folder,
    root: str | os.PathLike[str],
    *,
    after_step: int = -1,
    validate_manifest: Callable[[CheckpointManifest], None] = lambda manifest: None,
    progress: files.ProgressCallback | None = None,
    check_stop: Callable[[], None] = lambda: None,
) -> tuple[DownloadReport | None, list[RejectedRemoteCheckpoint]]:
    """Download the newest intact checkpoint below an address into a folder of checkpoints.

    Args:
        url: `s3://bucket/folder`.
        root: The folder of checkpoints; an invalid checkpoint of the same step there is moved aside.
        after_step: Only steps above this one.
        validate_manifest: Called with the manifest before the download; an exception from it ends the call.
        progress: Called with the bytes downloaded, then those verified.
        check_stop: Called repeatedly; an exception from it ends the download, and the same call resumes it later.

    Returns:
        What was downloaded, or None if there is none; and the newer ones that were rejected, with the reasons.

    Raises:
        CheckpointError: As `download`, except for damage in the bucket.
    """
    rejected: list[RejectedRemoteCheckpoint] = []
    for step, source, manifest in _iter_complete_checkpoints(url, rejected, after_step):
        validate_manifest(_parse_manifest(source, manifest))
        target = Path(os.path.abspath(root)) / step_folder_name(step)
        try:
            if os.path.lexists(target) and not _is_same_checkpoint(manifest, target, progress):
                _move_aside(target)
            return _download_folder(source, manifest, target, progress, check_stop), rejected
        except DamagedError as exc:
            rejected.append(RejectedRemoteCheckpoint(url=source.url, reason=str(exc), damaged=True))
    return None, rejected


def _move_aside(target: Path) -> None:
    """Move an invalid checkpoint of the same step aside; a valid one is an error."""
    if (target / COMMIT).is_file() and verify(target).is_loadable:
        raise CheckpointError(f"{target}: another valid checkpoint of this step already exists")
    with translate_os_errors("moving aside", target):
        files.rename(target, target.with_name(f"{target.name}.aside-{random_id()}"))
        files.fsync_folder(target.parent)


def _is_same_checkpoint(manifest: FolderManifest, target: Path, progress: files.ProgressCallback | None) -> bool:
    if not manifest.is_checkpoint or not (target / COMMIT).is_file():
        return False
    with translate_os_errors("comparing", target):
        commit = files.read_bounded(target / COMMIT, MAX_COMMIT_BYTES)
    return commit == manifest.commit_objects[-1][1] and verify(target, progress=progress).is_loadable


def _download_missing(
    source: S3Folder,
    manifest: FolderManifest,
    tmp: Path,
    progress: files.ProgressCallback | None,
    check_stop: Callable[[], None],
) -> list[str]:
    """Download missing files; return those that were already there."""
    reused = [
        name
        for name, content in manifest.files.items()
        if files.is_real_file(tmp / name) and (tmp / name).stat().st_size == content.n_bytes
    ]
    files.remove_temp_files(tmp / PARTIAL_FILE)
    byte_progress = ByteProgress(manifest.n_bytes, progress, check_stop)
    byte_progress.add(sum(manifest.files[name].n_bytes for name in reused))
    required, free = manifest.n_bytes - byte_progress.done, shutil.disk_usage(tmp).free
    if required > free:
        raise CheckpointError(
            f"{tmp}: {format_bytes(required)} must be downloaded and {format_bytes(free)} are free; free some space"
        )
    for name in sorted(set(manifest.files) - set(reused)):
        _make_real_folders(tmp, (tmp / name).parent)
        part = files.temp_path(tmp / PARTIAL_FILE)
        source.download_file(name, part, byte_progress.add)
        files.rename(part, tmp / name)
        files.fsync_folder((tmp / name).parent)
    if manifest.is_checkpoint:
        for name, data in manifest.commit_objects:
            files.remove_temp_files(tmp / name)
            (tmp / name).unlink(missing_ok=True)
            files.write_file(tmp / name, data)
    return reused


def _make_real_folders(root: Path, folder: Path) -> None:
    """Make a folder below `root`, and those between; raise a CheckpointError if one of them is a link."""
    files.make_folders(folder)
    while folder != root:
        if folder.is_symlink():
            raise CheckpointError(f"{folder}: is a link, and nothing is downloaded through one: remove it")
        folder = folder.parent


def _verify_downloaded(manifest: FolderManifest, tmp: Path, progress: files.ProgressCallback | None) -> list[str]:
    """Verify everything that was downloaded; return the problems."""
    if manifest.is_checkpoint:
        return list(verify(tmp, progress=progress).problems)
    byte_progress = ByteProgress(manifest.n_bytes, progress)
    return [
        f"{name}: its bytes have changed since they were uploaded"
        for name, content in manifest.files.items()
        if digest_file(tmp / name, byte_progress.add) != content
    ]


def _remove_downloaded(manifest: FolderManifest, tmp: Path) -> None:
    """Remove the download of a folder that is damaged in the bucket, so that it does not fill the disk."""
    for name in (*manifest.files, *(name for name, _ in manifest.commit_objects)):
        (tmp / name).unlink(missing_ok=True)
    folders = {folder for name in manifest.files for folder in (tmp / name).parents if folder.is_relative_to(tmp)}
    for folder in sorted(folders, reverse=True):  # inner folders first
        os.rmdir(folder)


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder; it ends with the process."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise CheckpointError(f"{folder}: another process is downloading it: wait for it") from exc
        yield
    finally:
        os.close(descriptor)
