"""Downloading a token store, or any folder that was uploaded, to where it appears whole or not at all.

Files come into a folder beside the target whose name holds a hash of the list of files, so that what an earlier call
left is taken up only for the very same content:

    .NAME.<hash>.download/files/...    files that are complete
    .NAME.<hash>.download/parts/...    files on their way: blocks whose hash is right are not fetched again

Each block is compared with the listing when it arrives, and asked for again where it differs; in the end each file is
read once more and its SHA-256 compared, before the folder gets its name. A store that other programs have copied there
has no listing: its files are checked as wholes, by its manifest, and its packs by their fingerprints.

Cost: each byte is fetched and written once, and read once. Memory: 8 MiB for each connection.
"""

import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lt_data.errors import DataError
from lt_data.file_names import to_local_name
from lt_data.packing.packs import verify_packs
from lt_data.progress import Progress, no_progress
from lt_data.remote.blocks import fetch_blocks, runs
from lt_data.remote.contents import BLOCK_BYTES, block_digest
from lt_data.remote.parcel import RemoteFile, RemoteParcel, of_bucket
from lt_data.remote.s3 import S3Folder, S3Options
from lt_data.remote.threads import Meter, pool_of
from lt_data.storage import find_link, fsync, fsync_folder, make_folder_synced, translate_os_errors, write_file
from lt_data.store.manifest import MANIFEST_FILE as MANIFEST
from lt_data.store.token_store import TokenStore


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
        checking: called with the bytes read again to verify them.

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
        fetched = _fill(parcel, building, progress)
        if bad := _bad(parcel, building / "files", checking):  # an earlier call left them, or this disk is failing
            for name in bad:
                (building / "files" / to_local_name(name)).unlink()
            fetched += _fill(parcel, building, progress)
            bad = _bad(parcel, building / "files", checking)
        if bad:
            for name in bad:
                (building / "files" / to_local_name(name)).unlink()
            raise DataError(f"{url}: {bad[0]} is not what was uploaded (its SHA-256 differs); upload it again")
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
    if parcel.manifest is not None and (target / MANIFEST).read_bytes() != parcel.manifest:
        raise refused
    if _bad(parcel, target, checking):
        raise refused


def _fill(parcel: RemoteParcel, building: Path, progress: Progress) -> int:
    """Fetch what is missing; gives back how many bytes came."""
    jobs = [job for name, file in parcel.files.items() if (job := _Job.of(name, file, building)) is not None]
    need, free = sum(job.n_bytes for job in jobs), shutil.disk_usage(building).free
    if need > free:
        raise DataError(f"{building}: {need} bytes have to be fetched and {free} are free; free some space")
    meter = Meter(need, progress)
    connections = parcel.source.options.connections
    room = threading.BoundedSemaphore(2 * connections)
    failed: list[BaseException] = []
    futures: list[Future[None]] = []
    with pool_of(connections) as pool:
        for job in jobs:
            for first, last in job.ranges or ((0, 0),):
                room.acquire()
                if failed:
                    raise failed[0]
                future = pool.submit(job.fetch, parcel.source, first, last, meter)
                future.add_done_callback(lambda done: (failed.extend(_error_of(done)), room.release()))
                futures.append(future)
    for future in futures:
        future.result()
    return need


def _error_of(done: Future[None]) -> list[BaseException]:
    error = None if done.cancelled() else done.exception()
    return [] if error is None else [error]


class _Job:
    """A file to fetch: the ranges of blocks that are missing, written in any order; the last one done completes it."""

    def __init__(self, name: str, file: RemoteFile, building: Path) -> None:
        self.name, self.file = name, file
        self.path = building / "files" / to_local_name(name)
        self.part = building / "parts" / hashlib.sha256(name.encode()).hexdigest()[:32]
        n_blocks = -(-file.n_bytes // BLOCK_BYTES)
        missing = (
            [number for number in range(n_blocks) if not self._there(number)] if self._kept() else [*range(n_blocks)]
        )
        self.n_bytes = sum(min(BLOCK_BYTES, file.n_bytes - number * BLOCK_BYTES) for number in missing)
        self.ranges = runs(missing)
        self._left = max(len(self.ranges), 1)
        self._lock = threading.Lock()

    @classmethod
    def of(cls, name: str, file: RemoteFile, building: Path) -> "_Job | None":
        """The job of a file; None where it is complete, and its SHA-256 will tell whether it is right."""
        path = building / "files" / to_local_name(name)
        with translate_os_errors("look at", path):
            if file.sha256 is not None and path.is_file() and path.stat().st_size == file.n_bytes:
                return None
        return cls(name, file, building)

    def _kept(self) -> bool:
        return self.file.listed is not None and self.part.is_file()

    def _there(self, number: int) -> bool:
        listed = self.file.listed
        assert listed is not None
        with translate_os_errors("read", self.part), self.part.open("rb") as file:
            file.seek(number * BLOCK_BYTES)
            return block_digest(file.read(min(BLOCK_BYTES, self.file.n_bytes - number * BLOCK_BYTES))) == listed.block(
                number
            )

    def fetch(self, source: S3Folder, first: int, last: int, meter: Meter) -> None:
        """Fetch the blocks [first, last) and write them."""
        begin, end = first * BLOCK_BYTES, min(last * BLOCK_BYTES, self.file.n_bytes)
        with translate_os_errors("write", self.part):
            descriptor = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                if end > begin:
                    data = fetch_blocks(source, self.name, self.file, begin, end)
                    _write_at(descriptor, data, begin)
                    meter.add(end - begin)
                with self._lock:
                    self._left -= 1
                    done = not self._left
                if done:
                    os.ftruncate(descriptor, self.file.n_bytes)
                    fsync(descriptor)
            finally:
                os.close(descriptor)
        if done:
            with translate_os_errors("write", self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.part.rename(self.path)


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _bad(parcel: RemoteParcel, folder: Path, checking: Progress) -> list[str]:
    """Read every file whose SHA-256 is known; gives back those that have another."""
    meter = Meter(sum(file.n_bytes for file in parcel.files.values() if file.sha256), checking)

    def differs(name: str) -> bool:
        file, path = parcel.files[name], folder / to_local_name(name)
        digest = hashlib.sha256()
        with translate_os_errors("read", path), path.open("rb", buffering=0) as source:
            while block := source.read(4 * BLOCK_BYTES):
                digest.update(block)
                meter.add(len(block))
        return digest.hexdigest() != file.sha256

    known = [name for name, file in parcel.files.items() if file.sha256]
    with pool_of(os.cpu_count() or 1) as pool:
        return [name for name, bad in zip(known, pool.map(differs, known), strict=True) if bad]


def _complete(parcel: RemoteParcel, building: Path, target: Path) -> None:
    files = building / "files"
    if parcel.manifest is not None:
        if not (files / MANIFEST).exists() or (files / MANIFEST).read_bytes() != parcel.manifest:
            (files / MANIFEST).unlink(missing_ok=True)
            write_file(files / MANIFEST, parcel.manifest)
        if any(file.sha256 is None for file in parcel.files.values()):
            verify_packs(TokenStore.open(files))
    with translate_os_errors("write", target):
        for folder, _, _ in os.walk(files, topdown=False):
            fsync_folder(Path(folder))
        files.rename(target)
        fsync_folder(target.parent)
        shutil.rmtree(building)
