"""Uploading a token store, or any folder of data, so that a part of it is never taken for the whole.

    1. what lies there already, with the right size and hash, stays; the hashes are S3's own, so nothing is fetched
    2. the other files: read, hashed and sent by boto3's transfer manager, and compared with the hashes that S3 tells;
       what an earlier upload left of a file in parts is given up
    3. a list of what lies there: is every object there with its size?
    4. the listing, and last of all the manifest of a store

The same call goes on with the file at which one was cut off. Something else that stands whole at the address is not
touched unless that is asked for; then what made it whole goes first.

Cost: one read of what is sent, one read and one request for each file that is there with its size. Memory: about two
parts for each connection.
"""

import hashlib
import os
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path

from lt_data.errors import DataError
from lt_data.progress import Progress, no_progress
from lt_data.remote.contents import (
    LISTING,
    FileHash,
    Listed,
    PartReader,
    decode_listing,
    encode_listing,
    hash_bytes,
    part_size,
)
from lt_data.remote.outgoing import LocalParcel, of_folder
from lt_data.remote.s3 import Remote, RemoteError, S3Folder, S3Options, Transfers
from lt_data.remote.threads import Meter, pool_of
from lt_data.store.manifest import MANIFEST_FILE as MANIFEST

_LARGEST_LISTING = 2**31
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
        others: objects below the address that do not belong to it.
    """

    url: str
    sent: tuple[str, ...]
    kept: tuple[str, ...]
    n_bytes: int
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
        comparing: called with the bytes read to compare what lies there already.
        progress: called with the bytes sent.

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
        reader = _reader(parcel, name, target.options.part_bytes)
        while part := reader.read(reader.part_bytes):
            meter.add(len(part))
        found = reader.content()
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


def _reader(parcel: LocalParcel, name: str, part_bytes: int) -> PartReader:
    """Open a file of the parcel; one that differs from the store's manifest is refused before its last part."""
    size = parcel.sizes[name]
    return PartReader(
        parcel.path(name),
        size,
        part_size(size, part_bytes),
        lambda sha256: _check(parcel, name, sha256),
        lambda: parcel.open(name),
    )


def _check(parcel: LocalParcel, name: str, sha256: str) -> None:
    if parcel.hashes.get(name, sha256) != sha256:
        raise DataError(
            f"{parcel.path(name)}: its SHA-256 is not the one in the store's manifest: copy it again or prepare again"
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
    contents = {**plan.kept, **_send_files(plan, Meter(plan.n_bytes, progress))}
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
        others=len(others - set(former)),
    )


def _write(target: S3Folder, name: str, data: bytes, there: dict[str, int]) -> None:
    content = hash_bytes(data)
    if there.get(name) == len(data):
        remote = target.look(name)
        if remote is not None and remote.is_of(content):
            return
    target.write(name, data, content.parts[0])


def _send_files(plan: UploadPlan, meter: Meter) -> dict[str, FileHash]:
    """Send every missing file, descriptions of packs after their arrays; gives back what each holds."""
    target, sizes, sent = plan.target, plan.parcel.sizes, dict[str, FileHash]()
    headers = [name for name in plan.missing if name.endswith("/pack.json")]
    others = [name for name in plan.missing if not name.endswith("/pack.json")]
    # Left first: the transfers in flight are cancelled before their threads are waited for.
    with pool_of(target.options.connections) as pool, target.transfers() as transfers:
        for names in (others, headers):
            futures = {pool.submit(_send_file, plan, name, transfers, meter): name for name in names}
            for future in as_completed(futures):
                sent[futures[future]] = future.result()
    # Of uploads that were killed, or whose answer was lost: they would be paid for and never be seen.
    for name, upload_id in target.unfinished([name for name in sizes if sizes[name] > target.options.part_bytes]):
        target.give_up(name, upload_id)
    return sent


def _send_file(plan: UploadPlan, name: str, transfers: Transfers, meter: Meter) -> FileHash:
    """Send a file, and again where S3 holds other bytes in the end; gives back what it holds."""
    target, parcel = plan.target, plan.parcel
    if parcel.sizes[name] <= target.options.part_bytes:
        reader = _reader(parcel, name, target.options.part_bytes)
        data, more = (reader.read(target.options.part_bytes) for _ in range(2))  # the second finds a file that grew
        assert not more
        target.write(name, data, reader.content().parts[0])
        meter.add(len(data))
        return reader.content()
    for _ in range(_TRIES):
        reader = _reader(parcel, name, target.options.part_bytes)
        try:
            transfers.upload(name, reader, meter.add)
        except RemoteError as exc:
            # The answer to the last request was lost on the way back, or another upload has given this one up.
            if exc.code != "NoSuchUpload":
                raise
        if _holds(target.look(name), reader.content()):
            return reader.content()
    raise RemoteError(f"{target.url}/{name}: uploading failed: S3 does not hold what was sent, {_TRIES} times over")


def _holds(remote: Remote | None, content: FileHash) -> bool:
    """Return whether an object is what was sent; a store that tells no hash has compared each part's SHA-256."""
    if remote is None or remote.n_bytes != content.n_bytes:
        return False
    return not (remote.etag or remote.checksum) or remote.is_of(content)
