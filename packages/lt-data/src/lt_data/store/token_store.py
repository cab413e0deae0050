"""The token store: every document's ids, one after the other, in memory-mapped shards.

    manifest.json            what is in it, with hashes (lt_data.store.manifest)
    tokenizer/               the files of the tokenizer that made the ids
    shards/00000.bin         ids as little-endian uint16 or uint32, no header
    shards/00000.idx         a Megatron index: the pair is an IndexedDataset (lt_data.store.megatron)
    packs/<name>/            indexes over the store (lt_data.packing.packs)

A document never crosses shards. Opening costs O(shards): sizes are compared with the manifest, nothing is read. Tokens
and the place of one document are read through the map, so a store of any size costs no memory; `lengths` and `offsets`,
which packing needs, are all documents at once (4 and 8 bytes each). `verify` reads everything.
"""

import hashlib
from collections.abc import Iterable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lt_data.errors import DataError
from lt_data.progress import Progress, silent
from lt_data.storage import os_errors
from lt_data.store.manifest import SHARD_FOLDER, TOKENIZER_FOLDER, Manifest, Shard, read_manifest
from lt_data.store.megatron import LENGTHS_AT, decode_index, index_size
from lt_data.store.together import together
from lt_data.tokenizing.tokenizer import Tokenizer

_READ_IDS = 2**22  # at a time, of a shard that is not a local file
_OPEN_SHARDS = 256  # each open map holds a file descriptor


class ShardBytes(Protocol):
    """Where a store comes from when it is not in a local folder, such as lt_data.remote.reading."""

    def read(self, shard: int, begin: int, end: int) -> np.ndarray:
        """The ids [begin, end) of a shard, in the dtype of the store."""
        ...

    def prefetch(self, spans: Iterable[tuple[int, int, int]]) -> None:
        """Have many spans (shard, begin, end) at hand, fetched side by side."""
        ...

    def bring(self, name: str) -> None:
        """Have a file of the store, or all files of a folder of it, in the local folder."""
        ...


