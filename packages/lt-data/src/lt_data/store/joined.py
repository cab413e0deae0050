"""Joined store: a manifest that names other stores, its parts, which stay where they are.

    {"format": "lt-data-joined-store", "version": 1, "fingerprint", "documents", "tokens",
     "parts": [{"path", "sha256"}, ...], "checksum"}

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

STORE opens as its newest generation, STORE/generations/00001 as that one.

Cost: one read of each part's manifest.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.file_names import is_plain_name, to_local_name
from lt_data.storage import read_file, translate_os_errors
from lt_data.store.document_sources import MAX_SOURCE_FILES
from lt_data.store.manifest import (
    MANIFEST_FILE,
    MAX_LISTED_SOURCES,
    MAX_MANIFEST_BYTES,
    PACK_FOLDER,
    ColumnInfo,
    DocumentTotals,
    ShardFile,
    SourceFiles,
    StoreManifest,
    check_counts,
    check_hashes,
    checksum_of,
    encode_manifest,
)

FORMAT = "lt-data-joined-store"
VERSION = 1
GENERATION_FOLDER = "generations"
GENERATION_FILE = "generation.json"
PART_FOLDERS = "LT_DATA_PART_FOLDERS"
SHARED_FIELDS = ("bos", "eos", "dtype", "special_tokens_as", "selection", "map", "shard_tokens")
"""Manifest fields that parts share, besides the tokenizer."""
_CHECKED_BYTES = "checked_bytes"
_REMEDY = "join the stores again"

_GENERATION = re.compile(r"\d{5,}")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class JoinedPart:
    """Part of a joined store: path of its folder, and SHA-256 of its manifest.

    The path is relative to the folder of the joined store ("." is that folder), or absolute for a part elsewhere.
    """

    path: str
    sha256: str

    def __post_init__(self) -> None:
        names = self.path.removeprefix("/").split("/")
        if self.path != "." and not all(map(is_plain_name, names)):
            raise DataError(f"part {self.path!r} is neither a path inside the folder nor an absolute one, without ..")
        check_hashes(f"sha256 of part {self.path}", [self.sha256])

    @property
    def is_elsewhere(self) -> bool:
        """True if the path is absolute."""
        return self.path.startswith("/")


@dataclass(frozen=True, kw_only=True)
class JoinedManifest:
    """Manifest of a joined store; `fingerprint`, `documents` and `tokens` are those of all parts together.

    `appended` is the fingerprint of the listing of the sources that a generation added, otherwise "".
    """

    fingerprint: str
    documents: int
    tokens: int
    parts: tuple[JoinedPart, ...]
    appended: str = ""

    def __post_init__(self) -> None:
        check_hashes("fingerprint", [self.fingerprint, *([self.appended] if self.appended else [])])
        check_counts(documents=self.documents, tokens=self.tokens)
        repeated = [path for path, n in Counter(part.path for part in self.parts).items() if n > 1]
        if repeated or not self.parts:
            raise DataError(f"part {repeated[0]!r} is named twice" if repeated else "it names no part")

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        values = {"format": FORMAT, "version": VERSION, **asdict(self)}
        if not self.appended:
            del values["appended"]
        return (json.dumps({**values, "checksum": checksum_of(values)}, indent=2) + "\n").encode()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str) -> "JoinedManifest":
        """Parse the values of the file; `source` names it in errors.

        Raises:
            DataError: another version, a field or path that is not allowed, or a wrong checksum.
        """
        fields = dict(values)
        del fields["format"]
        if (version := fields.pop("version", None)) != VERSION:
            raise DataError(f"{source}: format version {version!r}; this lt-data reads {VERSION}: update lt-data")
        checksum = fields.pop("checksum", None)
        manifest = strict_json.parse(cls, fields, source, _REMEDY)
        if checksum != checksum_of({name: value for name, value in values.items() if name != "checksum"}):
            raise DataError(f"{source}: checksum does not match the fields; copy the file again, or {_REMEDY}")
        return manifest


@dataclass(frozen=True, kw_only=True)
class LoadedPart:
    """Part that was read: its folder, manifest, SHA-256 of the manifest's file, and recorded path."""

    folder: Path
    manifest: StoreManifest
    sha256: str
    path: str = "."


