"""What a folder in a bucket consists of, and what makes it whole (one on this machine: lt_data.remote.outgoing).

A token store is whole where its `manifest.json` lies, which names every shard by its SHA-256; any other folder where
its listing lies (lt_data.remote.contents), which names every file. An upload leaves a listing beside a store's manifest
too, for its packs and for readers of single blocks; a store that other programs have copied does without.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.remote.contents import LISTING, Listed, check_name, decode_listing
from lt_data.remote.s3 import S3Folder
from lt_data.store.document_sources import SOURCES_FILE
from lt_data.store.joined_manifest import FORMAT as JOINED_FORMAT
from lt_data.store.manifest import FORMAT, PACK_FOLDER, SHARD_FOLDER, TOKENIZER_FOLDER, StoreManifest
from lt_data.store.manifest import MANIFEST_FILE as MANIFEST

_LARGEST_MARK = 2**31
_REMEDY = "upload the store again"


def is_store(content: bytes) -> bool:
    """Whether a `manifest.json` is one of a token store; other folders may have one of their own."""
    return _format(content) == FORMAT


def is_joined(content: bytes) -> bool:
    """Return True if a `manifest.json` is that of a joined store."""
    return _format(content) == JOINED_FORMAT


def _format(content: bytes) -> Any:
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return values.get("format") if isinstance(values, dict) else None


def file_hashes(manifest: StoreManifest) -> dict[str, str]:
    """The SHA-256 (hex) of every file that a store's manifest names."""
    found = {f"{TOKENIZER_FOLDER}/{name}": sha256 for name, sha256 in manifest.tokenizer.files.items()}
    for shard in manifest.shards:
        found |= {f"{SHARD_FOLDER}/{name}": sha256 for name, sha256 in shard.hashes.items()}
    if manifest.sources.list_sha256:
        found[SOURCES_FILE] = manifest.sources.list_sha256
    return found


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """What an object must be: its bytes, and its SHA-256 (hex) and blocks, as far as they are known."""

    n_bytes: int
    sha256: str | None = None
    listed: Listed | None = None


@dataclass(frozen=True, kw_only=True)
class RemoteParcel:
    """A folder in a bucket that is there whole.

    Attributes:
        source: where it lies.
        files: what every file in it must be, a store's manifest left out.
        manifest: the bytes of the store's manifest; None for a folder of another kind.
        identity: another content has another one.
        problems: what is missing there or has another size.
    """

    source: S3Folder
    files: dict[str, RemoteFile]
    manifest: bytes | None
    identity: str
    problems: tuple[str, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(file.n_bytes for file in self.files.values())

    def store(self) -> StoreManifest:
        """The description of the store.

        Raises:
            DataError: it is none.
        """
        source = f"{self.source.url}/{MANIFEST}"
        if self.manifest is None:
            raise DataError(f"{self.source.url}: a folder of files, not a token store (no {MANIFEST} of one)")
        return StoreManifest.from_dict(strict_json.load_object(self.manifest, source, _REMEDY), source)


def of_bucket(source: S3Folder) -> RemoteParcel:
    """Look at a folder in a bucket; its manifest, its listing and the names in it are read.

    Raises:
        RemoteError: S3 refuses or cannot be reached.
        DataError: nothing whole is there: no upload has ended.
    """
    content = source.read(MANIFEST, _LARGEST_MARK)
    listing = source.read(LISTING, _LARGEST_MARK)
    there = source.objects()
    if content is not None and not is_store(content) and listing is None:
        content = None
    listed = None if listing is None else decode_listing(listing, f"{source.url}/{LISTING}")
    if content is None and listed is None:
        state = f"{len(there)} objects, but no {MANIFEST} and no {LISTING}: an upload that has not ended, or something "
        raise DataError(f"{source.url}: there is {state + 'else' if there else 'nothing'}; check the address")
    if listed is not None and MANIFEST in listed and (content is None or is_store(content)):
        marked = listed.pop(MANIFEST)
        if content is None or hashlib.sha256(content).hexdigest() != marked.sha256:
            raise DataError(
                f"{source.url}: its {MANIFEST} and {LISTING} do not fit: an upload has not ended; wait or repeat it"
            )
        files = {name: RemoteFile(n_bytes=f.n_bytes, sha256=f.sha256, listed=f) for name, f in listed.items()}
    elif listed is not None:
        content = None
        files = {name: RemoteFile(n_bytes=f.n_bytes, sha256=f.sha256, listed=f) for name, f in listed.items()}
    else:
        assert content is not None
        name = f"{source.url}/{MANIFEST}"
        manifest = StoreManifest.from_dict(strict_json.load_object(content, name, _REMEDY), name)
        files = _files_of(manifest, there, source.url)
    identity = hashlib.sha256((content or b"") + b"\n" + (listing or b"")).hexdigest()
    return RemoteParcel(
        source=source, files=files, manifest=content, identity=identity, problems=_problems(files, there)
    )


def _files_of(manifest: StoreManifest, there: Mapping[str, int], url: str) -> dict[str, RemoteFile]:
    """The files of a store that has no listing: those that the manifest names, and the packs that are there."""
    hashes = file_hashes(manifest)
    sizes = {name: there.get(name, -1) for name in hashes}
    for shard in manifest.shards:
        sizes |= {f"{SHARD_FOLDER}/{name}": size for name, size in shard.sizes(manifest.dtype).items()}
    files = {check_name(name, url): RemoteFile(n_bytes=size, sha256=hashes[name]) for name, size in sizes.items()}
    for name, size in there.items():
        if name.startswith(f"{PACK_FOLDER}/"):
            files[check_name(name, url)] = RemoteFile(n_bytes=size)
    return files


def _problems(files: Mapping[str, RemoteFile], there: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(
        f"{name} has {there[name]} bytes, not {file.n_bytes}" if name in there else f"{name} is not there"
        for name, file in files.items()
        if there.get(name) != file.n_bytes
    )
