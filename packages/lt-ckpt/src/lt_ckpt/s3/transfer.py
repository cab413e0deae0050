"""Upload and download of a checkpoint or another folder, and the search for the newest checkpoint in a bucket.

lt-data's upload and download do the work: a whole object is not sent again, COMMIT is written last, every downloaded
byte is verified before the folder gets its name, and the same call resumes one that was cut off. A checkpoint's list is
its manifest (`checkpoint_list`); the newest one is that of the highest step, as on a disk, and incomplete ones are
rejected with the reason.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lt_ckpt import files
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.finished_folder import list_finished_files, verify_hash_list
from lt_ckpt.folders import COMMIT, STEP_FOLDER, random_id, step_folder_name
from lt_ckpt.integrity import verify
from lt_ckpt.manifest import CheckpointManifest
from lt_ckpt.s3.checkpoint_list import list_checkpoint, read_remote_list
from lt_data.errors import DataError
from lt_data.progress import no_progress
from lt_data.remote import download as remote_download
from lt_data.remote import upload as remote_upload
from lt_data.remote.file_list import DamagedError, FileList
from lt_data.remote.s3_folder import RemoteError, S3Folder


@dataclass(frozen=True, kw_only=True)
class RejectedRemoteCheckpoint:
    """Folder in a bucket with a checkpoint's name that was rejected, and the reason."""

    url: str
    reason: str
    damaged: bool = False
    """It is complete by the sizes, but its bytes differ from those that were uploaded."""


def upload(
    folder: str | os.PathLike[str],
    url: str | S3Folder,
    *,
    overwrite: bool = False,
    progress: files.ProgressCallback = no_progress,
) -> remote_upload.Uploaded:
    """Upload a checkpoint or another folder; a link in it is refused.

    Args:
        folder: A checkpoint, or another folder of files.
        url: `s3://bucket/folder`: the folder to make.
        overwrite: Replace what is there, and send every file.
        progress: Called with the bytes sent; an exception from it ends the upload.

    Raises:
        CheckpointError: It is an unfinished checkpoint, a folder of checkpoints, or has no files.
        lt_data.DataError: Something else is there, the local bytes differ from those that were written, or S3 refuses
            or cannot be reached.
    """
    path = Path(folder)
    list_finished_files(path)
    if (path / COMMIT).exists():
        return remote_upload.upload(path, url, files=list_checkpoint(path), overwrite=overwrite, progress=progress)
    verify_hash_list(path)
    return remote_upload.upload(path, url, overwrite=overwrite, progress=progress)


def download(
    url: str | S3Folder, folder: str | os.PathLike[str], *, progress: files.ProgressCallback = no_progress
) -> remote_download.Downloaded:
    """Download a checkpoint, or another folder that was uploaded; every byte is verified.

    Args:
        url: `s3://bucket/folder`.
        folder: The folder to make; if the very same is there, it is kept.
        progress: Called with the bytes downloaded; an exception from it ends the download.

    Raises:
        lt_data.DataError: Nothing complete is there, the bytes are not those that were uploaded, S3 refuses or cannot
            be reached, something else exists at `folder`, or the disk fails.
    """
    source = url if isinstance(url, S3Folder) else S3Folder(url)
    found = read_remote_list(source)
    listed = None if found is None else found[0]
    return remote_download.download(source, Path(folder), files=listed, progress=progress)


def list_remote_steps(root: S3Folder) -> list[tuple[int, S3Folder]]:
    """Return the folders with a checkpoint's name, newest step first, without reading them."""
    found = [(match, name) for name in root.folders() if (match := STEP_FOLDER.fullmatch(name)) and not match[2]]
    return sorted(((int(match[1]), root.subfolder(name)) for match, name in found), key=lambda item: -item[0])