@dataclass(frozen=True, kw_only=True)
class ShardLocation:
    """Location of a shard.

    Attributes:
        folder: the flat store that it is in.
        shard: its entry in the manifest there.
        sources: the source files of that store.
        columns: its kept columns.
        first_file: source files of the parts before.
    """

    folder: Path
    shard: ShardFile
    sources: SourceFiles
    columns: tuple[ColumnInfo, ...] = ()
    first_file: int = 0


@dataclass(frozen=True, kw_only=True)
class LoadedStore:
    """Manifest of a store, and its parts: those of a joined store, or the flat store itself.

    Attributes:
        manifest: the manifest; of a joined store that of a flat store with the same shards.
        parts: the parts.
        joined: file of the joined manifest; None for a flat store.
        packs: folder of the packs.
    """

    manifest: StoreManifest
    parts: tuple[LoadedPart, ...]
    joined: Path | None
    packs: Path

    @property
    def locations(self) -> list[ShardLocation]:
        """Location of each shard."""
        locations: list[ShardLocation] = []
        first_file = 0
        for part in self.parts:
            locations += locate_shards(part.folder, part.manifest, first_file)
            first_file += part.manifest.sources.files if part.manifest.shards else 0
        return locations


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
    return LoadedStore(manifest=manifest, parts=(part,), joined=None, packs=folder / PACK_FOLDER)


def load_store(folder: Path) -> LoadedStore:
    """Read the manifest of the store in `folder`, of its newest generation, and those of its parts.

    Raises:
        DataError: a manifest is missing, unreadable or broken, or a part changed or is not allowed.
    """
    if (folder / GENERATION_FILE).is_file():
        return _load_generation(folder)
    if generations := list_generations(folder):
        return _load_generation(generations[-1])
    content, values = _read(folder / MANIFEST_FILE)
    if values.get("format") != FORMAT:
        part = _flat_part(folder, content, values)
        return LoadedStore(manifest=part.manifest, parts=(part,), joined=None, packs=folder / PACK_FOLDER)
    return _load_joined(folder, folder / MANIFEST_FILE, folder)


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


def join_parts(parts: Sequence[LoadedPart], *, appended: str = "") -> JoinedManifest:
    """Return the joined manifest of parts, by their recorded paths.

    Raises:
        DataError: they do not fit together.
    """
    manifest = combine_manifests(parts)
    return JoinedManifest(
        fingerprint=manifest.fingerprint,
        documents=manifest.documents,
        tokens=manifest.tokens,
        parts=tuple(JoinedPart(path=part.path, sha256=part.sha256) for part in parts),
        appended=appended,
    )


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
    parts: list[LoadedPart] = []
    for entry, folder in zip(joined.parts, folders, strict=True):
        content, part_values = _read(folder / MANIFEST_FILE)
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise DataError(
                f"{folder}: changed since it was joined to {file}; restore this part, or join the stores again"
            )
        parts.append(replace(_flat_part(folder, content, part_values), path=entry.path))
    manifest = combine_manifests(parts)
    stated = (joined.fingerprint, joined.documents, joined.tokens)
    if stated != (manifest.fingerprint, manifest.documents, manifest.tokens):
        raise DataError(f"{file}: fingerprint or totals are not those of its parts; {_REMEDY}")
    return LoadedStore(manifest=manifest, parts=tuple(parts), joined=file, packs=home / PACK_FOLDER)


