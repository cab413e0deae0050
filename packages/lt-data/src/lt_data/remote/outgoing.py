"""What a folder on this machine consists of that is to be sent (one in a bucket: lt_data.remote.parcel).

A joined store is sent as a flat one. The sources of its documents name files by their index in the whole store, so
those of later parts are written again while they are sent.

Cost: each file is looked at, and none but a store's manifest is read; of a joined store also the sources of its
documents, 8 bytes for each, one shard at a time.
"""

import hashlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from lt_data.errors import DataError
from lt_data.file_names import to_portable_name
from lt_data.packing.pack_header import PACK_FILE as PACK_HEADER
from lt_data.packing.packs import list_pack_folders
from lt_data.remote.contents import LISTING, check_name
from lt_data.remote.parcel import file_hashes, is_joined, is_store
from lt_data.storage import open_regular, read_file, read_regular, translate_os_errors
from lt_data.store.document_sources import SOURCES_FILE, decode_sources, encode_source_files, shift_files
from lt_data.store.manifest import MANIFEST_FILE as MANIFEST
from lt_data.store.manifest import PACK_FOLDER, SHARD_FOLDER, TOKENIZER_FOLDER, StoreManifest, encode_manifest
from lt_data.store.token_store import TokenStore


@dataclass(frozen=True, kw_only=True)
class LocalParcel:
    """A folder on this machine that is to be sent.

    Attributes:
        folder: where it is.
        paths: the files that lie elsewhere, those of the parts of a joined store, which becomes a flat one.
        sizes: its files in the order in which they are sent, a store's manifest left out: name → bytes.
        hashes: the SHA-256 (hex) that the store's manifest tells of some of them.
        manifest: the bytes of the store's manifest; None for a folder of another kind.
        made: makers of the files that are on no disk: name → content.
    """

    folder: Path
    sizes: dict[str, int]
    hashes: dict[str, str]
    manifest: bytes | None
    paths: dict[str, Path] = field(default_factory=dict)
    made: dict[str, Callable[[], bytes]] = field(default_factory=dict)

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading, unbuffered."""
        return io.BytesIO(self.made[name]()) if name in self.made else open_regular(self.path(name))

    def path(self, name: str) -> Path:
        """Return where a file is."""
        return self.paths.get(name, self.folder / name)

    @property
    def n_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(self.sizes.values())


def of_folder(folder: Path) -> LocalParcel:
    """Look at a folder that is to be sent; nothing but a store's manifest is read.

    Raises:
        DataError: it is no folder or has no files, something in it is no plain file, or it is a store in parts.
    """
    sizes: dict[str, int] = {}
    with translate_os_errors("look at", folder):
        for at, folders, files in os.walk(folder, onerror=_raise):
            for name in (*folders, *files):
                path = Path(at, name)
                if path.is_symlink() or not (path.is_dir() if name in folders else path.is_file()):
                    raise DataError(f"{path}: not a plain file or folder: put what it stands for in its place")
            for name in files:
                path = Path(at, name)
                sizes[_name(path.relative_to(folder))] = path.stat().st_size
    if not sizes:
        raise DataError(f"{folder}: there is nothing to upload: no such folder, or no file in it")
    sizes.pop(LISTING, None)  # of an earlier download: written again
    content = _manifest_of(folder) if MANIFEST in sizes else None
    hashes: dict[str, str] = {}
    paths: dict[str, Path] = {}
    made: dict[str, Callable[[], bytes]] = {}
    if content is not None:
        store = TokenStore(folder)
        manifest = store.manifest
        if manifest.dropped is not None:
            raise DataError(
                f"{folder}: leaves out duplicates of its parts; make a flat store of it first (lt data merge --units)"
            )
        if store.is_joined:
            manifest, made = _add_sources(store)
            content = encode_manifest(manifest)
            paths = _paths_of(store, manifest)
            with translate_os_errors("look at", folder):
                sizes = {name: path.stat().st_size for name, path in paths.items()}
            sizes |= {name: len(make()) for name, make in made.items()}
        hashes = file_hashes(manifest)
        sizes.pop(MANIFEST, None)
    # A pack's description after its arrays, as everywhere: what makes a thing whole comes last.
    ordered = sorted(sizes, key=lambda name: (name.endswith(f"/{PACK_HEADER}"), name.encode("utf-8", "replace")))
    return LocalParcel(
        folder=folder, sizes={n: sizes[n] for n in ordered}, hashes=hashes, manifest=content, paths=paths, made=made
    )


def _add_sources(store: TokenStore) -> tuple[StoreManifest, dict[str, Callable[[], bytes]]]:
    """Return the manifest of a joined store as a flat one with the sources of its documents, and the files to make.

    Raises:
        DataError: sources differ from their hash.
    """
    manifest, made = store.manifest, dict[str, Callable[[], bytes]]()
    if not store.source_files:
        return manifest, made
    if not manifest.sources.listed:
        made[SOURCES_FILE] = partial(encode_source_files, store.source_files)
        list_sha256 = hashlib.sha256(made[SOURCES_FILE]()).hexdigest()
        manifest = replace(manifest, sources=replace(manifest.sources, list_sha256=list_sha256))
    shards = [*manifest.shards]
    for number, shard in enumerate(shards):
        location = store.shard_location(number)
        sha256 = location.shard.src_sha256
        if sha256 and location.first_file:
            make = made[f"{SHARD_FOLDER}/{shard.name}.src"] = partial(_shifted_sources, store, number)
            sha256 = hashlib.sha256(make()).hexdigest()
        shards[number] = replace(shard, src_sha256=sha256)
    return replace(manifest, shards=tuple(shards)), made


def _shifted_sources(store: TokenStore, number: int) -> bytes:
    """Return the sources of the documents of a shard, by the index of the file in the whole store."""
    location, path = store.shard_location(number), store.shard_path(number, "src")
    documents = location.shard.documents
    with translate_os_errors("read", path):
        content = read_file(path, max_bytes=8 * documents, inside=location.folder)
    if hashlib.sha256(content).hexdigest() != location.shard.src_sha256:
        raise DataError(f"{path}: its SHA-256 is not the one in the store's manifest: copy it again or prepare again")
    sources = decode_sources(content, documents=documents, files=location.sources.files, path=str(path))
    return shift_files(sources, location.first_file).tobytes()


def _paths_of(store: TokenStore, manifest: StoreManifest) -> dict[str, Path]:
    """Return the files of a joined store that are on a disk, by their names in a flat store."""
    paths = {f"{TOKENIZER_FOLDER}/{name}": store.tokenizer_folder / name for name in store.manifest.tokenizer.files}
    for number, shard in enumerate(manifest.shards):
        for name in shard.hashes:
            paths[f"{SHARD_FOLDER}/{name}"] = store.shard_path(number, name.rpartition(".")[2])
    for folder in list_pack_folders(store):
        for path in folder.iterdir():
            paths[f"{PACK_FOLDER}/{_name(path.relative_to(folder.parent))}"] = path
    return paths


def _raise(error: OSError) -> None:
    raise error


def _name(path: Path) -> str:
    name = to_portable_name(path.as_posix())
    if not name.isprintable():
        raise DataError(f"{path}: a file name that is no printable UTF-8 cannot be an object's name: rename it")
    return check_name(name, str(path))


def _manifest_of(folder: Path) -> bytes | None:
    with translate_os_errors("read", folder / MANIFEST):
        content = read_regular(folder / MANIFEST)
    return content if is_store(content) or is_joined(content) else None
