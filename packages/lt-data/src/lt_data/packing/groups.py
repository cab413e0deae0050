"""Groups of documents, each packed by itself: in parallel, and in memory that does not grow.

A group is a range of `documents_per_group` consecutive documents, so the result depends on the documents alone, never
on the number of workers. The pack has the rows of the first group, then those of the second; with buckets, of each
length the rows of the first group, then those of the second. Up to one group it is the pack of all documents at once.

What grouping costs in fill: each group has a few rows that are not full, of the tens of thousands that it has
(docs/benchmarks/data.md). `concat` begins a new row with each group.

Cost: about 72 bytes of memory per document of a group and worker; one pass of the algorithm per group.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from lt_data.packing.algorithms import Slices, fill_best_fit, fill_buckets, fill_concat

PackMode = Literal["bfd", "concat", "buckets"]
GROUP_DOCUMENTS = 2**24
"""Documents of a group: 1.2 GB of memory for each worker."""
SLICE_ARRAYS = ("document", "start", "length", "labels")
ROW_ARRAYS = ("row_offsets", "valid")


class Lengths(Protocol):
    """Tokens of each document; an array, or what reads a range of them."""

    @property
    def size(self) -> int:
        """Number of documents."""
        ...

    def __getitem__(self, documents: slice, /) -> np.ndarray:
        """Return the lengths of a range (integers [n], all positive)."""
        ...


class Group(NamedTuple):
    """Documents to be packed together.

    Attributes:
        lengths: tokens of each (integers [n]).
        first_document: index of the first in the store.
        first_token: token offset of the first in the store.
        ends_store: they are the last ones.
    """

    lengths: np.ndarray
    first_document: int
    first_token: int
    ends_store: bool


@dataclass(frozen=True, kw_only=True)
class Block:
    """Rows of one length of one group.

    Attributes:
        arrays: columns by name, those of `SLICE_ARRAYS` and `ROW_ARRAYS`; "row_offsets" has the end of each row among
            the slices of the block (int64 [n_rows]).
        max_slices_per_row: most slices of a row; 0 without rows.
    """

    arrays: dict[str, np.ndarray]
    max_slices_per_row: int

    @property
    def n_slices(self) -> int:
        """Slices of its rows."""
        return self.arrays["start"].size

    @property
    def n_rows(self) -> int:
        """Rows."""
        return self.arrays["valid"].size


def iter_groups(lengths: Lengths, documents_per_group: int) -> Iterator[Group]:
    """Yield the groups in order; at least one, if only of no document."""
    first_token = 0
    for first in range(0, max(1, lengths.size), documents_per_group):
        part = lengths[first : first + documents_per_group]
        yield Group(part, first, first_token, ends_store=first + documents_per_group >= lengths.size)
        first_token += int(part.sum(dtype=np.int64))


def document_dtype(n_documents: int) -> np.dtype[Any]:
    """Return the dtype of indices of so many documents."""
    return np.dtype(np.uint32 if n_documents <= 2**32 else np.int64)


def fill(lengths: np.ndarray, mode: PackMode, row_lengths: list[int]) -> tuple[Slices, list[int]]:
    """Pack documents by one of the algorithms.

    Args:
        lengths: tokens of each document (integers [n]).
        mode: the algorithm.
        row_lengths: lengths of rows, longest first; one, unless the mode is `buckets`.

    Returns:
        The slices, and the number of rows of each length.
    """
    offsets = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if mode == "buckets":
        return fill_buckets(offsets, row_lengths)
    slices = (fill_best_fit if mode == "bfd" else fill_concat)(offsets, row_lengths[0])
    return slices, [slices.row_offsets.size - 1]


def fill_group(group: Group, mode: PackMode, row_lengths: list[int], documents: np.dtype[Any]) -> list[Block]:
    """Pack a group; arguments as of `fill`, `documents` is the dtype of indices of documents.

    Returns:
        One block for each row length.
    """
    slices, counts = fill(group.lengths, mode, row_lengths)
    if mode == "concat" and not group.ends_store:
        slices.labels[-1:] += 1  # the next group's first token
    arrays = {
        "document": slices.document.astype(documents),
        "start": slices.start,
        "length": slices.length.astype(np.int32, copy=False),
        "labels": slices.labels.astype(np.int32, copy=False),
    }
    arrays["document"] += documents.type(group.first_document)
    arrays["start"] += group.first_token
    blocks, first_row = [], 0
    for n_rows in counts:
        ends = slices.row_offsets[first_row : first_row + n_rows + 1]
        begin, end = int(ends[0]), int(ends[-1])
        block = {name: array[begin:end] for name, array in arrays.items()}
        offsets = ends - begin
        block |= {"row_offsets": offsets[1:], "valid": labels_per_row(block["labels"], offsets)}
        blocks.append(Block(arrays=block, max_slices_per_row=max_slices_per_row(offsets)))
        first_row += n_rows
    return blocks


def max_slices_per_row(row_offsets: np.ndarray) -> int:
    """Return the most slices of a row; 0 without rows."""
    return int(np.diff(row_offsets).max(initial=0))


def labels_per_row(labels: np.ndarray, row_offsets: np.ndarray) -> np.ndarray:
    """Return the number of labels of each row (int32), of slices and row offsets that begin at 0."""
    n_rows = row_offsets.size - 1
    # The first rows have one slice each, of long documents, and need no sum. No row is empty, so these are the rows i
    # that begin with slice i.
    n_single = bisect_left(range(1, n_rows + 1), True, key=lambda row: bool(row_offsets[row] > row))
    sums = np.empty(n_rows, np.int32)
    sums[:n_single] = labels[:n_single]
    total = np.cumsum(labels[n_single:], dtype=np.int64)
    sums[n_single:] = np.diff(total[row_offsets[n_single + 1 :] - (n_single + 1)], prepend=0)
    return sums
