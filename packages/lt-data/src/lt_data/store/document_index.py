"""Lengths and offsets of the documents of a store, from the index of each shard.

Of one document they are read through the mapped index of its shard, the last few of which stay mapped; `lengths` and
`offsets` read all indexes and hold all documents.

Cost: about 15 microseconds to map an index; 4 bytes a document for `lengths`, 8 for `offsets`.
"""

from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from lt_data.errors import DataError
from lt_data.store.extents import Extents
from lt_data.store.joined_index import ShardLocation
from lt_data.store.manifest import StoreManifest
from lt_data.store.megatron import decode_index, index_size
from lt_data.store.shard_files import map_index, read_checked

_HELD_INDEXES = 256  # shards whose index stays mapped


class DocumentIndex:
    """Documents of a store, numbered through its extents.

    Attributes:
        boundaries: index of the first document of each shard, and the end of the last (int64 [shards + 1]).

    Args:
        manifest: manifest of the store.
        extents: what the store has of its shards.
        location_of: checked location of a shard by its number.
        path_of: path of a file of a shard by its number and suffix.
        is_local: whether the files are in their folders, so that an index is mapped.
    """

    def __init__(
        self,
        manifest: StoreManifest,
        extents: Extents,
        location_of: Callable[[int], ShardLocation],
        path_of: Callable[[int, str], Path],
        *,
        is_local: bool,
    ) -> None:
        self._manifest = manifest
        self._location_of = location_of
        self._path_of = path_of
        self._is_local = is_local
        self._extents = extents
        self.boundaries = extents.shard_documents(len(manifest.shards))
        self._map_index = lru_cache(maxsize=_HELD_INDEXES)(self._open_index)

    def __len__(self) -> int:
        return self._extents.n_documents

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, in order (int32 [n_documents])."""
        # a part of a job may have no shard
        return np.concatenate([np.zeros(0, np.int32), *map(self._kept_lengths, range(len(self._manifest.shards)))])

    @cached_property
    def offsets(self) -> np.ndarray:
        """Global token offset of each document, and the end of the last (int64 [n_documents + 1])."""
        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(self.lengths, out=offsets[1:])
        return offsets

    def read_lengths(self, first: int, last: int) -> np.ndarray:
        """Return the tokens of each document from `first` to before `last` (int32), read from their shards."""
        bounds = self.boundaries
        shards = range(int(np.searchsorted(bounds, first, "right")) - 1, int(np.searchsorted(bounds, last, "left")))
        parts = [
            self._kept_lengths(number)[max(first - int(bounds[number]), 0) : last - int(bounds[number])]
            for number in shards
        ]
        return np.concatenate([np.zeros(0, np.int32), *parts])

    def shard_lengths(self, number: int) -> np.ndarray:
        """Return the tokens of each document in the files of a shard (int32), read from its index.

        Raises:
            DataError: the index cannot be read, or is not that of the shard.
        """
        shard, path = self._manifest.shards[number], self._path_of(number, "idx")
        content = read_checked(path, index_size(shard.documents), self._location_of(number).folder)
        lengths, dtype = decode_index(content, str(path))
        if lengths.size != shard.documents or dtype != self._manifest.dtype:
            raise DataError(f"{path}: {lengths.size} documents of {dtype}, the manifest says {shard.documents}")
        return lengths

    def find(self, index: int) -> tuple[int, int]:
        """Return the shard of a document and its number in the files there.

        Raises:
            IndexError: there is no such document.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        return self._extents.find_document(index)[1:]

    def span(self, index: int) -> tuple[int, int]:
        """Return the global token offset of a document, and its length.

        Raises:
            DataError: the index of the shard cannot be read or is broken.
            IndexError: there is no such document.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        if "offsets" in self.__dict__ or not self._is_local:
            return int(self.offsets[index]), int(self.lengths[index])
        extent, number, place = self._extents.find_document(index)
        lengths, begins = self._map_index(number)
        begin, length = int(begins[place]) // np.dtype(self._manifest.dtype).itemsize, int(lengths[place])
        if not 0 <= begin < begin + length <= self._manifest.shard_tokens_each[number]:
            raise DataError(
                f"{self._path_of(number, 'idx')}: broken index (document {place}); copy it again or prepare it again"
            )
        return int(self._extents.first_token[extent] - self._extents.shard_token[extent]) + begin, length

    def _kept_lengths(self, number: int) -> np.ndarray:
        lengths = self.shard_lengths(number)
        kept = self._extents.kept_documents(number, lengths.size)
        return lengths if kept is None else lengths[kept]

    def _open_index(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        location = self._location_of(number)
        return map_index(self._path_of(number, "idx"), location.shard, inside=location.folder)
