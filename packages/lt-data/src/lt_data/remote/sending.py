"""Uploading a token store, or any folder of data, so that a part of it is never taken for the whole.

    1. what lies there already, with the right size and hash, stays; the hashes are S3's own, so nothing is fetched
    2. the other files, several parts at a time, each checked by S3 on arrival; parts that an earlier upload of the file
       left there are taken up
    3. a list of what lies there: is every object there with its size?
    4. the listing, and last of all the manifest of a store

The same call goes on where one was cut off. Something else that stands whole at the address is not touched unless that
is asked for; then what made it whole goes first.

Cost: one read of what is sent, one read and one request for each file that is there with its size. Memory: about two
parts for each connection.
"""

import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lt_data.errors import DataError
from lt_data.progress import Progress, no_progress
from lt_data.remote.contents import (
    LISTING,
    FileHash,
    Listed,
    PartHash,
    decode_listing,
    encode_listing,
    hash_bytes,
    hash_file,
    part_size,
    read_parts,
)
from lt_data.remote.outgoing import LocalParcel, of_folder
from lt_data.remote.s3 import Remote, RemoteError, S3Folder, S3Options, SentPart
from lt_data.remote.threads import Meter, pool_of
from lt_data.storage import translate_os_errors
from lt_data.store.manifest import MANIFEST_FILE as MANIFEST

_LARGEST_LISTING = 2**31
_OPEN_FILES = 8  # files whose last parts are still on the way
_SURPRISES = ("NoSuchUpload", "InvalidPart")
_TRIES = 3  # whole files, where the object made of good parts is not the file


