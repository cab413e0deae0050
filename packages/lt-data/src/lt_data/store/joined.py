"""Joined store: a manifest that names other stores, its parts, which stay where they are.

    {"format": "lt-data-joined-store", "version": 1, "fingerprint", "documents", "tokens",
     "parts": [{"path", "sha256"}, ...], "index": {"sha256", "bytes"}, "dropped": {...}, "checksum"}

Each part is pinned by the SHA-256 of its `manifest.json`, which has the hashes of its shards, so a part that changed is
an error. The documents are those of the parts in order. In memory a joined store is one flat manifest, whose shards are
those of the parts, numbered through; so its fingerprint is that of a flat store with these shards, depends on no path
and not on how the parts were grouped, and packs, streams and exports need not know. Parts are flat: joining a joined
store takes its parts.

A manifest of others must not read files elsewhere. A part is a path inside the folder of the joined store, without `..`
and without a symbolic link that leads out, or else an absolute path in one of the folders that the person lists in the
environment variable LT_DATA_PART_FOLDERS. All paths are checked before a part is opened.

A store that was appended to has generations. Each is a joined store over the parts of the one before and one part with
the new documents, both in one folder:

    STORE/manifest.json, shards/, ...         the store as it was, which is never changed
    STORE/generations/00000/generation.json   names it
    STORE/generations/00001/generation.json   the joined manifest; paths are relative to STORE
    STORE/generations/00001/manifest.json, shards/, ...   the new documents

A store may leave out documents of its parts, duplicates of documents of an earlier part: `dropped` has their totals
and pins the file `kept.extents`, which says what is left (lt_data.store.extents).

STORE opens as its newest generation, STORE/generations/00001 as that one.

A store, or generation, of 1024 shards or more has an index beside its joined manifest (lt_data.store.joined_index),
pinned by its SHA-256: then the manifests of the parts are hashed and not parsed, and the size of a shard's file is
compared when it is first used.

Cost: one read of each part's manifest.
"""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.file_names import to_local_name
from lt_data.storage import read_file, translate_os_errors
from lt_data.store.combined_manifest import LoadedPart, combine_manifests
from lt_data.store.extents import EXTENTS_FILE, Extents, map_extents
from lt_data.store.joined_index import (
    INDEX_FILE,
    MIN_INDEXED_SHARDS,
    ShardLocation,
    ShardLocations,
    decode_joined_index,
    encode_joined_index,
)
from lt_data.store.joined_manifest import FORMAT, IndexFile, JoinedManifest, JoinedPart
from lt_data.store.manifest import (
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    PACK_FOLDER,
    DropList,
    StoreManifest,
    encode_manifest,
)
from lt_data.store.shard_files import check_hash

GENERATION_FOLDER = "generations"
GENERATION_FILE = "generation.json"
UNIT_FOLDER = "units"
"""Of a store that is made in units (lt_data.preparation.units)."""
PLAN_FILE = "plan.json"
PART_FOLDERS = "LT_DATA_PART_FOLDERS"
_REMEDY = "join the stores again"

_GENERATION = re.compile(r"\d{5,}")


