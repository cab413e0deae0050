"""Uploading a checkpoint, or any other folder, so that a part of it is never taken for the whole.

    1. what is there already, with the right size and identity, stays
    2. if anything must change, what made the folder whole goes first (COMMIT)
    3. the files, each checked against its hash while it is read
    4. manifest.json, and last of all COMMIT

What was cut off is continued by the same call; parts of objects that a killed upload left are given up then. Another
checkpoint that stands at the address is not touched unless that is asked for.

Cost: one read of what is sent (of a folder that is no checkpoint two), and one request for each file that is there.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lt_ckpt import files
from lt_ckpt.errors import CheckpointError
from lt_ckpt.folders import new_token
from lt_ckpt.s3.client import S3Folder, ServiceError
from lt_ckpt.s3.meter import Meter
from lt_ckpt.s3.parcel import MARKS, of_bucket, of_folder


class OccupiedError(CheckpointError):
    """Something else stands whole at the address."""


@dataclass(frozen=True, kw_only=True)
class Uploaded:
    """What an upload did.

    Attributes:
        url: Where the folder is now.
        sent: Files that were sent.
        kept: Files that were there already.
        n_bytes: Bytes that were sent.
        seconds: How long all of it took.
    """

    url: str
    sent: tuple[str, ...]
    kept: tuple[str, ...]
    n_bytes: int
    seconds: float


def upload(
    folder: str | os.PathLike[str],
    url: str | S3Folder,
    *,
    replace: bool = False,
    anew: bool = False,
    progress: files.Progress | None = None,
    stop: Callable[[], None] = lambda: None,
) -> Uploaded:
    """Uploads a folder; what is there already is not sent again.

    Args:
        folder: A checkpoint, or another folder of files.
        url: `s3://bucket/folder`: what the folder becomes.
        replace: Let something else that stands whole at the address give way.
        anew: Send everything, also what seems to be there already: a download has found damage in it.
        progress: Told the bytes that are there and that there will be.
        stop: Called again and again; an exception that it raises ends the upload.

    Returns:
        What was sent.

    Raises:
        OccupiedError: Something else stands whole at the address.
        DamagedError: The bytes here are not those that were written.
        ServiceError: The store refuses or cannot be reached.
        CheckpointError: Anything else. In all cases but the first nothing at the address is whole, unless it is still
            what it was.
    """
    start = time.monotonic()
    path = Path(folder)
    target = url if isinstance(url, S3Folder) else S3Folder(url)
    parcel = of_folder(path, lambda _: stop())
    there = target.sizes()

    def stands(name: str, data: bytes) -> bool:
        return there.get(name) == len(data) and target.read(name, len(data)) == data

    marked = [name for name in MARKS if name in there]
    ours = marked == [parcel.last[-1][0]] and stands(*parcel.last[-1])
    if marked and not ours and not replace:
        raise OccupiedError(
            f"{target.url}: something else is there; give another address, or say that it may be replaced (--replace)"
        )
    meter = Meter(parcel.n_bytes, progress, stop)
    missing: list[str] = []
    for name, content in parcel.contents.items():
        if not anew and there.get(name) == content.n_bytes and target.identity(name) == content.identity:
            meter.add(content.n_bytes)
        else:
            missing.append(name)
    if missing or not all(stands(name, data) for name, data in parcel.last):
        former = _names(target) if marked and not ours else set()
        target.delete(marked)
        target.delete(former - set(parcel.contents))
        target.abort_unfinished(set(missing).__contains__)
        for name in missing:
            target.send(name, path / name, parcel.contents[name], meter.add)
        for name, data in parcel.last:
            stop()
            target.write(name, data)
    return Uploaded(
        url=target.url,
        sent=tuple(missing),
        kept=tuple(name for name in parcel.contents if name not in missing),
        n_bytes=sum(parcel.contents[name].n_bytes for name in missing),
        seconds=time.monotonic() - start,
    )


def _names(target: S3Folder) -> set[str]:
    """Returns the objects of what stands whole there, as far as that can be told."""
    try:
        former = of_bucket(target)
    except ServiceError:
        raise
    except CheckpointError:  # its own list is damaged: nobody can say any more what belongs to it
        return set()
    return {*former.contents, *(name for name, _ in former.last)}


def try_address(url: str | S3Folder) -> None:
    """Tries whether uploads to an address will work: writes, lists, reads and deletes a small object there.

    Raises:
        CheckpointError: They will not; it says why.
    """
    target = url if isinstance(url, S3Folder) else S3Folder(url)
    name, data = f".lt-trial-{new_token()}", b"written by lt-ckpt to try the address; may be deleted\n"
    target.write(name, data)
    found = name in target.sizes() and target.read(name, 2**16) == data
    target.delete([name])
    if not found:
        raise CheckpointError(f"{target.url}: what was written there is not what can be read")
