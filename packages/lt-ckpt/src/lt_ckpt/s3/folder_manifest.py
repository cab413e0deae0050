"""Manifest of a folder in a bucket: its files' expected content, and the small objects that commit it.

A checkpoint is committed by its own manifest.json and COMMIT. Any other folder gets a list of its files and their
hashes, `.lt-upload.json`, which exists in the bucket only. In both cases the object that commits it is written last and
deleted first.

    {"format":"lt-upload","version":1,"files":{"config.json":{"bytes":650,"xxh3_128":"..."},...}}

Cost: of a checkpoint the manifest; of another folder one read of it.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lt_ckpt import files, strict_json
from lt_ckpt.discovery import list_steps
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.folders import COMMIT, MANIFEST, STEP_FOLDER
from lt_ckpt.manifest import MAX_MANIFEST_BYTES, CheckpointManifest, check_commit
from lt_ckpt.records import HASH_HEX
from lt_ckpt.s3.client import S3Folder
from lt_ckpt.s3.file_digest import FileDigest, digest_file, digests_from_manifest

UPLOAD_LIST = ".lt-upload.json"
COMMIT_OBJECTS = (COMMIT, UPLOAD_LIST)
"""Objects that commit a folder."""

PARTIAL_FILE = ".lt-part"
"""File being downloaded, in the folder that becomes the target."""

MAX_LIST_BYTES, MAX_COMMIT_BYTES = 2**28, 2**16
_NAME = re.compile(r"(?:[A-Za-z0-9_.][A-Za-z0-9_.\-]{0,200}/){0,8}[A-Za-z0-9_.][A-Za-z0-9_.\-]{0,200}")


@dataclass(frozen=True, kw_only=True)
class FolderManifest:
    """Content of a folder in a bucket.

    Attributes:
        files: File → expected content.
        commit_objects: Small objects written after all files, in order; the last one commits the folder.
        is_checkpoint: Whether it is a checkpoint; then the commit objects are files of the folder as well.
    """

    files: Mapping[str, FileDigest]
    commit_objects: tuple[tuple[str, bytes], ...]
    is_checkpoint: bool

    @property
    def n_bytes(self) -> int:
        """Bytes of all files."""
        return sum(content.n_bytes for content in self.files.values())


def is_valid_name(name: str) -> bool:
    """Return True for a file name allowed in folder and bucket: plain, inside the folder, not ours."""
    plain = _NAME.fullmatch(name) is not None
    return plain and not {".", ".."} & set(name.split("/")) and name not in (*COMMIT_OBJECTS, PARTIAL_FILE)


def manifest_from_folder(folder: Path, on_bytes: Callable[[int], None] = lambda _: None) -> FolderManifest:
    """Return the manifest of a local folder.

    Args:
        folder: A checkpoint, or another folder of files.
        on_bytes: Called with the bytes read; may raise to end it.

    Raises:
        CheckpointError: It is an unfinished checkpoint, a folder of checkpoints, or has no files.
    """
    with translate_os_errors("opening", folder):
        if (folder / COMMIT).exists():
            raw = files.read_bounded(folder / MANIFEST, MAX_MANIFEST_BYTES)
            return _manifest_from_checkpoint(raw, files.read_bounded(folder / COMMIT, MAX_COMMIT_BYTES), f"{folder}/")
        if (folder / MANIFEST).exists() or STEP_FOLDER.fullmatch(folder.name):
            raise CheckpointError(f"{folder}: not a checkpoint: no COMMIT in it, so the save was never finished")
        if list_steps(folder):
            raise CheckpointError(f"{folder}: is a folder of checkpoints: choose one of them")
        digests = {name: digest_file(folder / name, on_bytes) for name in _list_files(folder)}
    listed = {name: {"bytes": content.n_bytes, "xxh3_128": content.segments[0][1]} for name, content in digests.items()}
    raw = strict_json.dumps({"format": "lt-upload", "version": 1, "files": listed}, UPLOAD_LIST)
    return FolderManifest(files=digests, commit_objects=((UPLOAD_LIST, raw),), is_checkpoint=False)


def _manifest_from_checkpoint(manifest: bytes, commit: bytes, where: str) -> FolderManifest:
    step = check_commit(commit, manifest, where + COMMIT)
    parsed = CheckpointManifest.from_bytes(manifest, where + MANIFEST)
    if parsed.step != step:
        raise CheckpointError(f"{where}{COMMIT}: says step {step}, the manifest step {parsed.step}")
    return FolderManifest(
        files=digests_from_manifest(parsed), commit_objects=((MANIFEST, manifest), (COMMIT, commit)), is_checkpoint=True
    )


def _list_files(folder: Path) -> list[str]:
    """Return the files of a folder by relative name."""

    def raise_error(exc: OSError) -> None:
        raise exc

    found: list[str] = []
    for parent, folders, names in os.walk(folder, onerror=raise_error):
        for name in (*folders, *names):
            path = Path(parent) / name
            relative = path.relative_to(folder).as_posix()
            if relative == UPLOAD_LIST:
                continue
            if not is_valid_name(relative):
                raise CheckpointError(
                    f"{path}: a file of that name cannot be uploaded: rename it, or choose another folder"
                )
            if (name in folders and path.is_symlink()) or not (path.is_dir() or path.is_file()):
                raise CheckpointError(f"{path}: neither a file nor a folder: remove it, or choose another folder")
            if name in names:
                found.append(relative)
    if not found:
        raise CheckpointError(f"{folder}: contains no file")
    return sorted(found)


def read_folder_manifest(target: S3Folder) -> FolderManifest:
    """Read the manifest of a folder in a bucket; its files are not checked.

    Raises:
        CheckpointError: It is not committed, or its manifest is damaged.
    """
    where = f"{target.url}/"
    commit = target.read(COMMIT, MAX_COMMIT_BYTES)
    if commit is not None:
        raw = target.read(MANIFEST, MAX_MANIFEST_BYTES)
        if raw is None:
            raise CheckpointError(f"{where}{COMMIT}: there is no {MANIFEST} beside it")
        return _manifest_from_checkpoint(raw, commit, where)
    raw = target.read(UPLOAD_LIST, MAX_LIST_BYTES)
    if raw is None:
        raise CheckpointError(
            f"{target.url}: neither {COMMIT} nor {UPLOAD_LIST} exists: not an upload of ours, or an unfinished one"
        )
    obj = strict_json.loads(raw, where + UPLOAD_LIST)
    strict_json.check_format_version(obj, "lt-upload", 1, where + UPLOAD_LIST)
    digests: dict[str, FileDigest] = {}
    for name, entry in strict_json.get_field(obj, "files", dict, where + UPLOAD_LIST).items():
        at = f"{where}{UPLOAD_LIST}: file {name!r}"
        if not is_valid_name(name) or not isinstance(entry, dict):
            raise CheckpointError(f"{at}: not a name that an uploaded file can have")
        digest = strict_json.get_field(entry, "xxh3_128", str, at)
        if not HASH_HEX.fullmatch(digest):
            raise CheckpointError(f"{at}: {digest!r} is not a hash; the list is damaged")
        digests[name] = FileDigest(segments=((strict_json.get_count(entry, "bytes", at), digest),))
    return FolderManifest(files=digests, commit_objects=((UPLOAD_LIST, raw),), is_checkpoint=False)
