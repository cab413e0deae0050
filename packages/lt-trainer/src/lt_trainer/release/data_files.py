"""Data of a release: manifests and packs, and tokens and sources as far as their licenses allow.

    data/STORE/manifest.json, tokenizer/, packs/*/pack.json      of every store
    data/STORE/shards/, packs/*/*.npy                            the tokens, if all its sources may be redistributed
    sources/SHA256/NAME                                          each source file that may be redistributed
    data/sources.jsonl                                           a line per source file: `SourceEntry`

A store is released under the name of its field of the recipe: `train`, `train-NAME` of a mixture, `validation`,
`validation-NAME`. It is written as one flat store, also if it is joined from others. Names of sources pass the filter,
so the manifest's checksum is that of the filtered one; its fingerprint, which identifies the tokens, does not change.

Cost: one read of all tokens (they are verified first) and of the source files; a copy of what is included.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lt_ckpt.finished_folder import is_valid_name
from lt_data import StoreManifest, TokenStore
from lt_data.file_names import to_local_name
from lt_data.packing.pack_header import PACK_FILE
from lt_data.packing.pack_index import PackIndex
from lt_data.packing.packs import open_pack
from lt_data.sources.reader import summarize_sources
from lt_data.store.document_sources import SOURCES_FILE, encode_source_files
from lt_data.store.manifest import MANIFEST_FILE, PACK_FOLDER, SHARD_FOLDER, TOKENIZER_FOLDER, encode_manifest
from lt_data.store.source_files import SourceFile
from lt_trainer.config.sections.data import DataOptions
from lt_trainer.files import open_regular, parse_json, read_text
from lt_trainer.release.filtering import TextFilter
from lt_trainer.release.license_file import LicenseFile
from lt_trainer.release.mof import is_open_license
from lt_trainer.release.typed import from_json, is_inside

SOURCE_LIST = "data/sources.jsonl"
_FILE_INDEX_BITS = 40
MAX_NAME = 180
"""Characters of a source's name in the bundle, its end with the suffix."""


@dataclass(frozen=True, kw_only=True)
class SourceEntry:
    """Source file of a released store.

    Attributes:
        store: Name of the store in the bundle.
        path: Name of the file in the store's manifest, filtered.
        bytes: Its size.
        sha256: SHA-256 of its content.
        documents: Documents of the store that are from it; None if the store does not know.
        tokens: Their ids; None likewise.
        license: SPDX expression; "" if none was given.
        redistribute: Whether it may be redistributed, as was given.
        name: Name of the corpus; may be "".
        url: Where it can be obtained; may be "".
        file: Path in the bundle; "" if it is not in it.
        left_out: Why it is not in the bundle; "" if it is.
    """

    store: str
    path: str
    bytes: int
    sha256: str
    documents: int | None
    tokens: int | None
    license: str
    redistribute: bool
    name: str
    url: str
    file: str
    left_out: str

    def as_source_file(self) -> SourceFile:
        """Return the entry as the store's manifest has it."""
        return SourceFile(path=self.path, bytes=self.bytes, sha256=self.sha256)

    @property
    def problem(self) -> str:
        """Reason why the file does not count as released openly; "" if it does."""
        if not self.license:
            return f"source {self.path} has no license"
        if not is_open_license(self.license):
            return f"source {self.path}: {self.license} is not a license that counts as open"
        if not self.redistribute:
            return f"source {self.path} may not be redistributed"
        if not self.file and not self.url:
            return f"source {self.path} is not in the release ({self.left_out}) and has no url"
        return ""


@dataclass(frozen=True, kw_only=True)
class ReleasedStore:
    """Store of the run and what of it is released."""

    name: str
    field: str
    store: TokenStore
    pack: PackIndex
    entries: tuple[SourceEntry, ...]
    source_paths: Mapping[str, Path]
    """SHA-256 → file on this machine, of those to be included."""

    @property
    def has_tokens(self) -> bool:
        """True if its tokens are released: all its sources are known and may be redistributed."""
        return bool(self.entries) and all(entry.license and entry.redistribute for entry in self.entries)


