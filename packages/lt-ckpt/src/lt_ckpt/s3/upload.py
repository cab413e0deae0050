"""Upload of a checkpoint or another folder; a partial upload is never mistaken for a complete one.

    1. objects that exist with the right size and identity are kept
    2. if anything must change, the commit object (COMMIT) is deleted first
    3. the files are uploaded, each checked against its hash while it is read
    4. manifest.json, and last COMMIT

The same call resumes an interrupted upload; parts of objects that a killed upload left are aborted then. A different
checkpoint at the address is not touched unless requested.

Cost: one read of what is uploaded (two of a folder that is not a checkpoint), and one request per existing file.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lt_ckpt import files
from lt_ckpt.errors import CheckpointError
from lt_ckpt.finished_folder import COMMIT_OBJECTS
from lt_ckpt.folders import random_id
from lt_ckpt.s3.byte_progress import ByteProgress
from lt_ckpt.s3.client import S3Folder, ServiceError
from lt_ckpt.s3.folder_manifest import manifest_from_folder, read_folder_manifest


class DestinationExistsError(CheckpointError):
    """Different complete folder at the address."""


@dataclass(frozen=True, kw_only=True)
class UploadReport:
    """Result of an upload.

    Attributes:
        url: Address of the folder.
        uploaded: Files that were uploaded.
        skipped: Files that were already there.
        n_bytes: Bytes that were uploaded.
        seconds: Duration.
    """

    url: str
    uploaded: tuple[str, ...]
    skipped: tuple[str, ...]
    n_bytes: int
    seconds: float


def upload(
    folder: str | os.PathLike[str],
    url: str | S3Folder,
    *,
    overwrite: bool = False,
    force: bool = False,
    dry_run: bool = False,
    progress: files.ProgressCallback | None = None,
    check_stop: Callable[[], None] = lambda: None,
) -> UploadReport:
    """Upload a folder; existing objects are not uploaded again.

    Args:
        folder: A checkpoint, or another folder of files.
        url: `s3://bucket/folder`: the folder to make.
        overwrite: Replace a different complete folder at the address.
        force: Upload everything, also what seems to exist: a download has found damage in it.
        dry_run: Change nothing: tell what would be uploaded.
        progress: Called with the bytes that are there so far and in all.
        check_stop: Called repeatedly; an exception from it ends the upload.

    Returns:
        What was uploaded.

    Raises:
        DestinationExistsError: A different complete folder exists at the address.
        DamagedError: The local bytes differ from those that were written.
        ServiceError: The store refuses or cannot be reached.
        CheckpointError: Anything else. In all cases but the first, nothing at the address is complete unless it is
            unchanged.
    """
    start = time.monotonic()
    path = Path(folder)
    target = url if isinstance(url, S3Folder) else S3Folder(url)
    manifest = manifest_from_folder(path, lambda _: check_stop())
    sizes = target.list_sizes()

    def exists_with(name: str, data: bytes) -> bool:
        return sizes.get(name) == len(data) and target.read(name, len(data)) == data

    present_commits = [name for name in COMMIT_OBJECTS if name in sizes]
    is_same = present_commits == [manifest.commit_objects[-1][0]] and exists_with(*manifest.commit_objects[-1])
    if present_commits and not is_same and not overwrite:
        raise DestinationExistsError(
            f"{target.url}: a different folder exists there; choose another address, or replace it with --overwrite"
        )
    byte_progress = ByteProgress(manifest.n_bytes, progress, check_stop)
    missing: list[str] = []
    for name, content in manifest.files.items():
        if not force and sizes.get(name) == content.n_bytes and target.read_identity(name) == content.identity:
            byte_progress.add(content.n_bytes)
        else:
            missing.append(name)
    if not dry_run and (missing or not all(exists_with(name, data) for name, data in manifest.commit_objects)):
        old_names = _list_existing_names(target) if present_commits and not is_same else set()
        target.delete(present_commits)
        target.delete(old_names - set(manifest.files))
        target.abort_multipart_uploads(set(missing).__contains__)
        for name in missing:
            target.upload_file(name, path / name, manifest.files[name], byte_progress.add)
        for name, data in manifest.commit_objects:
            check_stop()
            target.write(name, data)
    return UploadReport(
        url=target.url,
        uploaded=tuple(missing),
        skipped=tuple(name for name in manifest.files if name not in missing),
        n_bytes=sum(manifest.files[name].n_bytes for name in missing),
        seconds=time.monotonic() - start,
    )


def _list_existing_names(target: S3Folder) -> set[str]:
    """Return the objects of the complete folder at the address, as far as its manifest tells."""
    try:
        manifest = read_folder_manifest(target)
    except ServiceError:
        raise
    except CheckpointError:  # its own list is damaged, so its content is unknown
        return set()
    return {*manifest.files, *(name for name, _ in manifest.commit_objects)}


def check_upload_access(url: str | S3Folder) -> None:
    """Check that uploads to an address will work: write, list, read and delete a small object there.

    Raises:
        CheckpointError: They will not; the message names the reason.
    """
    target = url if isinstance(url, S3Folder) else S3Folder(url)
    name, data = f".lt-preflight-{random_id()}", b"written by lt-ckpt to test the address; may be deleted\n"
    target.write(name, data)
    found = name in target.list_sizes() and target.read(name, 2**16) == data
    target.delete([name])
    if not found:
        raise CheckpointError(f"{target.url}: an object that was written there cannot be read back")
