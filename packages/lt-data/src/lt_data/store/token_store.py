"""Token store: the ids of every document in memory-mapped shards.

    manifest.json            totals, settings and hashes (lt_data.store.manifest)
    tokenizer/               the tokenizer's files
    shards/00000.bin         ids as little-endian uint16 or uint32, no header
    shards/00000.idx         a Megatron index: the pair is an IndexedDataset (lt_data.store.megatron)
    shards/00000.src         source file and record of each document (lt_data.store.document_sources)
    packs/<name>/            indexes over the store (lt_data.packing.packs)

A joined store has a `manifest.json` that names other stores, and is read like one flat store (lt_data.store.joined).
A document is never split across shards. Opening compares sizes with the manifest, about 3 microseconds a file, and
reads nothing; of a joined store with an index they are compared at the first use of a shard. Tokens and offsets of
single documents are read through maps (lt_data.store.mapped_files), so a store of any size and any number of shards
needs no memory and no file descriptors; `lengths` and `offsets`, which packing needs, hold all documents (4 and 8 bytes
each). `verify` reads everything.
"""

import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lt_data.errors import DataError
from lt_data.progress import Progress, no_progress
from lt_data.storage import check_inside
from lt_data.store.document_index import DocumentIndex
from lt_data.store.document_sources import DocumentSource
from lt_data.store.joined import LoadedStore, flat_store, load_store
from lt_data.store.joined_index import ShardLocation
from lt_data.store.manifest import MANIFEST_FILE, MAX_TOKENIZER_BYTES, PACK_FOLDER, SHARD_FOLDER, TOKENIZER_FOLDER
from lt_data.store.shard_files import check_hash, check_sizes, map_ids, read_checked
from lt_data.store.shard_metadata import ShardMetadata
from lt_data.store.shard_reader import ShardReader, check_shard
from lt_data.store.source_files import SourceFile
from lt_data.tokenizing.tokenizer import Tokenizer

_MAX_MAPS = 16_384  # a quarter of the maps that Linux allows a process by default (vm.max_map_count)


