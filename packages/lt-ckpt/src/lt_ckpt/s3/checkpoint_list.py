"""List of a checkpoint's files for lt-data's upload and download, from its manifest, without reading the files.

A file is a sequence of segments: its header, then its slices in file order, each with its size and xxh3-128. The digest
of a file is the hash of those, so it is known from the manifest alone and found again by one read. manifest.json and
COMMIT are the last two files, and count as one segment each.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import xxhash

from lt_ckpt import files
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.folders import COMMIT, MANIFEST
from lt_ckpt.manifest import MAX_MANIFEST_BYTES, CheckpointManifest, Segment, parse_committed
from lt_data.remote.file_list import FileList, ListedFile
from lt_data.remote.s3_folder import S3Folder

MAX_COMMIT_BYTES = 2**16


def list_checkpoint(folder: Path, check_stop: Callable[[], None] = lambda: None) -> FileList:
    """Return the list of a checkpoint on this machine.

    Args:
        folder: The checkpoint.
        check_stop: Called for each block that is read; an exception from it ends the read.

    Raises:
        CheckpointError: It is not committed, or its manifest is damaged.
    """
    with translate_os_errors("opening", folder):
        manifest = files.read_bounded(folder / MANIFEST, MAX_MANIFEST_BYTES)
        commit = files.read_bounded(folder / COMMIT, MAX_COMMIT_BYTES)
    return _make_list(str(folder), manifest, commit, check_stop)[0]


def read_remote_list(folder: S3Folder) -> tuple[FileList, CheckpointManifest] | None:
    """Return the list and the manifest of a checkpoint in a bucket; None if there is no COMMIT.

    Raises:
        CheckpointError: Its manifest is missing or damaged.
        RemoteError: S3 refuses or cannot be reached.
    """
    commit = folder.read(COMMIT, MAX_COMMIT_BYTES)
    if commit is None:
        return None
    manifest = folder.read(MANIFEST, MAX_MANIFEST_BYTES)
    if manifest is None:
        raise CheckpointError(f"{folder.url}/{COMMIT}: there is no {MANIFEST} beside it")
    return _make_list(folder.url, manifest, commit, lambda: None)


def _make_list(
    source: str, manifest: bytes, commit: bytes, check_stop: Callable[[], None]
) -> tuple[FileList, CheckpointManifest]:
    parsed = parse_committed(manifest, commit, source)
    segments = parsed.segments()
    for name, content in ((MANIFEST, manifest), (COMMIT, commit)):
        segments[name] = [Segment("", 0, len(content), xxhash.xxh3_128_hexdigest(content))]
    listed = {
        name: ListedFile(sum(part.n_bytes for part in parts), _join((part.n_bytes, part.xxh3_128) for part in parts))
        for name, parts in segments.items()
    }

    def digest(path: Path, name: str) -> str:
        found: list[tuple[int, str]] = []
        for part in segments[name]:
            hashed = xxhash.xxh3_128()
            with translate_os_errors("reading", path):
                files.hash_range(hashed, path, part.byte_offset, part.n_bytes, lambda _: check_stop())
            found.append((part.n_bytes, hashed.hexdigest()))
        return _join(found)

    return FileList(source=source, files=listed, last=(MANIFEST, COMMIT), digest=digest), parsed


def _join(segments: Iterable[tuple[int, str]]) -> str:
    text = ";".join(f"{n_bytes}-{digest}" for n_bytes, digest in segments)
    return f"xxh3-{xxhash.xxh3_128_hexdigest(text.encode())}"