class TokenStore:
    """A token store on disk, open for reading.

    Args:
        path: its folder.
        manifest: its description.
        contents: reads the ids where the shards are not files in the folder.
    """

    def __init__(self, path: Path, manifest: Manifest, *, contents: ShardBytes | None = None) -> None:
        self.path = path
        self.manifest = manifest
        self._contents = contents
        self._token_borders = np.cumsum([0, *(shard.tokens for shard in manifest.shards)], dtype=np.int64)
        self._document_borders = np.cumsum([0, *(shard.documents for shard in manifest.shards)], dtype=np.int64)
        self._shard = lru_cache(maxsize=_OPEN_SHARDS)(self._open_shard)
        self._places = lru_cache(maxsize=_OPEN_SHARDS)(self._open_places)
        self._joined = (np.zeros(0, self.dtype), np.full(len(manifest.shards), -1))

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens the files itself; a map would be copied.
        return (_reopened, (type(self), self.path, self.manifest, self._contents))

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        cache: str | Path | None = None,
        cache_bytes: int | None = None,
        endpoint_url: str | None = None,
    ) -> "TokenStore":
        """Open the store in a folder, or one that stays in S3 and is read block by block (lt_data.remote.reading).

        Args:
            path: the folder, or `s3://bucket/folder`.
            cache: of a store in S3: folder for what was fetched; `lt-data` in the user's cache folder if not given.
            cache_bytes: bytes that blocks may take there; 20 GiB if not given.
            endpoint_url: another store of objects than Amazon's.

        Raises:
            DataError: no store, another version, or a shard is missing or has another size than the manifest says.
        """
        if isinstance(path, str) and path.startswith("s3://"):
            from lt_data.remote.reading import DEFAULT_CACHE_BYTES, RemoteShards
            from lt_data.remote.s3 import S3Options

            shards = RemoteShards(
                path,
                cache=None if cache is None else Path(cache),
                cache_bytes=DEFAULT_CACHE_BYTES if cache_bytes is None else cache_bytes,
                options=S3Options(endpoint_url=endpoint_url),
            )
            return cls(shards.folder, shards.manifest, contents=shards)
        if (cache, cache_bytes, endpoint_url) != (None, None, None):
            raise DataError(f"{path}: cache, cache_bytes and endpoint_url are for stores at s3:// addresses")
        path = Path(path)
        store = cls(path, read_manifest(path))
        for shard in store.manifest.shards:
            store._check_size(store._bin(shard), shard.tokens * store.dtype.itemsize)
            store._check_size(store._idx(shard), index_size(shard.documents))
        return store

    @property
    def n_documents(self) -> int:
        """Documents in the store."""
        return int(self._document_borders[-1])

    @property
    def n_tokens(self) -> int:
        """Ids in the store."""
        return int(self._token_borders[-1])

    @property
    def vocab_size(self) -> int:
        """1 + the highest id of the tokenizer."""
        return self.manifest.tokenizer.vocab_size

    @property
    def dtype(self) -> np.dtype:
        """The type of the ids on disk."""
        return np.dtype(self.manifest.dtype).newbyteorder("<")

    @property
    def shard_borders(self) -> np.ndarray:
        """Global token offset at which each shard begins, and the end of the last (int64 [shards + 1])."""
        return self._token_borders

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, in order (int32 [n_documents])."""
        # A part of a job may have no shard at all.
        return np.concatenate([np.zeros(0, np.int32), *(self._shard_lengths(shard) for shard in self.manifest.shards)])

    @cached_property
    def offsets(self) -> np.ndarray:
        """Global token offset of each document, and the end of the last (int64 [n_documents + 1])."""
        offsets = np.zeros(self.n_documents + 1, np.int64)
        np.cumsum(self.lengths, out=offsets[1:])
        return offsets

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids, from the files in the store.

        Raises:
            DataError: its files are not those that the manifest names.
        """
        files = {name: self._read(self.path / TOKENIZER_FOLDER / name) for name in self.manifest.tokenizer.files}
        tokenizer = Tokenizer.from_bytes(files, name=self.manifest.tokenizer.name)
        if tokenizer.sha256 != self.manifest.tokenizer.sha256:
            raise DataError(
                f"{self.path / TOKENIZER_FOLDER}: not the tokenizer that made this store; restore its files"
            )
        return tokenizer

    def document(self, index: int) -> np.ndarray:
        """The ids of one document (a view of the mapped file)."""
        if not 0 <= index < self.n_documents:
            raise IndexError(f"document {index} of {self.n_documents}")
        return self.tokens(*self.document_span(index))

    def document_span(self, index: int) -> tuple[int, int]:
        """Global token offset and length of one document; one look into the mapped index."""
        if not 0 <= index < self.n_documents:
            raise IndexError(f"document {index} of {self.n_documents}")
        if "offsets" in self.__dict__ or self._contents is not None:
            return int(self.offsets[index]), int(self.lengths[index])
        number = int(np.searchsorted(self._document_borders, index, side="right")) - 1
        lengths, begins = self._places(number)
        place = index - int(self._document_borders[number])
        begin, length = int(begins[place]) // self.dtype.itemsize, int(lengths[place])
        shard = self.manifest.shards[number]
        if not 0 <= begin < begin + length <= shard.tokens:
            raise DataError(f"{self._idx(shard)}: broken index (document {place}); copy it again or prepare again")
        return int(self._token_borders[number]) + begin, length

    def tokens(self, start: int, length: int) -> np.ndarray:
        """The ids [start, start + length) of the whole store: a view, or a copy where they lie in several shards."""
        if not (0 <= start <= start + length <= self.n_tokens):
            raise IndexError(f"tokens {start} to {start + length} of {self.n_tokens}")
        parts: list[np.ndarray] = []
        number = int(np.searchsorted(self._token_borders, start, side="right")) - 1
        while length > 0:
            begin = start - int(self._token_borders[number])
            end = min(begin + length, self.manifest.shards[number].tokens)
            parts.append(self.read(number, begin, end))
            start, length, number = start + parts[-1].size, length - parts[-1].size, number + 1
        if not parts:
            return np.zeros(0, self.dtype)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def read(self, shard: int, begin: int, end: int) -> np.ndarray:
        """The ids [begin, end) of one shard; of a local store a view of the mapped file."""
        if self._contents is not None:
            return self._contents.read(shard, begin, end)
        return self._shard(shard)[begin:end]

    def shard(self, number: int) -> np.ndarray:
        """All ids of one shard (of a local store a view of the mapped file)."""
        return self.read(number, 0, self.manifest.shards[number].tokens)

    def mapped(self, number: int) -> np.ndarray | None:
        """All ids of one shard as a view of the mapped file; None where the store is not local."""
        return None if self._contents is not None else self._shard(number)

    def mapped_together(self, shards: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Some shards of a local store as parts of one array (lt_data.store.together).

        Args:
            shards: their numbers, in any order and number (int64 [n]).

        Returns:
            The array, and where in it each of these begins (int64 [n]); None where the store is not local, or they are
            more than can be open at a time.
        """
        if self._contents is not None:
            return None
        ids, begin = self._joined
        begins = begin[shards]
        if begins.size and begins.min() < 0:
            wanted = set(shards.tolist())
            together_with = wanted | set(np.flatnonzero(begin >= 0).tolist())
            numbers = sorted(together_with if len(together_with) <= _OPEN_SHARDS else wanted)
            if len(numbers) > _OPEN_SHARDS:
                return None
            ids, places = together([self._shard(number) for number in numbers])
            begin = np.full(begin.size, -1)
            begin[numbers] = places
            self._joined = (ids, begin)  # one assignment: other threads see the old pair or the new one
            begins = begin[shards]
        return ids, begins

    def prefetch(self, start: np.ndarray, length: np.ndarray) -> None:
        """Have runs of the store (global offsets and lengths, int64 [n]) at hand; a local store does nothing."""
        if self._contents is None:
            return
        borders = self._token_borders
        spans: list[tuple[int, int, int]] = []
        for begin, n in zip(start.tolist(), length.tolist(), strict=True):
            number = int(np.searchsorted(borders, begin, side="right")) - 1
            while n > 0:
                first = begin - int(borders[number])
                last = min(first + n, int(borders[number + 1] - borders[number]))
                spans.append((number, first, last))
                begin, n, number = begin + last - first, n - (last - first), number + 1
        self._contents.prefetch(spans)

    def bring(self, name: str) -> None:
        """Have a file of the store, or all files of a folder of it, in its local folder; a local store has them."""
        if self._contents is not None:
            self._contents.bring(name)

    def verify(self, progress: Progress = silent) -> None:
        """Read every file and compare its hash with the manifest.

        Raises:
            DataError: a file differs; it is named.
        """
        total = self.n_tokens * self.dtype.itemsize
        done = 0
        tokenizer = self.manifest.tokenizer
        for name, sha256 in tokenizer.files.items():
            self._check_hash(self.path / TOKENIZER_FOLDER / name, sha256)
        self.tokenizer()
        for number, shard in enumerate(self.manifest.shards):
            self._check_hash(self._idx(shard), shard.idx_sha256)
            lengths = self._shard_lengths(shard)
            if int(lengths.sum(dtype=np.int64)) != shard.tokens:
                raise DataError(f"{self._idx(shard)}: its lengths do not add up to {shard.tokens} tokens")
            if self._contents is None:
                self._check_hash(self._bin(shard), shard.sha256)
            else:
                self._check_ids(number)
            done += shard.tokens * self.dtype.itemsize
            progress(done, total, "bytes")

    def _bin(self, shard: Shard) -> Path:
        return self.path / SHARD_FOLDER / f"{shard.name}.bin"

    def _idx(self, shard: Shard) -> Path:
        self.bring(f"{SHARD_FOLDER}/{shard.name}.idx")
        return self.path / SHARD_FOLDER / f"{shard.name}.idx"

    def _open_shard(self, number: int) -> np.ndarray:
        path = self._bin(self.manifest.shards[number])
        with os_errors("open", path):
            # A plain array over the map: slicing np.memmap itself is several times slower.
            ids = np.asarray(np.memmap(path, dtype=self.dtype, mode="r"))
        if ids.size != self.manifest.shards[number].tokens:
            self._check_size(path, self.manifest.shards[number].tokens * self.dtype.itemsize)
        return ids

    def _open_places(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Lengths in tokens and begins in bytes of a shard's documents, as views of its mapped index."""
        shard = self.manifest.shards[number]
        path = self._idx(shard)
        with os_errors("open", path):
            content = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        lengths_end = LENGTHS_AT + 4 * shard.documents
        lengths = content[LENGTHS_AT:lengths_end].view("<i4")
        return lengths, content[lengths_end : lengths_end + 8 * shard.documents].view("<i8")

    def _shard_lengths(self, shard: Shard) -> np.ndarray:
        path = self._idx(shard)
        lengths, dtype = decode_index(self._read(path), str(path))
        if lengths.size != shard.documents or dtype != self.manifest.dtype:
            raise DataError(f"{path}: {lengths.size} documents of {dtype}, the manifest says {shard.documents}")
        return lengths

    def _read(self, path: Path) -> bytes:
        with os_errors("read", path):
            return path.read_bytes()

    def _check_size(self, path: Path, expected: int) -> None:
        with os_errors("open the shard", path):
            size = path.stat().st_size
        if size != expected:
            raise DataError(f"{path}: {size} bytes, the manifest says {expected}: copy it again or prepare again")

    def _check_hash(self, path: Path, expected: str) -> None:
        with os_errors("read", path), path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != expected:
            raise DataError(f"{path}: its SHA-256 is not the one in the manifest: copy it again or prepare again")

    def _check_ids(self, number: int) -> None:
        shard, digest = self.manifest.shards[number], hashlib.sha256()
        for begin in range(0, shard.tokens, _READ_IDS):
            digest.update(np.ascontiguousarray(self.read(number, begin, min(begin + _READ_IDS, shard.tokens))).data)
        if digest.hexdigest() != shard.sha256:
            raise DataError(f"shard {shard.name}: its SHA-256 is not the one in the manifest: upload it again")


def _reopened(
    kind: type[TokenStore], path: Path, manifest: Manifest, contents: ShardBytes | None
) -> TokenStore:  # for pickle
    return kind(path, manifest, contents=contents)
