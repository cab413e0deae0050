"""Downloading a token store, or any folder that was uploaded, to where it appears whole or not at all.

Files come into a folder beside the target whose name holds a hash of the list of files, so that what an earlier call
left is taken up only for the very same content:

    .NAME.<hash>.download/files/...    files that are complete
    .NAME.<hash>.download/parts/...    files on their way: fetched again by the next call

boto3's transfer manager fetches a file in ranges and asks again for those that do not come. A file is read once more
and its SHA-256 compared before it counts as complete, also one that an earlier call left; one that differs is fetched
again. Of a store that other programs have copied the hashes are those of its manifest, and its packs are checked by
their fingerprints.

Cost: each byte is fetched and written once, and read once. Memory: two blocks for each connection.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lt_data.errors import DataError
from lt_data.file_names import to_local_name
from lt_data.packing.packs import verify_packs
from lt_data.progress import Progress, no_progress
from lt_data.remote.contents import BLOCK_BYTES
from lt_data.remote.parcel import RemoteFile, RemoteParcel, of_bucket
from lt_data.remote.s3 import S3Folder, S3Options, Transfers
from lt_data.remote.threads import Meter, pool_of
from lt_data.storage import (
    find_link,
    fsync,
    fsync_folder,
    make_folder_synced,
    open_regular,
    read_regular,
    translate_os_errors,
    write_file,
)
from lt_data.store.manifest import MANIFEST_FILE as MANIFEST
from lt_data.store.token_store import TokenStore

_TRIES = 4  # for a file that came with other bytes


@dataclass(frozen=True, kw_only=True)
class Downloaded:
    """What a download did.

    Attributes:
        path: the folder.
        files: files in it.
        n_bytes: bytes in it.
        fetched: bytes that were fetched; the others were there already.
    """

    path: Path
    files: int
    n_bytes: int
    fetched: int


def download(
    url: str,
    folder: str | Path,
    *,
    options: S3Options | None = None,
    progress: Progress = no_progress,
    checking: Progress = no_progress,
) -> Downloaded:
    """Download a token store or another folder that was uploaded; every byte is verified.

    Args:
        url: `s3://bucket/folder`.
        folder: the folder to make. If the very same is there already, nothing is fetched.
        options: how S3 is spoken to.
        progress: called with the bytes fetched.
        checking: called with the bytes read to verify what is there already.

    Returns:
        What was fetched.

    Raises:
        RemoteError: S3 refuses or cannot be reached; the same call goes on later.
        DataError: nothing whole is there or it is damaged, something else stands at `folder`, or the disk fails.
    """
    parcel = of_bucket(S3Folder(url, options))
    if parcel.problems:
        raise DataError(f"{url}: {len(parcel.problems)} files are not as uploaded: {parcel.problems[0]}; upload again")
    target = Path(os.path.abspath(folder))
    n_files, n_bytes = len(parcel.files) + (parcel.manifest is not None), parcel.n_bytes + len(parcel.manifest or b"")
    if os.path.lexists(target) and (target.is_symlink() or not target.is_dir() or any(target.iterdir())):
        _expect_same(parcel, target, checking)
        return Downloaded(path=target, files=n_files, n_bytes=n_bytes, fetched=0)
    building = target.with_name(f".{target.name}.{parcel.identity[:16]}.download")
    with translate_os_errors("write", building):
        make_folder_synced(target.parent)
        if link := find_link(building):
            raise DataError(f"{link}: a symbolic link; remove it, or choose another folder")
        (building / "files").mkdir(parents=True, exist_ok=True)
        (building / "parts").mkdir(exist_ok=True)
    with _locked(building):
        fetched = _fill(parcel, building, progress, checking)
        _complete(parcel, building, target)
    return Downloaded(path=target, files=n_files, n_bytes=n_bytes, fetched=fetched)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; it ends with the process."""
    with translate_os_errors("open", folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise DataError(f"{folder}: another process is downloading it: wait for that one") from exc
        yield
    finally:
        os.close(descriptor)


def _expect_same(parcel: RemoteParcel, target: Path, checking: Progress) -> None:
    """Raise unless the folder is there already, byte for byte."""
    refused = DataError(
        f"{target}: is there already and is not what lies at {parcel.source.url}; choose another folder"
    )
    if not target.is_dir():
        raise refused
    wanted = {to_local_name(name): file.n_bytes for name, file in parcel.files.items()}
    if parcel.manifest is not None:
        wanted[MANIFEST] = len(parcel.manifest)
    for name, size in wanted.items():
        path = target / name
        if not path.is_file() or path.stat().st_size != size:
            raise refused
    if parcel.manifest is not None and read_regular(target / MANIFEST) != parcel.manifest:
        raise refused
    if _find_bad(parcel.files, target, checking):
        raise refused


def _fill(parcel: RemoteParcel, building: Path, progress: Progress, checking: Progress) -> int:
    """Fetch and verify what is missing; return how many bytes came."""
    files = building / "files"
    left = {name: file for name, file in parcel.files.items() if _is_there(files / to_local_name(name), file)}
    for name in _find_bad(left, files, checking):
        with translate_os_errors("remove", files):
            (files / to_local_name(name)).unlink()
        del left[name]
    missing = {name: file for name, file in parcel.files.items() if name not in left}
    need, free = sum(file.n_bytes for file in missing.values()), shutil.disk_usage(building).free
    if need > free:
        raise DataError(f"{building}: {need} bytes have to be fetched and {free} are free; free some space")
    meter = Meter(need, progress)
    with parcel.source.transfers() as transfers, pool_of(parcel.source.options.connections) as pool:
        jobs = [pool.submit(_fetch, transfers, name, file, building, meter) for name, file in missing.items()]
        for done in as_completed(jobs):
            done.result()
    return need


def _is_there(path: Path, file: RemoteFile) -> bool:
    with translate_os_errors("look at", path):
        return file.sha256 is not None and path.is_file() and path.stat().st_size == file.n_bytes


def _fetch(transfers: Transfers, name: str, file: RemoteFile, building: Path, meter: Meter) -> None:
    """Fetch a file and verify it."""
    path, part = building / "files" / to_local_name(name), building / "parts" / _part_name(name)
    for _ in range(_TRIES):
        with translate_os_errors("write", part):
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            with os.fdopen(descriptor, "wb") as target:
                transfers.download(name, target, file.n_bytes, meter.add)
                target.flush()
                fsync(descriptor)
        if file.sha256 is None or _sha256(part) == file.sha256:
            with translate_os_errors("write", path):
                path.parent.mkdir(parents=True, exist_ok=True)
                part.rename(path)
            return
    raise DataError(
        f"{transfers.url}/{name}: its bytes are not those that were uploaded, {_TRIES} times over; upload it again"
    )


def _part_name(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def _sha256(path: Path, count: Callable[[int], None] = lambda _: None) -> str:
    digest = hashlib.sha256()
    with translate_os_errors("read", path), open_regular(path) as source:
        while block := source.read(4 * BLOCK_BYTES):
            digest.update(block)
            count(len(block))
    return digest.hexdigest()


def _find_bad(files: Mapping[str, RemoteFile], folder: Path, checking: Progress) -> list[str]:
    """Read every file whose SHA-256 is known; return those that have another."""
    known = [name for name, file in files.items() if file.sha256]
    meter = Meter(sum(files[name].n_bytes for name in known), checking)
    with pool_of(os.cpu_count() or 1) as pool:
        found = pool.map(lambda name: _sha256(folder / to_local_name(name), meter.add), known)
        return [name for name, sha256 in zip(known, found, strict=True) if sha256 != files[name].sha256]


def _complete(parcel: RemoteParcel, building: Path, target: Path) -> None:
    files = building / "files"
    if parcel.manifest is not None:
        if not (files / MANIFEST).exists() or read_regular(files / MANIFEST) != parcel.manifest:
            (files / MANIFEST).unlink(missing_ok=True)
            write_file(files / MANIFEST, parcel.manifest)
        if any(file.sha256 is None for file in parcel.files.values()):
            verify_packs(TokenStore(files))
    with translate_os_errors("write", target):
        for folder, _, _ in os.walk(files, topdown=False):
            fsync_folder(Path(folder))
        files.rename(target)
        fsync_folder(target.parent)
        shutil.rmtree(building)