@dataclass(frozen=True, kw_only=True)
class LoadedStore:
    """Manifest of a store, and its parts: those of a joined store, or the flat store itself.

    Attributes:
        manifest: the manifest; of a joined store that of a flat store with the same shards.
        folders: folders of the parts.
        locations: location of each shard.
        joined: file of the joined manifest; None for a flat store.
        packs: folder of the packs.
        entries: the parts as the joined manifest has them.
        indexed: True if `locations` are of an index, so that no part's manifest was parsed.
    """

    manifest: StoreManifest
    folders: tuple[Path, ...]
    locations: Sequence[ShardLocation]
    joined: Path | None
    packs: Path
    entries: tuple[JoinedPart, ...] = ()
    indexed: bool = False

    def map_extents(self) -> Extents:
        """Return what the store has of its shards.

        Raises:
            DataError: their file is missing or broken.
        """
        manifest, dropped = self.manifest, self.manifest.dropped
        if dropped is None:
            return Extents.of_shards(manifest.shard_tokens_each, manifest.shard_documents)
        assert self.joined is not None
        path = self.joined.with_name(EXTENTS_FILE)
        tokens, documents = manifest.shard_tokens_each, manifest.shard_documents
        extents = map_extents(path, dropped.extents, shard_tokens=tokens, shard_documents=documents)
        if (extents.n_documents, extents.n_tokens) != (manifest.documents, manifest.tokens):
            raise DataError(f"{path}: its totals are not those of the manifest; copy it again, or {_REMEDY}")
        return extents

    def check_extents(self) -> None:
        """Compare the file of the extents, if there is one, with its hash.

        Raises:
            DataError: it differs.
        """
        if self.manifest.dropped is not None:
            assert self.joined is not None
            check_hash(self.joined.with_name(EXTENTS_FILE), self.manifest.dropped.sha256, self.joined.parent)

    @cached_property
    def parts(self) -> tuple[LoadedPart, ...]:
        """Parts with their manifests, which are read now if there is an index.

        Raises:
            DataError: a manifest is broken or changed.
        """
        assert self.joined is not None
        pairs = zip(self.entries, self.folders, strict=True)
        return tuple(_load_part(entry, folder, self.joined) for entry, folder in pairs)

    def check_index(self) -> None:
        """Compare the index, if there is one, with the manifests of the parts.

        Raises:
            DataError: they differ.
        """
        if self.indexed:
            manifest = _without_dropped(combine_manifests(self.parts), self.manifest.dropped)
            if manifest != self.manifest or manifest.fingerprint != self.manifest.fingerprint:
                raise DataError(f"{self.joined}: the index has other shards or totals than its parts; {_REMEDY}")


def _loaded(parts: Sequence[LoadedPart], manifest: StoreManifest, joined: Path | None, packs: Path) -> LoadedStore:
    """Return a store whose parts were parsed."""
    locations: list[ShardLocation] = []
    first_file = 0
    for part in parts:
        locations += locate_shards(part.folder, part.manifest, first_file)
        first_file += part.manifest.sources.files if part.manifest.shards else 0
    folders = tuple(part.folder for part in parts)
    store = LoadedStore(manifest=manifest, folders=folders, locations=locations, joined=joined, packs=packs)
    vars(store)["parts"] = tuple(parts)
    return store


def locate_shards(folder: Path, manifest: StoreManifest, first_file: int = 0) -> list[ShardLocation]:
    """Return the location of each shard of a flat store; `first_file` is that of its source files."""
    return [
        ShardLocation(
            folder=folder, shard=shard, sources=manifest.sources, columns=manifest.columns, first_file=first_file
        )
        for shard in manifest.shards
    ]


def flat_store(folder: Path, manifest: StoreManifest) -> LoadedStore:
    """Return a flat store in a folder, by its manifest."""
    part = LoadedPart(folder=folder, manifest=manifest, sha256=hashlib.sha256(encode_manifest(manifest)).hexdigest())
    return _loaded([part], manifest, None, folder / PACK_FOLDER)


def load_store(folder: Path) -> LoadedStore:
    """Read the manifest of the store in `folder`, of its newest generation, and those of its parts.

    Raises:
        DataError: a manifest is missing, unreadable or broken, or a part changed or is not allowed.
    """
    if (folder / GENERATION_FILE).is_file():
        return _load_generation(folder)
    if generations := list_generations(folder):
        return _load_generation(generations[-1])
    if not os.path.lexists(folder / MANIFEST_FILE) and (folder / PLAN_FILE).is_file():
        raise DataError(f"{folder}: not all of its units are prepared and joined; run the same lt data prepare again")
    content, values = _read(folder / MANIFEST_FILE)
    if values.get("format") != FORMAT:
        part = _flat_part(folder, content, values)
        return _loaded([part], part.manifest, None, folder / PACK_FOLDER)
    return _load_joined(folder, folder / MANIFEST_FILE, folder)


def load_parts(folders: Sequence[Path]) -> list[LoadedPart]:
    """Read the manifests of flat stores.

    Raises:
        DataError: one is missing or broken, or not of a flat store.
    """
    return [_flat_part(folder, *_read(folder / MANIFEST_FILE)) for folder in folders]