def store_names(data: DataOptions) -> dict[str, tuple[str, str]]:
    """Return the name in the bundle of each store of a recipe, with its field and path."""
    named: dict[str, tuple[str, str]] = {}
    for field, path in data.store_paths().items():
        parts = field.split(".")
        kind = "validation" if parts[1].startswith("validation") else "train"
        named[f"{kind}-{parts[2]}" if len(parts) > 2 else kind] = (field, path)
    return named


def iter_sources(store: TokenStore) -> Iterator[tuple[SourceFile, int | None, int | None]]:
    """Yield each source file of a store with its numbers of documents and ids, None if unknown."""
    files = store.source_files
    documents = np.zeros(len(files), np.int64)
    tokens = np.zeros(len(files), np.int64)
    first, known = 0, store.has_sources
    for number, shard in enumerate(store.manifest.shards if known else ()):
        sources = store.shard_sources(number)
        assert sources is not None
        index = (sources >> np.uint64(_FILE_INDEX_BITS)).astype(np.int64)
        lengths = store.read_lengths(first, first + shard.documents)
        documents += np.bincount(index, minlength=len(files))
        np.add.at(tokens, index, lengths.astype(np.int64))
        first += shard.documents
    for i, file in enumerate(files):
        yield file, int(documents[i]) if known else None, int(tokens[i]) if known else None


def find_source_files(wanted: Sequence[SourceFile], folders: Sequence[Path]) -> dict[str, Path]:
    """Return the files on this machine that are the wanted ones, by SHA-256.

    They are looked for at their own paths and, by size and then by hash, anywhere in the folders.
    """
    found: dict[str, Path] = {}
    sizes = {file.bytes for file in wanted}
    hashes = {file.sha256 for file in wanted}
    for file in wanted:
        path = Path(to_local_name(file.path))
        is_candidate = "://" not in file.path and file.sha256 not in found and path.is_file()
        if is_candidate and path.stat().st_size == file.bytes and hash_file(path) == file.sha256:
            found[file.sha256] = path
    for folder in folders:
        for parent, subfolders, names in os.walk(folder):
            subfolders.sort()
            for path in (Path(parent, name) for name in sorted(names)):
                if path.is_file() and path.stat().st_size in sizes and hashes - found.keys():
                    digest = hash_file(path)
                    if digest in hashes:
                        found.setdefault(digest, path)
    return found


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, as hexadecimal text."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_store(
    name: str,
    field: str,
    store: TokenStore,
    data: DataOptions,
    licenses: LicenseFile,
    text_filter: TextFilter,
    source_folders: Sequence[Path],
) -> ReleasedStore:
    """Return what of a store is to be released; hashes the source files that may be redistributed."""
    sources = list(iter_sources(store))
    allowed = [file for file, _, _ in sources if licenses.source(file.path).redistribute]
    paths = find_source_files(allowed, source_folders)
    entries = []
    for file, documents, tokens in sources:
        given = licenses.source(file.path)
        left_out = ""
        if not given.redistribute:
            left_out = "its redistribution was not allowed" if given.license else "nothing says that it may be"
        elif file.sha256 not in paths:
            left_out = "no file with its hash was found where the release was made"
        entries.append(
            SourceEntry(
                store=name,
                path=readable_path(text_filter.apply(file.path)),
                bytes=file.bytes,
                sha256=file.sha256,
                documents=documents,
                tokens=tokens,
                license=given.license,
                redistribute=given.redistribute,
                name=given.name,
                url=given.url,
                file="" if left_out else f"sources/{file.sha256[:16]}/{name_in_bundle(file.path)}",
                left_out=left_out,
            )
        )
    min_seq_len = data.min_seq_len if data.packing == "buckets" else None
    pack = open_pack(store, seq_len=data.seq_len, mode=data.packing, min_seq_len=min_seq_len)
    return ReleasedStore(name=name, field=field, store=store, pack=pack, entries=tuple(entries), source_paths=paths)


