"""Token store: the ids of every document in memory-mapped shards.

    manifest.json            totals, settings, hashes, and the parts (lt_data.store.manifest)
    tokenizer/               the tokenizer's files
    shards/00000.bin         ids as little-endian uint16 or uint32, no header
    shards/00000.idx         a Megatron index: the pair is an IndexedDataset (lt_data.store.megatron)
    shards/00000.src         source file and record of each document (lt_data.store.document_sources)
    shards/00000.arrow       kept columns (lt_data.store.document_columns)
    keep/00000.keep          the documents of a shard that the store has, if not all (lt_data.store.masks)
    packs/<name>/            indexes over the store (lt_data.packing.packs)

The shards of a store of several units or stores lie in their folders. A document is never split across shards.
Documents and tokens are numbered through all shards, without those that are left out. Opening compares the sizes of the
shards with the manifest and reads nothing. Tokens and offsets of single documents are read through maps
(lt_data.store.mapped_files), so a store of any size and any number of shards needs no memory and no file descriptors;
`lengths` and `offsets`, which packing needs, hold all documents (4 and 8 bytes each). `verify` reads everything.

Cost: a microsecond or two for the size of a file, 15 to map one.
"""

import hashlib
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lt_data.errors import DataError
from lt_data.progress import Progress, no_progress
from lt_data.storage import read_file, translate_os_errors
from lt_data.store.document_sources import DocumentSource, shift_files
from lt_data.store.manifest import MAX_TOKENIZER_BYTES, PACK_FOLDER, StoreManifest, manifest_file, read_manifest
from lt_data.store.mapped_files import map_file
from lt_data.store.masks import KeptDocuments
from lt_data.store.megatron import index_size, split_index
from lt_data.store.shard_metadata import ShardMetadata
from lt_data.store.source_files import SourceFile
from lt_data.tokenizing.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lt_data.remote.shards import RemoteShards

_MAX_MAPS = 16_384  # a quarter of the maps that Linux allows a process by default (vm.max_map_count)
_READ_IDS = 2**22
_REMEDY = "copy it again or prepare it again"