def list_generations(folder: Path) -> list[Path]:
    """Return the folders of the generations of a store, oldest first; none if nothing was appended to it.

    Raises:
        DataError: one is missing.
    """
    with translate_os_errors("read", folder / GENERATION_FOLDER):
        if not (folder / GENERATION_FOLDER).is_dir():
            return []
        found = [
            path
            for path in (folder / GENERATION_FOLDER).iterdir()
            if _GENERATION.fullmatch(path.name) and (path / GENERATION_FILE).is_file()
        ]
    found.sort(key=lambda path: int(path.name))
    if [int(path.name) for path in found] != [*range(len(found))]:
        raise DataError(f"{folder / GENERATION_FOLDER}: {found[-1].name} is there and an older one is not; restore it")
    return found


def find_generation(folder: Path, fingerprint: str) -> Path | None:
    """Return the generation with this beginning of its fingerprint, if any.

    Raises:
        DataError: a manifest of a generation is broken.
    """
    for generation in reversed(list_generations(folder)):
        file = generation / GENERATION_FILE
        if read_joined(file).fingerprint.startswith(fingerprint):
            return generation
    return None


def read_joined(file: Path) -> JoinedManifest:
    """Read a joined manifest; its parts are not opened.

    Raises:
        DataError: it is missing or broken.
    """
    values = _read(file)[1]
    if values.get("format") != FORMAT:
        raise DataError(f"{file}: not the manifest of a joined store; {_REMEDY}")
    return JoinedManifest.from_dict(values, str(file))


def new_part(root: Path, folder: Path, manifest: StoreManifest) -> LoadedPart:
    """Return a part that will be in a folder inside `root`."""
    sha256 = hashlib.sha256(encode_manifest(manifest)).hexdigest()
    return LoadedPart(folder=folder, manifest=manifest, sha256=sha256, path=folder.relative_to(root).as_posix())


def join_parts(
    parts: Sequence[LoadedPart], *, appended: str = "", dropped: DropList | None = None
) -> tuple[JoinedManifest, StoreManifest, bytes | None]:
    """Return the joined manifest of parts, that of the flat store, and the index of a large one.

    Args:
        parts: the parts, with their recorded paths.
        dropped: what to leave out of them.
        appended: fingerprint of the listing of the sources that a generation added.

    Raises:
        DataError: they do not fit together.
    """
    flat = combine_manifests(parts)
    manifest = _without_dropped(flat, dropped)
    joined = JoinedManifest(
        fingerprint=manifest.fingerprint,
        documents=manifest.documents,
        tokens=manifest.tokens,
        parts=tuple(JoinedPart(path=part.path, sha256=part.sha256) for part in parts),
        appended=appended,
        dropped=dropped,
    )
    if len(manifest.shards) < MIN_INDEXED_SHARDS:
        return joined, manifest, None
    content = encode_joined_index(flat, [part.manifest for part in parts])
    index = IndexFile(sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))
    return replace(joined, index=index), manifest, content


def _without_dropped(flat: StoreManifest, dropped: DropList | None) -> StoreManifest:
    """Return the manifest of all documents of the parts without those that are dropped."""
    if dropped is None:
        return flat
    manifest = replace(
        flat,
        text_bytes=dropped.text_bytes,
        read=dropped.read,
        left_out=dropped.left_out,
        special_strings=dropped.special_strings,
        selection=replace(flat.selection, drop_duplicates=True),
        dropped=dropped,
    )
    vars(manifest).update(shard_tokens_each=flat.shard_tokens_each, shard_documents=flat.shard_documents)
    return manifest


def _load_generation(folder: Path) -> LoadedStore:
    absolute = Path(os.path.abspath(folder))
    file = folder / GENERATION_FILE
    if absolute.parent.name != GENERATION_FOLDER or not _GENERATION.fullmatch(absolute.name):
        raise DataError(f"{file}: not in the folder {GENERATION_FOLDER} of its store; move it back")
    root = folder.parent.parent if len(folder.parts) > 2 else absolute.parent.parent
    return _load_joined(root, file, root if int(absolute.name) == 0 else folder)


