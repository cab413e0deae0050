"""Masks of shards: the documents of a shard that a store has, so that others are left out without a copy.

    keep/00012.keep   an npy array, bool [documents of the shard]; `Mask.file` of the manifest names it

Deduplication and the hold-out split write them. Of a masked shard only sums of every 512 documents are held, and the
lengths in between are added when a document or token is looked for, so memory does not grow with the documents.

Cost: one read of mask and index of a shard at its first use, then about 20 microseconds for a place in it.
"""

import hashlib
import io
from pathlib import Path

import numpy as np

from lt_data.storage import replace_file
from lt_data.store.manifest import Mask

MASK_FOLDER = "keep"
_BLOCK = 512  # documents


def write_mask(folder: Path, number: int, keep: np.ndarray, lengths: np.ndarray) -> Mask:
    """Write the mask of a shard, or the same again; the folder `keep` of the store is there.

    Args:
        folder: folder of the store.
        number: number of the file, of its own in the folder.
        keep: the documents that are kept (bool [documents]).
        lengths: tokens of each document [documents].

    Raises:
        DataError: a file system error.
    """
    buffer = io.BytesIO()
    np.save(buffer, keep)
    name, content = f"{MASK_FOLDER}/{number:05d}.keep", buffer.getvalue()
    replace_file(folder / name, content)
    return Mask(
        file=name,
        sha256=hashlib.sha256(content).hexdigest(),
        documents=int(np.count_nonzero(keep)),
        tokens=int(lengths[keep].sum(dtype=np.int64)),
    )


class KeptDocuments:
    """Places of the kept documents of a shard, and of their tokens, in its files.

    Args:
        keep: mask of the documents of the shard (bool [n]), not all False.
        lengths: tokens of each (integers [n]).
    """

    def __init__(self, keep: np.ndarray, lengths: np.ndarray) -> None:
        self.keep, self._lengths = keep, lengths
        self._documents = _sum_blocks(keep)
        self._tokens = _sum_blocks(np.where(keep, lengths, 0))
        self._file_tokens = _sum_blocks(lengths)

    def find_document(self, number: int) -> tuple[int, int, int]:
        """Return of a kept document its number in the shard, its first token among those kept, and its length."""
        block = int(np.searchsorted(self._documents, number, "right")) - 1
        first = block * _BLOCK
        kept = np.flatnonzero(self.keep[first : first + _BLOCK]) + first
        place = number - int(self._documents[block])
        begin = int(self._tokens[block]) + int(self._lengths[kept[:place]].sum(dtype=np.int64))
        return int(kept[place]), begin, int(self._lengths[kept[place]])

    def find_tokens(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return begins and ends in the shard of the runs that hold the kept tokens [begin, end) (int64 [runs])."""
        first = int(np.searchsorted(self._tokens, begin, "right")) - 1
        last = int(np.searchsorted(self._tokens, end, "left"))
        kept = self.keep[first * _BLOCK : last * _BLOCK]
        lengths = self._lengths[first * _BLOCK : last * _BLOCK].astype(np.int64)
        file_begins = (self._file_tokens[first] + np.cumsum(lengths) - lengths)[kept]
        ends = self._tokens[first] + np.cumsum(lengths[kept])
        begins = ends - lengths[kept]
        low, high = np.maximum(begins, begin), np.minimum(ends, end)
        inside = low < high
        starts = (file_begins + low - begins)[inside]
        stops = starts + (high - low)[inside]
        cuts = np.flatnonzero(starts[1:] != stops[:-1])
        return starts[np.append(0, cuts + 1)], stops[np.append(cuts, starts.size - 1)]


def _sum_blocks(values: np.ndarray) -> np.ndarray:
    """Return the sum of the values before each block of `_BLOCK` documents, and of all (int64 [blocks + 1])."""
    sums = np.add.reduceat(values.astype(np.int64), np.arange(0, values.size, _BLOCK))
    return np.append(0, np.cumsum(sums))
