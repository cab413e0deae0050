"""Manifest of a folder in a bucket: its files' expected content, and the small objects that commit it.

A checkpoint is committed by its own manifest.json and COMMIT. Any other folder gets a list of its files and their
hashes, `.lt-upload.json`, which exists in the bucket only. In both cases the object that commits it is written last and
deleted first.

    {"format":"lt-upload","version":1,"files":{"config.json":{"bytes":650,"xxh3_128":"..."},...}}

Cost: of a checkpoint the manifest; of another folder one read of it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lt_ckpt import files, strict_json
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.finished_folder import UPLOAD_LIST, is_valid_name, list_finished_files
from lt_ckpt.folders import COMMIT, MANIFEST
from lt_ckpt.manifest import MAX_MANIFEST_BYTES, CheckpointManifest, check_commit
from lt_ckpt.records import HASH_HEX
from lt_ckpt.s3.client import S3Folder
from lt_ckpt.s3.file_digest import FileDigest, digest_file, digests_from_manifest

MAX_LIST_BYTES, MAX_COMMIT_BYTES = 2**28, 2**16


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
        digests = {name: digest_file(folder / name, on_bytes) for name in list_finished_files(folder)}
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
