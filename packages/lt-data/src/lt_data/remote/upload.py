"""Uploading a folder to S3, so that a part of it is never taken for the whole.

    1. objects that are there with the size and the digest of the list stay
    2. the other files; an object is there whole or not at all
    3. uploads in parts that killed processes left are aborted
    4. the listing of the bucket: is every object there with its size?
    5. the files that the list names last (a store's manifest, a checkpoint's commit), and the list where it is ours

The same call goes on with the file at which one was cut off. Something else that stands whole at the address is not
touched unless that is asked for; then what makes it whole is deleted first.

Cost: each file is read once for its digest and once to be sent; one request for each object that is there.
"""

from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path

from lt_data.errors import DataError
from lt_data.progress import Progress, no_progress
from lt_data.remote.file_list import LIST, MAX_LIST_BYTES, DamagedError, FileList, ListedFile, decode_list, list_folder
from lt_data.remote.s3_folder import RemoteError, S3Folder
from lt_data.remote.threads import Meter, pool_of

_FILES = 4  # at a time; each by several connections


@dataclass(frozen=True, kw_only=True)
class Uploaded:
    """What an upload did.

    Attributes:
        url: where the folder is now.
        sent: files that were sent.
        kept: files that were there already.
        n_bytes: bytes of the files that were sent.
    """

    url: str
    sent: tuple[str, ...]
    kept: tuple[str, ...]
    n_bytes: int


def upload(
    folder: str | Path,
    url: str | S3Folder,
    *,
    files: FileList | None = None,
    overwrite: bool = False,
    progress: Progress = no_progress,
) -> Uploaded:
    """Upload a folder; what lies there already is not sent again.

    Args:
        folder: a token store, or any folder of plain files.
        url: `s3://bucket/folder`: what the folder becomes.
        files: its list if its digests are known already; each file is compared with it before it is sent. Where the
            last of `files.last` lies the folder is whole. Without it the folder is read, and its list is sent too.
        overwrite: let something else that stands at the address give way, and send every file.
        progress: called with the bytes sent; an exception from it ends the upload, and the same call goes on later.

    Returns:
        What was sent.

    Raises:
        UnreachableError: S3 cannot be reached; the same call goes on later.
        RemoteError: S3 refuses.
        DamagedError: a file here is not what `files` says.
        DataError: something else stands there, or the folder cannot be uploaded.
    """
    folder, target = Path(folder), url if isinstance(url, S3Folder) else S3Folder(url)
    listed = list_folder(folder) if files is None else files
    there = target.objects()
    former = _former(target) if LIST in there else {}
    marks = [name for name in listed.last if name in there]
    is_other = any(listed.files.get(name) != file for name, file in former.items())
    if is_other or any(target.digest(name) != listed.files[name].digest for name in marks):
        if not overwrite:
            raise DataError(f"{target.url}: something else is there; give another address, or overwrite it")
        # What makes the other whole goes first, and last the list by which another call knows what belonged to it.
        target.delete(marks)
        target.delete(name for name in former if name not in listed.files)
        target.delete([LIST])
    meter = Meter(listed.n_bytes, progress)
    kept: set[str] = set()

    def keep_or_send(name: str) -> None:
        file, path = listed.files[name], folder / name
        if not overwrite and there.get(name) == file.n_bytes and target.digest(name) == file.digest:
            kept.add(name)
            meter.add(file.n_bytes)
            return
        if files is not None and not files.is_at(path, name):
            raise DamagedError(f"{path}: is not what its list says: copy it again, or make it anew")
        target.upload_file(name, path, file.digest, meter.add)

    with pool_of(_FILES) as pool:
        for done in as_completed([pool.submit(keep_or_send, n) for n in listed.files if n not in listed.last]):
            done.result()
    target.abort_unfinished(listed.files.__contains__)
    found = target.objects()
    if lost := [n for n, f in listed.files.items() if n not in listed.last and found.get(n) != f.n_bytes]:
        raise RemoteError(f"{target.url}: {len(lost)} objects are not there as sent ({lost[0]}): run it again")
    for name in listed.last:
        keep_or_send(name)
    if files is None and (overwrite or former != listed.files):
        target.write(LIST, listed.encode())
    sent = tuple(name for name in listed.files if name not in kept)
    n_bytes = sum(listed.files[name].n_bytes for name in sent)
    return Uploaded(url=target.url, sent=sent, kept=tuple(n for n in listed.files if n in kept), n_bytes=n_bytes)


def _former(target: S3Folder) -> dict[str, ListedFile]:
    """Return the files that the list at an address names, its own for one that is damaged: nobody knows its files."""
    content = target.read(LIST, MAX_LIST_BYTES)
    try:
        return {} if content is None else {**decode_list(content, f"{target.url}/{LIST}").files}
    except DataError:
        return {LIST: ListedFile(len(content or b""), "")}