def _load_joined(root: Path, file: Path, home: Path) -> LoadedStore:
    """Read the parts of a joined store.

    Args:
        root: folder that the paths are relative to.
        file: the joined manifest.
        home: folder with its packs.

    Raises:
        DataError: see `load_store`.
    """
    joined = read_joined(file)
    folders = [_allowed_folder(root, part, file) for part in joined.parts]
    if joined.index is not None:
        return _load_indexed(joined, tuple(folders), file, home)
    parts = [_load_part(entry, folder, file) for entry, folder in zip(joined.parts, folders, strict=True)]
    manifest = _without_dropped(combine_manifests(parts), joined.dropped)
    stated = (joined.fingerprint, joined.documents, joined.tokens)
    if stated != (manifest.fingerprint, manifest.documents, manifest.tokens):
        raise DataError(f"{file}: fingerprint or totals are not those of its parts; {_REMEDY}")
    if not manifest.is_consistent:
        raise DataError(f"{file}: dropped does not match the parts; {_REMEDY}")
    return _loaded(parts, manifest, file, home / PACK_FOLDER)


def _load_indexed(joined: JoinedManifest, folders: tuple[Path, ...], file: Path, home: Path) -> LoadedStore:
    """Load a joined store by its index; the manifests of the parts are hashed and not parsed."""
    assert joined.index is not None
    path = file.with_name(INDEX_FILE)
    with translate_os_errors("read the index", path):
        content = read_file(path, max_bytes=joined.index.bytes)
    if hashlib.sha256(content).hexdigest() != joined.index.sha256:
        raise DataError(f"{path}: SHA-256 differs from {file.name}: copy it again, or {_REMEDY}")
    for entry, folder in zip(joined.parts, folders, strict=True):
        _read_pinned(entry, folder, file)
    index = decode_joined_index(content, joined.fingerprint, str(path))
    manifest = _without_dropped(index.manifest, joined.dropped)
    vars(manifest).update(fingerprint=joined.fingerprint)  # taken, not computed, as that of the index
    if len(index.parts) != len(folders) or (joined.documents, joined.tokens) != (manifest.documents, manifest.tokens):
        raise DataError(f"{path}: parts or totals are not those of {file.name}; {_REMEDY}")
    return LoadedStore(
        manifest=manifest,
        folders=folders,
        locations=ShardLocations(folders=folders, parts=index.parts, shards=index.shards),
        joined=file,
        packs=home / PACK_FOLDER,
        entries=joined.parts,
        indexed=True,
    )


def _read_pinned(entry: JoinedPart, folder: Path, file: Path) -> bytes:
    """Return a part's manifest, if it is the one that was joined."""
    path = folder / MANIFEST_FILE
    with translate_os_errors("read the token store's", path):
        content = read_file(path, max_bytes=MAX_MANIFEST_BYTES)
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise DataError(f"{folder}: changed since it was joined to {file}; restore this part, or join the stores again")
    return content


def _load_part(entry: JoinedPart, folder: Path, file: Path) -> LoadedPart:
    content = _read_pinned(entry, folder, file)
    values = strict_json.load_object(content, str(folder / MANIFEST_FILE), "copy the store again or prepare it again")
    return replace(_flat_part(folder, content, values), path=entry.path)


def _allowed_folder(root: Path, part: JoinedPart, file: Path) -> Path:
    """Return the folder of a part, if it may be read."""
    folder = root / to_local_name(part.path)
    allowed = [Path(name) for name in os.environ.get(PART_FOLDERS, "").split(os.pathsep) if name]
    if any(_is_inside(folder, other) for other in (allowed if part.is_elsewhere else [root, *allowed])):
        return folder
    raise DataError(
        f"{file}: its part {folder} lies outside of {root}; if you trust this file, list a folder with the part in the "
        f"environment variable {PART_FOLDERS}"
    )


def _is_inside(path: Path, folder: Path) -> bool:
    root = os.path.realpath(folder)
    return os.path.commonpath([os.path.realpath(path), root]) == root


def _flat_part(folder: Path, content: bytes, values: Mapping[str, Any]) -> LoadedPart:
    manifest = StoreManifest.from_dict(values, str(folder / MANIFEST_FILE))
    return LoadedPart(folder=folder, manifest=manifest, sha256=hashlib.sha256(content).hexdigest())


def _read(path: Path) -> tuple[bytes, dict[str, Any]]:
    with translate_os_errors("read the token store's", path):
        content = read_file(path, max_bytes=MAX_MANIFEST_BYTES)
    return content, strict_json.load_object(content, str(path), "copy the store again or prepare it again")