@dataclass(frozen=True, kw_only=True)
class UploadPlan:
    """What an upload will do.

    Attributes:
        target: where to.
        parcel: what.
        kept: files that lie there already, with what they hold.
        missing: files to send.
        former: objects of something else at the address, which give way.
        marks: of the objects that make a folder whole, those that lie there.
    """

    target: S3Folder
    parcel: LocalParcel
    kept: dict[str, FileHash]
    missing: tuple[str, ...]
    former: tuple[str, ...]
    marks: tuple[str, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes to send."""
        return sum(self.parcel.sizes[name] for name in self.missing)


@dataclass(frozen=True, kw_only=True)
class Uploaded:
    """What an upload did.

    Attributes:
        url: where the folder is now.
        sent: files that were sent.
        kept: files that were there already.
        n_bytes: bytes of the files that were sent.
        taken_up: of those, the bytes that an earlier upload had sent.
        others: objects below the address that do not belong to it.
    """

    url: str
    sent: tuple[str, ...]
    kept: tuple[str, ...]
    n_bytes: int
    taken_up: int
    others: int


def upload(
    folder: str | Path,
    url: str,
    *,
    overwrite: bool = False,
    options: S3Options | None = None,
    comparing: Progress = no_progress,
    progress: Progress = no_progress,
) -> Uploaded:
    """Upload a token store or another folder of files; what lies there already is not sent again.

    Args:
        folder: a store, or any folder of plain files.
        url: `s3://bucket/folder`: what the folder becomes.
        overwrite: let something else that stands whole at the address give way.
        options: how S3 is spoken to.
        comparing: told the bytes read to compare what lies there already.
        progress: told the bytes sent.

    Returns:
        What was sent.

    Raises:
        RemoteError: S3 refuses or cannot be reached; the same call goes on later.
        DataError: something else stands there, or the files here are not those that the store's manifest names.
    """
    target = S3Folder(url, options)
    return send(plan_upload(Path(folder), target, overwrite=overwrite, progress=comparing), progress=progress)


def plan_upload(
    folder: Path, target: S3Folder, *, overwrite: bool = False, progress: Progress = no_progress
) -> UploadPlan:
    """Find out what has to be sent; nothing is changed.

    Raises:
        DataError: see `upload`.
    """
    parcel = of_folder(folder)
    there = target.objects()
    marks = tuple(name for name in (MANIFEST, LISTING) if name in there)
    former = _listed_there(target) if LISTING in there else {}
    same_size = [name for name, size in parcel.sizes.items() if there.get(name) == size]
    meter = Meter(sum(parcel.sizes[name] for name in same_size), progress)
    kept: dict[str, FileHash] = {}

    def compare(name: str) -> None:
        found = _hash(parcel, name, target.options.part_bytes, meter.add)
        remote = target.look(name)
        if remote is not None and remote.is_of(found):
            kept[name] = found

    with pool_of(min(target.options.connections, os.cpu_count() or 1)) as pool:
        for future in [pool.submit(compare, name) for name in same_size]:
            future.result()
    if marks and not _same(parcel, target, kept, former, marks):
        if not overwrite:
            raise DataError(
                f"{target.url}: something else is there; give another address, or say that it may be replaced"
            )
        gone = tuple(name for name in former if name not in parcel.sizes and name not in (MANIFEST, LISTING))
    else:
        marks, gone = (), ()
    missing = tuple(name for name in parcel.sizes if name not in kept)
    return UploadPlan(
        target=target,
        parcel=parcel,
        kept={name: kept[name] for name in parcel.sizes if name in kept},
        missing=missing,
        former=gone,
        marks=marks,
    )


def _listed_there(target: S3Folder) -> dict[str, Listed]:
    content = target.read(LISTING, _LARGEST_LISTING)
    try:
        return {} if content is None else decode_listing(content, f"{target.url}/{LISTING}")
    except RemoteError:
        raise
    except DataError:  # damaged: nobody can say any more what belonged to it
        return {}


def _same(
    parcel: LocalParcel,
    target: S3Folder,
    kept: dict[str, FileHash],
    former: dict[str, Listed],
    marks: tuple[str, ...],
) -> bool:
    """Whether what makes the folder there whole is of this folder, or of this store with other packs."""
    if parcel.manifest is not None:
        if MANIFEST in marks:
            return target.read(MANIFEST, _LARGEST_LISTING) == parcel.manifest
        return MANIFEST in former and former[MANIFEST].sha256 == hashlib.sha256(parcel.manifest).hexdigest()
    files = {name: file for name, file in former.items() if name != LISTING}
    return set(files) == set(parcel.sizes) and all(
        file.n_bytes == parcel.sizes[name] and (name not in kept or kept[name].sha256 == file.sha256)
        for name, file in files.items()
    )


def _hash(parcel: LocalParcel, name: str, part_bytes: int, told: Callable[[int], None]) -> FileHash:
    size = parcel.sizes[name]
    path = parcel.folder / name
    found = hash_file(path, size, part_size(size, part_bytes), lambda n_bytes, _total, _unit: told(n_bytes))
    _check(parcel, name, found.sha256)
    return found


def _check(parcel: LocalParcel, name: str, sha256: str) -> None:
    if parcel.hashes.get(name, sha256) != sha256:
        raise DataError(
            f"{parcel.folder / name}: its SHA-256 is not the one in the store's manifest: copy it again or prepare "
            "again"
        )


def send(plan: UploadPlan, *, progress: Progress = no_progress) -> Uploaded:
    """Carry out a plan.

    Raises:
        DataError: see `upload`.
    """
    target, parcel = plan.target, plan.parcel
    # What makes the other thing whole first, and last the list by which a second call knows what belonged to it.
    target.delete([name for name in plan.marks if name == MANIFEST])
    target.delete(plan.former)
    target.delete([name for name in plan.marks if name == LISTING])
    sender = _Sender(plan, Meter(plan.n_bytes, progress))
    sent = sender.send_all()
    contents = {**plan.kept, **sent}
    there = target.objects()
    if lost := [name for name, size in parcel.sizes.items() if there.get(name) != size]:
        raise RemoteError(f"{target.url}: {len(lost)} objects are not there as sent ({lost[0]}): run it again")
    listed = {
        name: Listed(n_bytes=content.n_bytes, sha256=content.sha256, blocks=content.blocks)
        for name, content in contents.items()
    }
    others = set(there) - set(listed) - {MANIFEST, LISTING}
    if parcel.manifest is not None:
        content = hash_bytes(parcel.manifest)
        listed[MANIFEST] = Listed(n_bytes=content.n_bytes, sha256=content.sha256, blocks=content.blocks)
    former = _listed_there(target) if LISTING in there else {}
    _write(target, LISTING, encode_listing(listed), there)
    if parcel.manifest is not None:
        _write(target, MANIFEST, parcel.manifest, there)
    if gone := others & set(former):  # packs that the store had when it was uploaded before
        target.delete(sorted(gone))
    return Uploaded(
        url=target.url,
        sent=plan.missing,
        kept=tuple(plan.kept),
        n_bytes=plan.n_bytes,
        taken_up=sender.taken_up,
        others=len(others - set(former)),
    )


def _write(target: S3Folder, name: str, data: bytes, there: dict[str, int]) -> None:
    content = hash_bytes(data)
    if there.get(name) == len(data):
        remote = target.look(name)
        if remote is not None and remote.is_of(content):
            return
    target.write(name, data, content.parts[0])


@dataclass(kw_only=True)
class _Open:
    """A file whose parts are on the way."""

    name: str
    parts: list[Future[tuple[PartHash, SentPart | None]]]
    sha256: str = ""
    upload: str | None = None


class _Sender:
    """Sends the files of a plan: one thread reads in order, the others hash and send."""

    def __init__(self, plan: UploadPlan, meter: Meter) -> None:
        self._plan, self._meter = plan, meter
        self._target, self._parcel = plan.target, plan.parcel
        self._connections = plan.target.options.connections
        self._room = threading.BoundedSemaphore(2 * self._connections)
        self._unfinished: dict[str, list[str]] = {}
        self._lock = threading.Lock()
        self._failed: RemoteError | None = None
        self.taken_up = 0

    def send_all(self) -> dict[str, FileHash]:
        """Send every missing file; gives back what each holds."""
        sent: dict[str, FileHash] = {}
        large = [name for name in self._plan.missing if self._parcel.sizes[name] > self._target.options.part_bytes]
        if large:
            self._unfinished = self._target.unfinished(large)
        with pool_of(self._connections) as pool:
            on_the_way: deque[_Open] = deque()
            for name in self._plan.missing:
                if name.endswith("/pack.json"):  # after its arrays
                    self._finish(on_the_way, sent, pool, 0)
                on_the_way.append(self._start(name, pool))
                self._finish(on_the_way, sent, pool, _OPEN_FILES)
            self._finish(on_the_way, sent, pool, 0)
        return sent

    def _finish(self, on_the_way: deque[_Open], sent: dict[str, FileHash], pool: ThreadPoolExecutor, left: int) -> None:
        while len(on_the_way) > left:
            file = on_the_way.popleft()
            tries = 1
            while (content := self._close(file)) is None:
                if tries == _TRIES:
                    raise RemoteError(
                        f"{self._target.url}/{file.name}: what S3 holds is not the file, {tries} times over"
                    )
                file, tries = self._start(file.name, pool), tries + 1
            sent[file.name] = content

    def _start(self, name: str, pool: ThreadPoolExecutor) -> _Open:
        """Read a file and hand its parts to the threads."""
        parcel = self._parcel
        size = parcel.sizes[name]
        part_bytes = part_size(size, self._target.options.part_bytes)
        there: dict[int, SentPart] = {}
        upload = None
        if size > part_bytes:
            upload, there = self._begin(name)
        whole = hashlib.sha256()
        file = _Open(name=name, parts=[], upload=upload)
        path = parcel.folder / name
        with translate_os_errors("read", path), path.open("rb", buffering=0) as source:
            for number, data in enumerate(read_parts(path, source, size, part_bytes), 1):
                whole.update(data)
                if upload is None:
                    _check(parcel, name, whole.hexdigest())  # before it is there
                self._room.acquire()
                if self._failed is not None:
                    raise self._failed
                file.parts.append(pool.submit(self._send, file, number, data, there.get(number)))
        file.sha256 = whole.hexdigest()
        try:
            _check(parcel, name, file.sha256)
        except DataError:
            if upload is not None:
                for part in file.parts:
                    part.exception()
                self._target.give_up(name, upload)
            raise
        return file

    def _begin(self, name: str) -> tuple[str, dict[int, SentPart]]:
        """An upload in parts, with the parts it has: one that was cut off, or a new one."""
        uploads = self._unfinished.get(name, [])
        if uploads and (there := self._target.parts(name, uploads[0])):
            return uploads[0], there
        return self._target.begin(name), {}

    def _send(
        self, file: _Open, number: int, data: memoryview, there: SentPart | None
    ) -> tuple[PartHash, SentPart | None]:
        try:
            part = PartHash.of(data)
            if file.upload is None:
                self._target.write(file.name, data, part)
                sent = None
            elif there is not None and there.is_of(part):
                sent = there
                with self._lock:
                    self.taken_up += part.n_bytes
            else:
                sent = self._target.write_part(file.name, file.upload, number, data, part)
            self._meter.add(part.n_bytes)
            return part, sent
        except RemoteError as exc:
            if exc.code not in _SURPRISES:
                self._failed = exc  # so that the rest is not read for nothing
            raise
        finally:
            self._room.release()

    def _close(self, file: _Open) -> FileHash | None:
        """Make the object of its parts; None where the file has to be sent once more."""
        target = self._target
        if file.upload is None:
            return FileHash(sha256=file.sha256, parts=(file.parts[0].result()[0],))
        content = None
        try:
            results = [part.result() for part in file.parts]
            content = FileHash(sha256=file.sha256, parts=tuple(part for part, _ in results))
            target.finish(file.name, file.upload, [sent for _, sent in results if sent is not None])
        except RemoteError as exc:
            # Another upload of this file may have finished it, or an answer was lost on the way back.
            if exc.code not in _SURPRISES:
                raise
        good = content is not None and _holds(target.look(file.name), content)
        self._unfinished.pop(file.name, None)
        # Asked again: an answer that was lost leaves one that nobody here has heard of.
        left = {*target.unfinished([file.name]).get(file.name, []), file.upload}
        for upload in left - {file.upload} if good else left:
            target.give_up(file.name, upload)
        return content if good else None


def _holds(remote: Remote | None, content: FileHash) -> bool:
    """Whether an object is what was just sent in parts; a store without hashes has compared each part's MD5."""
    if remote is None or remote.n_bytes != content.n_bytes:
        return False
    return not (remote.etag or remote.checksum) or remote.is_of(content)
