"""Downloading a folder from S3 to where it appears whole or not at all.

Files come into a folder beside the target whose name holds a hash of the list of files, `.NAME.<hash>.download`, so
that what an earlier call left is taken up only for the very same content. Each file is read once more and compared with
the list before it counts, also one that an earlier call left; the folder is synced, and renamed at the end.

Cost: each byte is fetched and written once, and read once.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lt_data.errors import DataError
from lt_data.progress import Progress, no_progress
from lt_data.remote.file_list import (
    LIST,
    MAX_LIST_BYTES,
    DamagedError,
    FileList,
    ListedFile,
    decode_list,
    store_hashes,
)
from lt_data.remote.s3_folder import S3Folder
from lt_data.remote.threads import Meter, pool_of
from lt_data.storage import find_link, fsync, fsync_folder, fsync_tree, make_folder_synced, translate_os_errors
from lt_data.store.manifest import MANIFEST_FILE as MANIFEST

_FILES = 4  # at a time; each by several connections


@dataclass(frozen=True, kw_only=True)
class Downloaded:
    """What a download did.

    Attributes:
        path: the folder.
        files: files in it.
        n_bytes: bytes in it.
        fetched: the files that were fetched; the others were there already.
    """

    path: Path
    files: int
    n_bytes: int
    fetched: tuple[str, ...]


def read_list(source: S3Folder) -> FileList:
    """Return the list of the files of a folder in S3: the one that `upload` leaves.

    Of a token store that another program has copied, the files that its manifest names: all but packs.

    Raises:
        RemoteError: S3 refuses or cannot be reached.
        DataError: nothing whole is there: no upload has ended.
    """
    content = source.read(LIST, MAX_LIST_BYTES)
    if content is not None:
        return decode_list(content, f"{source.url}/{LIST}")
    content, at = source.read(MANIFEST, MAX_LIST_BYTES), f"{source.url}/{MANIFEST}"
    hashes = {} if content is None else store_hashes(content, at)
    if content is None or not hashes:
        raise DataError(f"{source.url}: there is no {LIST}: an upload that has not ended, or something else")
    sizes = source.objects()
    files = {name: ListedFile(sizes.get(name, -1), sha256) for name, sha256 in hashes.items()}
    files[MANIFEST] = ListedFile(len(content), hashlib.sha256(content).hexdigest())
    return FileList(source=at, files=files, last=(MANIFEST,))


def check_whole(source: S3Folder, listed: FileList) -> None:
    """Raise DamagedError unless every file of a list is there with its size: one request for 1000 objects."""
    there = source.objects()
    if wrong := [name for name, file in listed.files.items() if there.get(name) != file.n_bytes]:
        raise DamagedError(
            f"{source.url}: {len(wrong)} objects are missing or cut ({wrong[0]}); upload the folder again"
        )


def download(
    url: str | S3Folder, folder: str | Path, *, files: FileList | None = None, progress: Progress = no_progress
) -> Downloaded:
    """Download a folder that was uploaded; every byte is verified.

    Args:
        url: `s3://bucket/folder`.
        folder: the folder to make. If the very same is there already, nothing is fetched.
        files: its list, if it is another than the one that `upload` leaves.
        progress: called with the bytes fetched; an exception from it ends the download, and the same call goes on.

    Returns:
        What was fetched.

    Raises:
        UnreachableError: S3 cannot be reached; the same call goes on later.
        RemoteError: S3 refuses.
        DamagedError: an object is not what the list says.
        DataError: nothing whole is there, something else stands at `folder`, or the disk fails.
    """
    source, target = url if isinstance(url, S3Folder) else S3Folder(url), Path(os.path.abspath(folder))
    listed = read_list(source) if files is None else files
    if os.path.lexists(target) and (target.is_symlink() or not target.is_dir() or any(target.iterdir())):
        if target.is_symlink() or _missing(listed, target):
            raise DataError(f"{target}: is there already and is not what lies at {source.url}; choose another folder")
        fetched = list[str]()
    else:
        check_whole(source, listed)
        building = target.with_name(f".{target.name}.{hashlib.sha256(listed.encode()).hexdigest()[:16]}.download")
        with translate_os_errors("write", building):
            make_folder_synced(target.parent)
            building.mkdir(exist_ok=True)
            if link := find_link(building):
                raise DataError(f"{link}: a symbolic link; remove it, or choose another folder")
            with _locked(building):
                fetched = _fill(source, listed, building, progress)
                fsync_tree(building)
                building.rename(target)
                fsync_folder(target.parent)
    return Downloaded(path=target, files=len(listed.files), n_bytes=listed.n_bytes, fetched=tuple(fetched))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; it ends with the process."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{folder}: another process is downloading it: wait for that one") from None
        yield
    finally:
        os.close(descriptor)


def _missing(listed: FileList, folder: Path) -> list[str]:
    """Return the files of a list that a folder has not got, or with other bytes; all are read."""
    with pool_of(os.cpu_count() or 1) as pool:
        found = pool.map(lambda name: listed.is_at(folder / name, name), listed.files)
        return [name for name, is_there in zip(listed.files, found, strict=True) if not is_there]


def _fill(source: S3Folder, listed: FileList, building: Path, progress: Progress) -> list[str]:
    """Fetch and verify what is missing; return the names of it."""
    missing = _missing(listed, building)
    need, free = sum(listed.files[name].n_bytes for name in missing), shutil.disk_usage(building).free
    if need > free:
        raise DataError(f"{building}: {need} bytes have to be fetched and {free} are free; free some space")
    meter = Meter(need, progress)
    with pool_of(_FILES) as pool:
        jobs = [pool.submit(fetch_file, source, listed, name, building / name, meter) for name in missing]
        for job in as_completed(jobs):
            job.result()
    return missing


def fetch_file(source: S3Folder, listed: FileList, name: str, path: Path, meter: Meter) -> None:
    """Download one file of a list and verify it; it is on the disk when this returns, and gone if it is damaged.

    Raises:
        DamagedError: the object is not what the list says.
    """
    with translate_os_errors("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
            source.download_file(name, file, meter.add)
            file.flush()
            fsync(file.fileno())
        if not listed.is_at(path, name):
            path.unlink()
            raise DamagedError(f"{source.url}/{name}: its bytes are not those that were uploaded; upload it again")