class TokenStore:
    """Token store that is open for reading; a map-style dataset of its documents.

        >>> store = TokenStore("store")
        >>> len(store), store[0][:1].tolist(), tokenizer.bos_id  # documents, and the ids of the first one
        (59, [0], 0)

    Args:
        path: its folder, the manifest of one of its generations (`store/manifest-00000.json`), or `s3://bucket/folder`,
            where it is read (lt_data.remote.shards).
        packs: folder for the packs of this and other stores, such as one that cannot be written.
        cache: cache folder of a store in S3; `lt-data` in the user's cache folder if not given.
        cache_bytes: limit of the cached blocks; 20 GiB if not given.

    Attributes:
        path: its folder, or the manifest that was given.
        folder: its folder.
        manifest: its manifest.
        packs: folder for the packs of several stores, if it was given.
        shard_reader: reader of the shards of a store in S3.
        document_boundaries: first document of each shard, and the end of the last (int64 [shards + 1]).
        shard_offsets: global offset of the first token of each shard, and the end of the last (int64 [shards + 1]).

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
            self._set_up(shards.folder, shards.manifest, shards, packs)
            return
        if (cache, cache_bytes) != (None, None):
            raise DataError(f"{path}: cache and cache_bytes are for stores at s3:// addresses")
        path = Path(path)
        manifest = read_manifest(path)
        self._set_up(path, manifest, None, packs)
        for number, shard in enumerate(manifest.shards):
            for name, size in shard.sizes(manifest.dtype).items():
                _check_size(self.shard_path(number, name.rpartition(".")[2]), size)

    @classmethod
    def of_manifest(
        cls, path: Path, manifest: StoreManifest, shard_reader: "RemoteShards | None" = None, packs: Path | None = None
    ) -> "TokenStore":
        """Return the store of a manifest that need not be in its folder."""
        store = object.__new__(cls)
        store._set_up(path, manifest, shard_reader, packs)
        return store

    def _set_up(
        self, path: Path, manifest: StoreManifest, shard_reader: "RemoteShards | None", packs: Path | None
    ) -> None:
        self.path = path
        self.folder = manifest_file(path).parent
        self.manifest = manifest
        self.shard_reader = shard_reader
        self.packs = packs
        self.document_boundaries = np.cumsum([0, *(shard.kept_documents for shard in manifest.shards)])
        self.shard_offsets = np.cumsum([0, *(shard.kept_tokens for shard in manifest.shards)])
        self._is_masked = np.array([shard.mask is not None for shard in manifest.shards], bool)
        self._maps: dict[tuple[int, str], np.ndarray] = {}
        self._kept: dict[int, KeptDocuments] = {}
        self._metadata = ShardMetadata(manifest, self._local_path)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens the files itself: pickling a map would copy it.
        return (TokenStore.of_manifest, (self.path, self.manifest, self.shard_reader, self.packs))

    def __len__(self) -> int:
        return self.n_documents

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the ids of one document (a view of the mapped file).

        Raises:
            IndexError: there is no such document.
        """
        return self.tokens(*self.document_span(index))

    @property
    def n_documents(self) -> int:
        """Documents in the store."""
        return int(self.document_boundaries[-1])

    @property
    def n_tokens(self) -> int:
        """Ids in the store."""
        return int(self.shard_offsets[-1])

    @property
    def vocab_size(self) -> int:
        """1 + the highest id of the tokenizer."""
        return self.manifest.tokenizer.vocab_size

    @property
    def dtype(self) -> np.dtype:
        """Data type of the ids on disk."""
        return np.dtype(self.manifest.dtype).newbyteorder("<")

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer from the files in the store.

        Raises:
            DataError: its files are not those of the manifest.
        """
        folder, files = self.folder / self.manifest.tokenizer_folder, dict[str, bytes]()
        for name in self.manifest.tokenizer.files:
            with translate_os_errors("read", folder / name):
                files[name] = read_file(folder / name, max_bytes=MAX_TOKENIZER_BYTES)
        tokenizer = Tokenizer.from_bytes(files, name=self.manifest.tokenizer.name)
        if tokenizer.sha256 != self.manifest.tokenizer.sha256:
            raise DataError(f"{folder}: not the tokenizer of this store; restore its files")
        return tokenizer

    def pack_folder(self, name: str = "") -> Path:
        """Return the folder of a pack, or of all packs of this store; those in S3 are downloaded."""
        if self.packs is not None:
            return self.packs / self.manifest.fingerprint[:16] / name
        generation = len(self.manifest.appended)
        folder = f"{PACK_FOLDER}-{generation:05d}" if generation else PACK_FOLDER
        self.download(f"{folder}/{name}".rstrip("/"))
        return self.folder / folder / name

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, in order (int32 [n_documents]), held after the first use."""
        return self.read_lengths(0, self.n_documents)

    @cached_property
    def offsets(self) -> np.ndarray:
        """Global token offset of each document, and the end of the last (int64 [n_documents + 1])."""
        return np.append(0, np.cumsum(self.lengths, dtype=np.int64))

    def read_lengths(self, first: int, last: int) -> np.ndarray:
        """Return the tokens of each document from `first` to before `last` (int32), read from their shards."""
        bounds, parts = self.document_boundaries, [np.zeros(0, np.int32)]
        for number in range(
            int(np.searchsorted(bounds, first, "right")) - 1, int(np.searchsorted(bounds, last, "left"))
        ):
            lengths = self.shard_lengths(number)
            kept = lengths if (keep := self.kept_documents(number)) is None else lengths[keep]
            parts.append(kept[max(first - int(bounds[number]), 0) : last - int(bounds[number])])
        return np.concatenate(parts)

    def shard_lengths(self, number: int) -> np.ndarray:
        """Return the tokens of each document in the files of a shard (int32), those left out included.

        Raises:
            DataError: the index cannot be read, or is not that of the shard.
        """
        lengths = self._read_index(number)[0]
        if int(lengths.sum(dtype=np.int64)) != self.manifest.shards[number].tokens:
            raise DataError(f"{self.shard_path(number, 'idx')}: not the lengths of its shard; {_REMEDY}")
        return lengths

    def document_span(self, index: int) -> tuple[int, int]:
        """Return global token offset and length of one document, from the mapped index.

        Raises:
            DataError: the index of the shard cannot be read or is broken.
            IndexError: there is no such document.
        """
        number, place = self._shard_of(index)
        if self._is_masked[number]:
            _, begin, length = self._kept_in(number).find_document(place)
        else:
            lengths, begins = self._read_index(number)
            begin, length = int(begins[place]) // self.dtype.itemsize, int(lengths[place])
        if not 0 <= begin < begin + length <= self.manifest.shards[number].kept_tokens:
            raise DataError(f"{self.shard_path(number, 'idx')}: broken index (document {place}); {_REMEDY}")
        return int(self.shard_offsets[number]) + begin, length

    def kept_documents(self, number: int) -> np.ndarray | None:
        """Return a mask of the documents of a shard that the store has (bool [n]); None: all of them."""
        return self._kept_in(number).keep if self._is_masked[number] else None

    @property
    def source_files(self) -> tuple[SourceFile, ...]:
        """Source files, in the order of their index; empty if the store does not list them.

        Raises:
            DataError: their list is missing or broken.
        """
        return self._metadata.files

    @property
    def has_sources(self) -> bool:
        """True if the source of each document is known."""
        return all(shard.src_sha256 for shard in self.manifest.shards)

    def document_source(self, index: int) -> DocumentSource | None:
        """Return source file and record of one document; None if the store does not have them.

        Raises:
            DataError: they cannot be read.
        """
        return self._metadata.source(*self._file_place(index))

    def shard_sources(self, number: int) -> np.ndarray | None:
        """Return the source of each document of a shard (u64), if known; their bits: lt_data.store.document_sources.

        Raises:
            DataError: they cannot be read.
        """
        sources, keep = self._metadata.sources(number), self.kept_documents(number)
        if sources is None:
            return None
        sources = shift_files(sources, self._metadata.first_file(number))
        return sources if keep is None else sources[keep]

    def document_columns(self, index: int) -> dict[str, Any]:
        """Return the kept columns of one document by name; empty if the store has none.

        Raises:
            DataError: they cannot be read, or pyarrow is missing.
        """
        number, place = self._file_place(index)
        columns = self._metadata.columns(number)
        return {} if columns is None else columns.slice(place, 1).to_pylist()[0]

    def shard_columns(self, number: int) -> Any:
        """Return the kept columns of the documents of a shard (pyarrow.RecordBatch); None if it has none.

        Raises:
            DataError: they cannot be read, or pyarrow is missing.
        """
        columns, keep = self._metadata.columns(number), self.kept_documents(number)
        return columns if columns is None or keep is None else columns.take(np.flatnonzero(keep))

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Return the ids [start, start + length) of the store: a view, or a copy if they are in several places."""
        if not (0 <= start <= start + length <= self.n_tokens):
            raise IndexError(f"tokens {start} to {start + length} of {self.n_tokens}")
        if not length:
            return np.zeros(0, self.dtype)
        _, *places = self.split_runs(np.array([start]), np.array([length]))
        parts = [self.read(*place) for place in zip(*(values.tolist() for values in places), strict=True)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def split_runs(
        self, start: np.ndarray, length: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the places in the shards of runs of tokens, in order.

        Args:
            start: global offset of each run (int64 [n]).
            length: its tokens, at least 1; all are in the store.

        Returns:
            Of each piece the index of its run, its shard, its begin and its end in the shard (int64 [pieces]).
        """
        first = np.searchsorted(self.shard_offsets, start, "right") - 1
        n_shards = np.searchsorted(self.shard_offsets, start + length, "left") - first
        run = np.repeat(np.arange(start.size), n_shards)
        shard = first[run] + np.arange(run.size) - np.repeat(np.cumsum(n_shards) - n_shards, n_shards)
        offset = self.shard_offsets[shard]
        begin = np.maximum(start[run], offset) - offset
        end = np.minimum(start[run] + length[run], self.shard_offsets[shard + 1]) - offset
        if not self._is_masked[shard].any():
            return run, shard, begin, end
        pieces = [
            self._kept_in(number).find_tokens(low, high)
            if self._is_masked[number]
            else (np.array([low]), np.array([high]))
            for number, low, high in zip(shard.tolist(), begin.tolist(), end.tolist(), strict=True)
        ]
        n_pieces = [begins.size for begins, _ in pieces]
        begin, end = (np.concatenate(values) for values in zip(*pieces, strict=True))
        return np.repeat(run, n_pieces), np.repeat(shard, n_pieces), begin, end

    def read(self, shard: int, begin: int, end: int) -> np.ndarray:
        """Return the ids [begin, end) of the file of one shard; a view of the mapped file if the store is local."""
        if self.shard_reader is not None:
            return self.shard_reader.read(shard, begin, end)
        return self._map(shard, "bin", self.manifest.shards[shard].tokens * self.dtype.itemsize, self.dtype)[begin:end]

    def read_shard(self, number: int) -> np.ndarray:
        """Return all ids in the file of one shard; a view of the mapped file if the store is local."""
        return self.read(number, 0, self.manifest.shards[number].tokens)

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
        item, done = self.dtype.itemsize, 0
        total = sum(shard.tokens for shard in self.manifest.shards) * item
        shards = {self.manifest.shard_file(number, "bin"): number for number in range(len(self.manifest.shards))}
        for name, sha256 in self.manifest.file_hashes().items():
            digest = hashlib.sha256()
            if (number := shards.get(name)) is not None:
                tokens = self.manifest.shards[number].tokens
                for begin in range(0, tokens, _READ_IDS):
                    ids = self.read(number, begin, min(begin + _READ_IDS, tokens))
                    digest.update(np.ascontiguousarray(ids).data)
                done += tokens * item
                progress(done, total, "bytes")
            else:
                path = self._local_path(name)
                with translate_os_errors("read", path), path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256")
            if digest.hexdigest() != sha256:
                raise DataError(f"{self.folder / name}: SHA-256 differs from the manifest; {_REMEDY}")
        self.tokenizer()

    def shard_path(self, number: int, kind: str) -> Path:
        """Return the path of a file of a shard by its suffix; those in S3 are downloaded, except `bin`."""
        name = self.manifest.shard_file(number, kind)
        return self.folder / name if kind == "bin" else self._local_path(name)

    def _local_path(self, name: str) -> Path:
        self.download(name)
        return self.folder / name

    def _shard_of(self, index: int) -> tuple[int, int]:
        """Return the shard of a document and its number among those that the store has of it."""
        if not 0 <= index < self.n_documents:
            raise IndexError(f"document {index} of {self.n_documents}")
        number = int(np.searchsorted(self.document_boundaries, index, "right")) - 1
        return number, index - int(self.document_boundaries[number])

    def _file_place(self, index: int) -> tuple[int, int]:
        """Return the shard of a document and its number in the files there."""
        number, place = self._shard_of(index)
        return number, self._kept_in(number).find_document(place)[0] if self._is_masked[number] else place

    def _read_index(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return lengths (tokens, int32) and offsets (bytes, int64) of the documents in a shard, mapped."""
        documents = self.manifest.shards[number].documents
        content = self._map(number, "idx", index_size(documents), np.dtype(np.uint8))
        try:
            return split_index(content, documents, self.manifest.dtype)
        except ValueError as exc:
            raise DataError(f"{self.shard_path(number, 'idx')}: {exc}; {_REMEDY}") from exc

    def _kept_in(self, number: int) -> KeptDocuments:
        if (kept := self._kept.get(number)) is None:
            shard = self.manifest.shards[number]
            assert shard.mask is not None
            path = self._local_path(shard.mask.file)
            with translate_os_errors("read", path), path.open("rb") as file:
                size = file.seek(0, 2)
                content = map_file(file.fileno(), size, np.dtype(np.uint8))
            keep = content[max(0, size - shard.documents) :].view(bool)  # after the header of the npy file
            if keep.size != shard.documents or np.count_nonzero(keep) != shard.mask.documents:
                raise DataError(f"{path}: not the mask of its shard; {_REMEDY}")
            kept = self._kept[number] = KeptDocuments(keep, self._read_index(number)[0])
        return kept

    def _map(self, number: int, kind: str, n_bytes: int, dtype: np.dtype) -> np.ndarray:
        if (mapped := self._maps.get((number, kind))) is None:
            path = self.shard_path(number, kind)
            _check_size(path, n_bytes)
            with translate_os_errors("open the shard", path), path.open("rb") as file:
                mapped = map_file(file.fileno(), n_bytes, dtype)
            if len(self._maps) >= _MAX_MAPS:
                self._maps = {}
            self._maps[number, kind] = mapped
        return mapped


def _check_size(path: Path, n_bytes: int) -> None:
    """Raise DataError if a file is missing or not of this size: reading a map beyond its end ends the process."""
    with translate_os_errors("open the shard", path):
        size = os.stat(path).st_size
    if size != n_bytes:
        raise DataError(f"{path}: {size} bytes, the manifest says {n_bytes}: {_REMEDY}")