def read_complete(folder: S3Folder) -> tuple[FileList, CheckpointManifest]:
    """Return list and manifest of a checkpoint in a bucket, after checking that all files are there with their sizes.

    Raises:
        CheckpointError: It is not committed, its manifest is damaged, or a file is missing or has another size.
        RemoteError: S3 refuses or cannot be reached.
    """
    found = read_remote_list(folder)
    if found is None:
        raise CheckpointError(f"{folder.url}: there is no {COMMIT}: no checkpoint, or an unfinished upload")
    sizes = folder.objects()
    for name, file in found[0].files.items():
        if sizes.get(name) != file.n_bytes:
            has = f"has {sizes[name]} bytes" if name in sizes else "is missing"
            raise CheckpointError(f"{folder.url}/{name}: {has}, {file.n_bytes} were written")
    return found


def find_latest_remote(url: str | S3Folder) -> tuple[str, CheckpointManifest] | None:
    """Return address and manifest of the newest complete checkpoint below an address.

    Raises:
        RemoteError: S3 refuses or cannot be reached.
    """
    for folder, _, manifest in _iter_complete(url, [], -1):
        return folder.url, manifest
    return None


def _iter_complete(
    url: str | S3Folder, rejected: list[RejectedRemoteCheckpoint], after_step: int
) -> Iterator[tuple[S3Folder, FileList, CheckpointManifest]]:
    """Yield the complete checkpoints, newest first; append the others to `rejected`."""
    for step, folder in list_remote_steps(url if isinstance(url, S3Folder) else S3Folder(url)):
        if step <= after_step:
            return
        try:
            found = read_complete(folder)
        except RemoteError:
            raise
        except (CheckpointError, DataError) as exc:
            rejected.append(RejectedRemoteCheckpoint(url=folder.url, reason=str(exc)))
        else:
            yield folder, *found


def download_latest(
    url: str | S3Folder,
    root: str | os.PathLike[str],
    *,
    after_step: int = -1,
    progress: files.ProgressCallback = no_progress,
) -> tuple[remote_download.Downloaded | None, list[RejectedRemoteCheckpoint]]:
    """Download the newest intact checkpoint below an address into a folder of checkpoints.

    Args:
        url: `s3://bucket/folder`.
        root: The folder of checkpoints; an invalid checkpoint of the same step there is moved aside.
        after_step: Only steps above this one.
        progress: Called with the bytes downloaded; an exception from it ends the download.

    Returns:
        What was downloaded, or None if there is none; and the newer ones that were rejected, with the reasons.

    Raises:
        CheckpointError: Another valid checkpoint of that step is here.
        lt_data.DataError: S3 refuses or cannot be reached, or the disk fails.
    """
    rejected: list[RejectedRemoteCheckpoint] = []
    for source, listed, manifest in _iter_complete(url, rejected, after_step):
        target = Path(os.path.abspath(root)) / step_folder_name(manifest.step)
        if os.path.lexists(target) and not all(listed.is_at(target / name, name) for name in listed.files):
            _move_aside(target)
        try:
            return remote_download.download(source, target, files=listed, progress=progress), rejected
        except DamagedError as exc:
            rejected.append(RejectedRemoteCheckpoint(url=source.url, reason=f"is damaged: {exc}", damaged=True))
            for left in target.parent.glob(f".{target.name}.*.download"):
                shutil.rmtree(left)
    return None, rejected


def _move_aside(target: Path) -> None:
    """Move an invalid checkpoint of the same step aside; a valid one is an error."""
    if (target / COMMIT).is_file() and verify(target).is_loadable:
        raise CheckpointError(f"{target}: another valid checkpoint of this step already exists")
    with translate_os_errors("moving aside", target):
        files.rename(target, target.with_name(f"{target.name}.aside-{random_id()}"))
        files.fsync_folder(target.parent)


def check_upload_access(root: S3Folder) -> None:
    """Check that uploads to an address will work: write, list, read and delete a small object there.

    Raises:
        RemoteError: They will not; the message names the reason.
    """
    name, content = f".lt-preflight-{random_id()}", b"written by lt-ckpt to test the address; may be deleted\n"
    root.write(name, content)
    found = name in root.objects() and root.read(name, 2**16) == content
    root.delete([name])
    if not found:
        raise RemoteError(f"{root.url}: an object that was written there cannot be read back")
