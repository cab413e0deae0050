"""Extents: runs of consecutive documents of a shard that a store has, in order.

A store's documents and tokens are numbered without those that it leaves out. Usually it leaves out none, and each shard
is one extent. A joined store may leave out documents that an earlier part has too (lt_data.preparation.duplicates):
its extents are then in the file `kept.extents` beside its manifest, which is mapped. Columns, little-endian, of n
extents and one entry more, which has the totals:

    first_token     i8 [n + 1]   tokens of the extents before
    first_document  i8 [n + 1]   documents of the extents before
    shard_token     i8 [n + 1]   token in the shard at which the extent begins; of the last entry 0
    shard_document  u4 [n + 1]   document in the shard with which it begins; of the last entry 0
    shard           u4 [n + 1]   shard; of the last entry the number of shards

Cost: 32 bytes an extent, read once when the store is opened; finding a token is a binary search.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lt_data.errors import DataError
from lt_data.storage import open_regular, translate_os_errors
from lt_data.store.mapped_files import map_file

EXTENTS_FILE = "kept.extents"
COLUMNS = {"first_token": "<i8", "first_document": "<i8", "shard_token": "<i8", "shard_document": "<u4", "shard": "<u4"}
"""Columns of the file, in its order, and their dtypes."""
_ENTRY_BYTES = 32
_CHECKED_AT_ONCE = 2**20
_REMEDY = "copy it again, or prepare the store again"


@dataclass(frozen=True, kw_only=True, eq=False)
class Extents:
    """Extents of a store; see the top of this file for the arrays.

    Attributes:
        has_all: no document is left out, so extent i is shard i.
    """

    first_token: np.ndarray
    first_document: np.ndarray
    shard_token: np.ndarray
    shard_document: np.ndarray
    shard: np.ndarray
    has_all: bool = False

    @classmethod
    def of_shards(cls, tokens: Sequence[int], documents: Sequence[int]) -> "Extents":
        """Return the extents of shards with these totals, of which no document is left out."""
        n = len(tokens) + 1
        return cls(
            first_token=np.cumsum([0, *tokens], dtype=np.int64),
            first_document=np.cumsum([0, *documents], dtype=np.int64),
            shard_token=np.zeros(n, np.int64),
            shard_document=np.zeros(n, np.uint32),
            shard=np.arange(n, dtype=np.uint32),
            has_all=True,
        )

    @property
    def n_tokens(self) -> int:
        """Tokens of all extents."""
        return int(self.first_token[-1])

    @property
    def n_documents(self) -> int:
        """Documents of all extents."""
        return int(self.first_document[-1])

    def find_tokens(self, tokens: np.ndarray) -> np.ndarray:
        """Return the extent of each token, which must be in the store (int64 [n])."""
        return np.searchsorted(self.first_token, tokens, side="right") - 1

    def place(self, extent: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return shard, and position in the shard, of tokens in these extents (int64 [n] each)."""
        offset = tokens - self.first_token[extent]
        if self.has_all:
            return extent, offset
        return self.shard[extent].astype(np.int64), offset + self.shard_token[extent]

    def split(self, start: int, length: int) -> Iterator[tuple[int, int, int]]:
        """Yield shard, begin and end there of the pieces of a range of tokens, one in each extent."""
        extent = int(np.searchsorted(self.first_token, start, side="right")) - 1 if length > 0 else 0
        while length > 0:
            offset = start - int(self.first_token[extent])
            size = min(length, int(self.first_token[extent + 1]) - start)
            begin = offset + int(self.shard_token[extent])
            if size:
                yield int(self.shard[extent]), begin, begin + size
            start, length, extent = start + size, length - size, extent + 1

    def find_document(self, document: int) -> tuple[int, int, int]:
        """Return the extent of a document, its shard, and its number in the shard."""
        extent = int(np.searchsorted(self.first_document, document, side="right")) - 1
        place = document - int(self.first_document[extent]) + int(self.shard_document[extent])
        return extent, int(self.shard[extent]), place

    def shard_documents(self, n_shards: int) -> np.ndarray:
        """Return the documents of the shards before each shard, and of all (int64 [n_shards + 1])."""
        return self.first_document[np.searchsorted(self.shard, np.arange(n_shards + 1), side="left")]

    def kept_documents(self, shard: int, documents: int) -> np.ndarray | None:
        """Return a mask of the documents of a shard that are left (bool [documents]); None: all of them."""
        if self.has_all:
            return None
        first, last = np.searchsorted(self.shard[:-1], [shard, shard + 1], side="left").tolist()
        begin = self.shard_document[first:last].astype(np.int64)
        edges = np.zeros(documents + 1, np.int8)
        edges[begin] += 1
        edges[begin + np.diff(self.first_document[first : last + 1])] -= 1
        return np.cumsum(edges[:-1]) > 0