def readable_path(path: str) -> str:
    r"""Return a path as `SourceEntry` has it: bytes that are no UTF-8 are the text `\udcff`."""
    return path.encode("utf-8", "backslashreplace").decode()


def name_in_bundle(path: str) -> str:
    """Return the file name of a source in the bundle: its own, with `_` for unusual characters."""
    name = re.sub(r"[^A-Za-z0-9_.-]|^-", "_", path.rpartition("/")[2])[-MAX_NAME:]
    return name if is_valid_name(name) else f"_{name}"


def release_store(released: ReleasedStore, bundle: Path, text_filter: TextFilter) -> None:
    """Write a store into the bundle: manifest, tokenizer and pack; tokens and sources as far as allowed."""
    folder, store = bundle / "data" / released.name, released.store
    manifest = filter_manifest(store, text_filter)
    (folder / TOKENIZER_FOLDER).mkdir(parents=True)
    (folder / MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    if manifest.sources.list_sha256:
        (folder / SOURCES_FILE).write_bytes(encode_source_files(_filtered_files(store, text_filter)))
    for name in manifest.tokenizer.files:
        shutil.copyfile(store.tokenizer_folder / name, folder / TOKENIZER_FOLDER / name)
    pack_folder = released.pack.folder
    assert pack_folder is not None
    out = folder / PACK_FOLDER / pack_folder.name
    out.mkdir(parents=True)
    for path in sorted(pack_folder.iterdir()):
        if path.name == PACK_FILE or (released.has_tokens and path.suffix == ".npy"):
            shutil.copyfile(path, out / path.name)
    if released.has_tokens:
        (folder / SHARD_FOLDER).mkdir()
        for number, shard in enumerate(store.manifest.shards):
            for file in shard.hashes:
                shutil.copyfile(store.shard_path(number, file.rpartition(".")[2]), folder / SHARD_FOLDER / file)
    for entry in released.entries:
        target = bundle / entry.file
        if entry.file and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(released.source_paths[entry.sha256], target)


def filter_manifest(store: TokenStore, text_filter: TextFilter) -> StoreManifest:
    """Return the manifest with filtered names of sources and tokenizer; its fingerprint is the same."""
    manifest = store.manifest
    sources = manifest.sources
    if store.source_files:
        sources = summarize_sources(_filtered_files(store, text_filter), skipped_links=sources.skipped_links)
    tokenizer = dataclasses.replace(manifest.tokenizer, name=text_filter.apply(manifest.tokenizer.name))
    shards = tuple(manifest.shards)
    filtered = dataclasses.replace(manifest, sources=sources, tokenizer=tokenizer, shards=shards)
    assert filtered.fingerprint == manifest.fingerprint
    return filtered


def _filtered_files(store: TokenStore, text_filter: TextFilter) -> list[SourceFile]:
    return [dataclasses.replace(file, path=text_filter.apply(file.path)) for file in store.source_files]


def write_source_list(bundle: Path, stores: Sequence[ReleasedStore]) -> None:
    """Write `data/sources.jsonl`."""
    lines = [json.dumps(dataclasses.asdict(entry)) for released in stores for entry in released.entries]
    (bundle / "data").mkdir(exist_ok=True)
    (bundle / SOURCE_LIST).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_source_list(bundle: Path) -> list[SourceEntry]:
    """Read `data/sources.jsonl`.

    Raises:
        ValueError: A line has other fields, values of other types, or a path out of the release.
    """
    entries = []
    for number, line in enumerate(read_text(bundle / SOURCE_LIST).split("\n")[:-1], start=1):
        entry = from_json(SourceEntry, parse_json(line), f"{SOURCE_LIST}:{number}")
        if entry.file and not is_inside(entry.file):
            raise ValueError(f"{SOURCE_LIST}:{number}: file = {entry.file!r} is not a path in the release")
        entries.append(entry)
    return entries