def combine_manifests(parts: Sequence[LoadedPart]) -> StoreManifest:
    """Return the manifest of a flat store with the shards of the parts.

    Raises:
        DataError: parts have another tokenizer or other options than the first; the message names them.
    """
    first = parts[0].manifest
    for part in parts:
        pairs = [
            ("tokenizer", first.tokenizer.sha256, part.manifest.tokenizer.sha256),
            *((name, getattr(first, name), getattr(part.manifest, name)) for name in SHARED_FIELDS),
        ]
        if different := [f"{name} ({a} and {b})" for name, a, b in pairs if a != b]:
            raise DataError(
                f"{part.folder} cannot be joined to {parts[0].folder}: {'; '.join(different)}; prepare both alike, or "
                "use them as a mixture"
            )
    manifests = [part.manifest for part in parts]
    shards = [shard for manifest in manifests for shard in manifest.shards]
    if (files := sum(manifest.sources.files for manifest in manifests)) > MAX_SOURCE_FILES:
        raise DataError(f"{files} source files: a joined store has at most {MAX_SOURCE_FILES}; use them as a mixture")
    columns = _combine_columns([manifest.columns for manifest in manifests])
    has_text = all(manifest.text_bytes or not manifest.documents for manifest in manifests)

    def total(amounts: Iterable[DocumentTotals]) -> DocumentTotals:
        amount = sum(amounts, DocumentTotals())
        return amount if has_text else replace(amount, text_bytes=0)

    left_out = [manifest.left_out for manifest in manifests]
    return replace(
        first,
        shards=tuple(_renumbered(shard, number, bool(columns)) for number, shard in enumerate(shards)),
        text_bytes=sum(manifest.text_bytes for manifest in manifests) if has_text else 0,
        read=total(manifest.read for manifest in manifests),
        left_out=_by_key(left_out, total),
        skipped=_by_key([manifest.skipped for manifest in manifests], sum),
        special_strings=_by_key([manifest.special_strings for manifest in manifests], sum),
        # equal documents in different parts were not compared
        selection=first.selection if len(parts) == 1 else replace(first.selection, drop_duplicates=False),
        engine=merge_engines(manifests),
        columns=columns,
        sources=_combine_sources([manifest.sources for manifest in manifests]),
        merged_from=first.merged_from if len(parts) == 1 else 1,
        split=first.split if len(parts) == 1 else None,
        part=None,
    )


def merge_engines(manifests: Sequence[StoreManifest]) -> dict[str, Any]:
    """Return the engine entry: that of all parts with summed checked bytes, or a list if they differ."""
    if not (engines := [dict(manifest.engine) for manifest in manifests if manifest.engine]):
        return {}
    checked = sum(engine.get(_CHECKED_BYTES, 0) for engine in engines)
    distinct: list[dict[str, Any]] = []
    for engine in engines:
        if all(engine | {_CHECKED_BYTES: 0} != other | {_CHECKED_BYTES: 0} for other in distinct):
            distinct.append(engine)
    return distinct[0] | {_CHECKED_BYTES: checked} if len(distinct) == 1 else {"parts": distinct}


def _renumbered(shard: ShardFile, number: int, has_columns: bool) -> ShardFile:
    # a flat store would have other source files: `src_sha256` of the part is in its location
    shard = replace(shard, name=f"{number:05d}", src_sha256="")
    return shard if has_columns else replace(shard, arrow_sha256="", arrow_bytes=0)


def _combine_columns(columns: Sequence[tuple[ColumnInfo, ...]]) -> tuple[ColumnInfo, ...]:
    """Return the columns of all parts together; none if parts have others than the first."""
    if len({tuple((column.name, column.type) for column in each) for each in columns}) > 1:
        return ()
    return tuple(replace(same[0], nulls=sum(column.nulls for column in same)) for same in zip(*columns, strict=True))


def _by_key(mappings: Sequence[Mapping[str, T]], total: Callable[[Iterable[T]], T]) -> dict[str, T]:
    keys = sorted({key for mapping in mappings for key in mapping})
    return {key: total(mapping[key] for mapping in mappings if key in mapping) for key in keys}


def _combine_sources(sources: Sequence[SourceFiles]) -> SourceFiles:
    if len(sources) == 1:
        return replace(sources[0], list_sha256="")
    listed = [file for entry in sources for file in entry.listed]
    files = sum(entry.files for entry in sources)
    return SourceFiles(
        files=files,
        bytes=sum(entry.bytes for entry in sources),
        sha256=hashlib.sha256("".join(f"{entry.sha256}\n" for entry in sources).encode()).hexdigest(),
        skipped_links=sum(entry.skipped_links for entry in sources),
        listed=tuple(listed) if len(listed) == files <= MAX_LISTED_SOURCES else (),
        unchecked=_by_key([entry.unchecked for entry in sources], sum),
    )


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
