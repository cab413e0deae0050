"""A folder as it is in a bucket: its files with what they must hold, and the small objects that make it whole.

A checkpoint is whole by its own manifest.json and COMMIT. Any other folder gets a list of its files and their hashes,
`.lt-upload.json`, which exists in the bucket only. In both cases the object that makes it whole is the last one to be
written and the first one to go.

    {"format":"lt-upload","version":1,"files":{"config.json":{"bytes":650,"xxh3_128":"..."},...}}

Cost: of a checkpoint the manifest; of another folder one read of it.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lt_ckpt import files, strict_json
from lt_ckpt.discover import list_steps
from lt_ckpt.errors import CheckpointError, storage
from lt_ckpt.folders import COMMIT, MANIFEST, STEP_FOLDER
from lt_ckpt.manifest import MAX_MANIFEST_BYTES, Manifest, check_commit
from lt_ckpt.records import HASH
from lt_ckpt.s3.client import S3Folder
from lt_ckpt.s3.contents import Content, of_file, of_manifest

LIST = ".lt-upload.json"
MARKS = (COMMIT, LIST)
"""Objects that make what lies beside them whole."""

PART = ".lt-part"
"""The file that is being downloaded, in the folder that becomes the target."""

MAX_LIST_BYTES, MAX_COMMIT_BYTES = 2**28, 2**16
_NAME = re.compile(r"(?:[A-Za-z0-9_.][A-Za-z0-9_.\-]{0,200}/){0,8}[A-Za-z0-9_.][A-Za-z0-9_.\-]{0,200}")


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """What makes up a folder in a bucket.

    Attributes:
        contents: File → what it must hold.
        last: Small objects that come after all files, in order; the last one makes it whole.
        checkpoint: Whether it is a checkpoint; then those small objects are files of the folder as well.
    """

    contents: Mapping[str, Content]
    last: tuple[tuple[str, bytes], ...]
    checkpoint: bool

    @property
    def n_bytes(self) -> int:
        """Bytes of all files."""
        return sum(content.n_bytes for content in self.contents.values())


def good_name(name: str) -> bool:
    """Tells whether a file may have that name, in a folder and in a bucket: plain characters, not out of the folder."""
    plain = _NAME.fullmatch(name) is not None
    return plain and not {".", ".."} & set(name.split("/")) and name not in (*MARKS, PART)


def of_folder(folder: Path, told: Callable[[int], None] = lambda _: None) -> Parcel:
    """Packs a folder of this machine.

    Args:
        folder: A checkpoint, or another folder of files.
        told: Told the bytes that were read; may raise to end it.

    Raises:
        CheckpointError: It is a checkpoint that is not finished, holds checkpoints, or has no files.
    """
    with storage("opening", folder):
        if (folder / COMMIT).exists():
            raw = files.read_small(folder / MANIFEST, MAX_MANIFEST_BYTES)
            return _checkpoint(raw, files.read_small(folder / COMMIT, MAX_COMMIT_BYTES), f"{folder}/")
        if (folder / MANIFEST).exists() or STEP_FOLDER.fullmatch(folder.name):
            raise CheckpointError(f"{folder}: not a checkpoint: no COMMIT in it, so the save was never finished")
        if list_steps(folder):
            raise CheckpointError(f"{folder}: is a folder of checkpoints: name one of them")
        contents = {name: of_file(folder / name, told) for name in _files(folder)}
    listed = {
        name: {"bytes": content.n_bytes, "xxh3_128": content.segments[0][1]} for name, content in contents.items()
    }
    raw = strict_json.dumps({"format": "lt-upload", "version": 1, "files": listed}, LIST)
    return Parcel(contents=contents, last=((LIST, raw),), checkpoint=False)


def _checkpoint(manifest: bytes, commit: bytes, where: str) -> Parcel:
    step = check_commit(commit, manifest, where + COMMIT)
    found = Manifest.from_bytes(manifest, where + MANIFEST)
    if found.step != step:
        raise CheckpointError(f"{where}{COMMIT}: says step {step}, the manifest step {found.step}")
    return Parcel(contents=of_manifest(found), last=((MANIFEST, manifest), (COMMIT, commit)), checkpoint=True)


def _files(folder: Path) -> list[str]:
    """Returns the files in a folder and below, relative to it."""

    def refuse(exc: OSError) -> None:
        raise exc

    found: list[str] = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        for name in (*folders, *names):
            path = Path(parent) / name
            inside = path.relative_to(folder).as_posix()
            if inside == LIST:
                continue
            if not good_name(inside):
                raise CheckpointError(f"{path}: a file of that name is not uploaded: rename it, or name another folder")
            if (name in folders and path.is_symlink()) or not (path.is_dir() or path.is_file()):
                raise CheckpointError(f"{path}: neither a file nor a folder: remove it, or name another folder")
            if name in names:
                found.append(inside)
    if not found:
        raise CheckpointError(f"{folder}: holds no file")
    return sorted(found)


def of_bucket(target: S3Folder) -> Parcel:
    """Reads what a folder in a bucket says of itself; its files are not looked at.

    Raises:
        CheckpointError: It is not whole, or what it says is damaged.
    """
    where = f"{target.url}/"
    commit = target.read(COMMIT, MAX_COMMIT_BYTES)
    if commit is not None:
        raw = target.read(MANIFEST, MAX_MANIFEST_BYTES)
        if raw is None:
            raise CheckpointError(f"{where}{COMMIT}: there is no {MANIFEST} beside it")
        return _checkpoint(raw, commit, where)
    raw = target.read(LIST, MAX_LIST_BYTES)
    if raw is None:
        raise CheckpointError(f"{target.url}: neither {COMMIT} nor {LIST} is there: nothing of ours, or a part of it")
    obj = strict_json.loads(raw, where + LIST)
    strict_json.check_version(obj, "lt-upload", 1, where + LIST)
    contents: dict[str, Content] = {}
    for name, entry in strict_json.field(obj, "files", dict, where + LIST).items():
        at = f"{where}{LIST}: file {name!r}"
        if not good_name(name) or not isinstance(entry, dict):
            raise CheckpointError(f"{at}: not a name that an uploaded file can have")
        digest = strict_json.field(entry, "xxh3_128", str, at)
        if not HASH.fullmatch(digest):
            raise CheckpointError(f"{at}: {digest!r} is not a hash; the list is damaged")
        contents[name] = Content(segments=((strict_json.count(entry, "bytes", at), digest),))
    return Parcel(contents=contents, last=((LIST, raw),), checkpoint=False)