def extents_size(n_extents: int) -> int:
    """Return the bytes of the file of so many extents."""
    return _ENTRY_BYTES * (n_extents + 1)


def map_extents(path: Path, n_extents: int, *, shard_tokens: Sequence[int], shard_documents: Sequence[int]) -> Extents:
    """Map the extents in a file, and check that they are in the shards: what reads them relies on it.

    Args:
        path: the file.
        n_extents: their number.
        shard_tokens: tokens of each shard, those of the left-out documents included.
        shard_documents: likewise documents.

    Raises:
        DataError: the file is missing, of another size or broken.
    """
    with translate_os_errors("read", path), open_regular(path, inside=path.parent) as file:
        size = file.seek(0, 2)
        if size != extents_size(n_extents):
            raise DataError(f"{path}: {size} bytes, the manifest says {extents_size(n_extents)}; {_REMEDY}")
        content = map_file(file.fileno(), size, np.dtype(np.uint8))
    arrays: dict[str, np.ndarray] = {}
    begin = 0
    for name, dtype in COLUMNS.items():
        end = begin + np.dtype(dtype).itemsize * (n_extents + 1)
        arrays[name] = content[begin:end].view(dtype)
        begin = end
    extents = Extents(has_all=False, **arrays)
    limits = (np.asarray(shard_tokens, np.int64), np.asarray(shard_documents, np.int64))
    if (
        extents.first_token[0]
        or extents.first_document[0]
        or int(extents.shard[-1]) != len(shard_tokens)
        or not all(_fit(extents, first, *limits) for first in range(0, n_extents, _CHECKED_AT_ONCE))
    ):
        raise DataError(f"{path}: has extents that are not in the shards of its store; {_REMEDY}")
    return extents


def _fit(extents: Extents, first: int, shard_tokens: np.ndarray, shard_documents: np.ndarray) -> bool:
    """Return True if some extents from `first` on are in order and in their shards."""
    last = min(first + _CHECKED_AT_ONCE, extents.shard.size - 1)
    shard = extents.shard[first : last + 1].astype(np.int64)
    if (np.diff(shard) < 0).any() or shard[-2] >= shard_tokens.size:
        return False
    same = np.flatnonzero(np.diff(shard[:-1]) == 0)
    for total, begin, limits in (
        (extents.first_token, extents.shard_token, shard_tokens),
        (extents.first_document, extents.shard_document, shard_documents),
    ):
        size, at = np.diff(total[first : last + 1]), begin[first:last].astype(np.int64)
        end = at + size
        if (size <= 0).any() or (at < 0).any() or (end > limits[shard[:-1]]).any() or (end[same] > at[same + 1]).any():
            return False
    return True


class ShardExtents(NamedTuple):
    """Extents of one shard; each array is int64 [n].

    Attributes:
        document: document of the shard with which it begins.
        token: token of the shard with which it begins.
        documents: its documents.
        tokens: its tokens.
    """

    document: np.ndarray
    token: np.ndarray
    documents: np.ndarray
    tokens: np.ndarray


def extents_of_mask(kept: np.ndarray, lengths: np.ndarray) -> ShardExtents:
    """Return the extents of a shard, from the mask of its kept documents and the tokens of each."""
    edges = np.diff(np.concatenate(([False], kept, [False])).astype(np.int8))
    begin, end = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    return ShardExtents(begin, ends[begin], end - begin, ends[end] - ends[begin])