class TokenStore:
    """Token store that is open for reading; a map-style dataset of its documents.

        store = TokenStore("store")
        ids = store[0]  # of the first of len(store) documents

    Args:
        path: its folder, or `s3://bucket/folder`, where it is read block by block (lt_data.remote.reading).
        packs: folder for the packs of this and other stores, such as one that cannot be written.
        cache: cache folder of a store in S3; `lt-data` in the user's cache folder if not given.
        cache_bytes: limit of the cached blocks; 20 GiB if not given.

    Raises:
        DataError: no store, another version, or a shard that is missing or not of the manifest's size.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        packs: str | Path | None = None,
        cache: str | Path | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        packs = None if not packs else Path(packs)
        if packs is not None and os.path.lexists(packs) and not packs.is_dir():
            raise DataError(f"packs = {packs}: no folder; give the folder for the packs of several stores")
        if isinstance(path, str) and path.startswith("s3://"):
            from lt_data.remote.shards import RemoteShards

            shards = RemoteShards(path, cache=cache, cache_bytes=cache_bytes)
            self._set_up(shards.folder, flat_store(shards.folder, shards.manifest), shards, packs)
            return
        if (cache, cache_bytes) != (None, None):
            raise DataError(f"{path}: cache and cache_bytes are for stores at s3:// addresses")
        loaded = load_store(Path(path))
        self._set_up(Path(path), loaded, None, packs)
        if loaded.indexed:  # sizes are compared when a shard is first used
            return
        sizes: dict[Path, dict[str, int]] = {part: {} for part in self.part_folders}
        for location in self._locations:
            sizes[location.folder] |= location.shard.sizes(self.manifest.dtype)
        for part, names in sizes.items():
            check_sizes(part / SHARD_FOLDER, names, inside=part)

    def _set_up(self, path: Path, loaded: LoadedStore, shard_reader: ShardReader | None, packs: Path | None) -> None:
        self.path = path
        self.manifest = manifest = loaded.manifest
        self.shard_reader = shard_reader
        self._packs = packs
        self._loaded = loaded
        self._locations = self._loaded.locations
        self.extents = self._loaded.map_extents()
        self._checked_folders: set[Path] = set()
        self._mapped: dict[int, np.ndarray] = {}
        self._documents = DocumentIndex(
            manifest, self.extents, self._checked_location, self.shard_path, is_local=shard_reader is None
        )
        self._metadata = ShardMetadata(self._locations, self.shard_path, self.download)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens the files itself: pickling a map would copy it.
        return (_reopen, (type(self), self.path, self._loaded, self.shard_reader, self._packs))

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the ids of one document (a view of the mapped file).

        Raises:
            IndexError: there is no such document.
        """
        return self.tokens(*self.document_span(index))

    @property
    def n_documents(self) -> int:
        """Documents in the store."""
        return len(self._documents)

    @property
    def n_tokens(self) -> int:
        """Ids in the store."""
        return self.extents.n_tokens

    @property
    def vocab_size(self) -> int:
        """1 + the highest id of the tokenizer."""
        return self.manifest.tokenizer.vocab_size

    @property
    def dtype(self) -> np.dtype:
        """Data type of the ids on disk."""
        return np.dtype(self.manifest.dtype).newbyteorder("<")

    @property
    def packs(self) -> Path | None:
        """Folder for the packs of several stores, if it was given."""
        return self._packs

    @property
    def part_folders(self) -> list[Path]:
        """Folders of the stores that a joined store consists of; of another store its own."""
        return [*self._loaded.folders]

    @property
    def manifest_files(self) -> list[Path]:
        """Manifests of the store and of its parts."""
        files = [folder / MANIFEST_FILE for folder in self._loaded.folders]
        return files if self._loaded.joined is None else [self._loaded.joined, *files]

    @property
    def is_joined(self) -> bool:
        """True if the shards are files of other stores, or have other names there."""
        return self._loaded.joined is not None

    @property
    def tokenizer_folder(self) -> Path:
        """Folder of the tokenizer's files."""
        return self.part_folders[0] / TOKENIZER_FOLDER

    @property
    def document_boundaries(self) -> np.ndarray:
        """Index of the first document of each shard, and the end of the last (int64 [shards + 1])."""
        return self._documents.boundaries

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, in order (int32 [n_documents]), held after the first use."""
        return self._documents.lengths

    def read_lengths(self, first: int, last: int) -> np.ndarray:
        """Return the tokens of each document from `first` to before `last` (int32), read from their shards."""
        return self._documents.read_lengths(first, last)

    @property
    def offsets(self) -> np.ndarray:
        """Global token offset of each document, and the end of the last (int64 [n_documents + 1])."""
        return self._documents.offsets

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer from the files in the store.

        Raises:
            DataError: its files are not those of the manifest.
        """
        files = {
            name: read_checked(self.tokenizer_folder / name, MAX_TOKENIZER_BYTES, self.tokenizer_folder.parent)
            for name in self.manifest.tokenizer.files
        }
        tokenizer = Tokenizer.from_bytes(files, name=self.manifest.tokenizer.name)
        if tokenizer.sha256 != self.manifest.tokenizer.sha256:
            raise DataError(f"{self.tokenizer_folder}: not the tokenizer of this store; restore its files")
        return tokenizer

    def pack_folder(self, name: str = "") -> Path:
        """Return the folder of a pack, or of all packs of this store; those in S3 are downloaded."""
        if self._packs is not None:
            return self._packs / self.manifest.fingerprint[:16] / name
        self.download(f"{PACK_FOLDER}/{name}".rstrip("/"))
        return self._loaded.packs / name

    def document_span(self, index: int) -> tuple[int, int]:
        """Return global token offset and length of one document, from the mapped index."""
        return self._documents.span(index)

    @cached_property
    def source_files(self) -> tuple[SourceFile, ...]:
        """Source files, in the order of their index; empty if the store does not list them.

        Raises:
            DataError: their list is missing or broken.
        """
        return self._metadata.files

    @property
    def has_sources(self) -> bool:
        """True if the source of each document is known."""
        return all(location.shard.src_sha256 for location in self._locations)

    def document_source(self, index: int) -> DocumentSource | None:
        """Return source file and record of one document; None if the store does not have them.

        Raises:
            DataError: they cannot be read.
        """
        return self._metadata.source(*self._documents.find(index))

    def shard_sources(self, number: int) -> np.ndarray | None:
        """Return the source of each document of a shard (u64), without those that are left out, if known.

        Their bits: lt_data.store.document_sources.

        Raises:
            DataError: they cannot be read.
        """
        sources, kept = self._metadata.sources(number), self.kept_documents(number)
        return sources if sources is None or kept is None else sources[kept]

    def document_columns(self, index: int) -> dict[str, Any]:
        """Return the kept columns of one document by name; empty if the store has none.

        Raises:
            DataError: they cannot be read, or pyarrow is missing.
        """
        number, place = self._documents.find(index)
        columns = self._metadata.columns(number)
        return {} if columns is None else columns.slice(place, 1).to_pylist()[0]

    def shard_columns(self, number: int) -> Any:
        """Return the kept columns of the documents of a shard (pyarrow.RecordBatch); None if it has none.

        Raises:
            DataError: they cannot be read, or pyarrow is missing.
        """
        columns, kept = self._metadata.columns(number), self.kept_documents(number)
        return columns if columns is None or kept is None else columns.take(np.flatnonzero(kept))

    def kept_documents(self, number: int) -> np.ndarray | None:
        """Return a mask of the documents of a shard that the store has (bool [n]); None: all of them."""
        return self.extents.kept_documents(number, self.manifest.shards[number].documents)

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Return the ids [start, start + length) of the store: a view, or a copy if they span shards."""
        if not (0 <= start <= start + length <= self.n_tokens):
            raise IndexError(f"tokens {start} to {start + length} of {self.n_tokens}")
        parts = [self.read(*piece) for piece in self.extents.split(start, length)]
        if not parts:
            return np.zeros(0, self.dtype)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def read(self, shard: int, begin: int, end: int) -> np.ndarray:
        """Return the ids [begin, end) of one shard; a view of the mapped file if the store is local."""
        if self.shard_reader is not None:
            return self.shard_reader.read(shard, begin, end)
        return self._map(shard)[begin:end]

    def read_shard(self, number: int) -> np.ndarray:
        """Return all ids of one shard; a view of the mapped file if the store is local."""
        return self.read(number, 0, self.manifest.shard_tokens_each[number])

    def mmap_shard(self, number: int) -> np.ndarray | None:
        """Return all ids of one shard as a view of the mapped file; None if the store is not local."""
        return None if self.shard_reader is not None else self._map(number)

    def prefetch(self, shard: np.ndarray, begin: np.ndarray, end: np.ndarray) -> None:
        """Fetch ids [begin, end) of shards (int64 [n] each) concurrently; no-op for a local store."""
        if self.shard_reader is not None:
            self.shard_reader.prefetch(zip(shard.tolist(), begin.tolist(), end.tolist(), strict=True))

    def download(self, name: str) -> None:
        """Download a file of the store, or all files of one of its folders; no-op for a local store."""
        if self.shard_reader is not None:
            self.shard_reader.bring(name)

    def verify(self, progress: Progress = no_progress) -> None:
        """Read every file and compare its hash with the manifest.

        Raises:
            DataError: a file differs; the message names it.
        """
        total = sum(self.manifest.shard_tokens_each) * self.dtype.itemsize
        done = 0
        tokenizer = self.manifest.tokenizer
        for name, sha256 in tokenizer.files.items():
            check_hash(self.tokenizer_folder / name, sha256, self.tokenizer_folder.parent)
        self.tokenizer()
        self.check_index()
        self.check_extents()
        _ = self.source_files  # compared with its hash
        for number, shard in enumerate(self.manifest.shards):
            index, location = self.shard_path(number, "idx"), self._locations[number]
            check_hash(index, shard.idx_sha256, location.folder)
            lengths = self._documents.shard_lengths(number)
            if int(lengths.sum(dtype=np.int64)) != shard.tokens:
                raise DataError(f"{index}: the lengths do not sum to {shard.tokens} tokens")
            if self.shard_sources(number) is not None:
                check_hash(self.shard_path(number, "src"), location.shard.src_sha256, location.folder)
            if self.shard_columns(number) is not None:
                check_hash(self.shard_path(number, "arrow"), location.shard.arrow_sha256, location.folder)
            if self.shard_reader is None:
                check_hash(self.shard_path(number, "bin"), shard.sha256, location.folder)
            else:
                check_shard(self.shard_reader, number, shard)
            done += shard.tokens * self.dtype.itemsize
            progress(done, total, "bytes")

    def check_index(self) -> None:
        """Compare the index of a joined store, if it has one, with the manifests of its parts.

        Raises:
            DataError: they differ.
        """
        self._loaded.check_index()

    def check_extents(self) -> None:
        """Compare the file of what a joined store has of its parts, if there is one, with its hash.

        Raises:
            DataError: it differs.
        """
        self._loaded.check_extents()

    def shard_location(self, number: int) -> ShardLocation:
        """Return where a shard is."""
        return self._locations[number]

    def shard_path(self, number: int, kind: str) -> Path:
        """Return the path of a file of a shard by its suffix; those in S3 are downloaded, except `bin`."""
        location = self._locations[number]
        name = f"{SHARD_FOLDER}/{location.shard.name}.{kind}"
        if kind != "bin":
            self.download(name)
        return location.folder / name

    def _checked_location(self, number: int) -> ShardLocation:
        """Return where a shard is; no link of the folder of its files leads out of the store."""
        location = self._locations[number]
        if location.folder not in self._checked_folders:
            check_inside(location.folder / SHARD_FOLDER, location.folder)
            self._checked_folders.add(location.folder)
        return location

    def _map(self, number: int) -> np.ndarray:
        if (ids := self._mapped.get(number)) is None:
            location = self._checked_location(number)
            path = self.shard_path(number, "bin")
            ids = map_ids(path, location.shard.tokens, self.dtype, inside=location.folder)
            if len(self._mapped) >= _MAX_MAPS:
                self._mapped = {}
            self._mapped[number] = ids
        return ids


def _reopen(
    kind: type[TokenStore], path: Path, loaded: LoadedStore, shard_reader: ShardReader | None, packs: Path | None
) -> TokenStore:  # for pickle
    store = object.__new__(kind)
    store._set_up(path, loaded, shard_reader, packs)
    return store
