"""Pack in memory or mapped from its files: rows as slices of documents.

Cost: 28 bytes per slice on disk, opened without reading.
"""

import io
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lt_data.errors import DataError
from lt_data.packing.groups import (
    GROUP_DOCUMENTS,
    PackMode,
    document_dtype,
    fill,
    fill_group,
    iter_groups,
    labels_per_row,
    max_slices_per_row,
)
from lt_data.packing.npy import mmap_npy
from lt_data.packing.pack_header import (
    ARRAYS,
    PACK_FILE,
    check_row_lengths,
    make_header,
    pack_fingerprint,
    parse_header,
    read_header,
    start_fingerprint,
)
from lt_data.storage import atomic_folder, write_file


@dataclass(frozen=True, kw_only=True, eq=False)
class PackIndex:
    """Pack: rows as slices of documents. Row r has the slices row_offsets[r] to row_offsets[r + 1].

    Attributes:
        seq_len: tokens in a row; with buckets, in the longest.
        mode: packing mode.
        store_fingerprint: fingerprint of the token store that the offsets refer to.
        fingerprint: SHA-256 over the whole pack.
        row_offsets: int64 [n_rows + 1].
        document: index of the slice's document (uint32, or int64 for a store of 2^32 documents) [n_slices].
        start: token offset of the slice in the store (int64) [n_slices].
        length: tokens in the slice (int32) [n_slices].
        labels: positions of the slice that have a label (int32): `length`, or one less [n_slices].
        valid: positions of the row that have a label (int32) [n_rows].
        max_slices_per_row: maximum over the rows, a bound for the fixed shapes that compilers need.
        buckets: with buckets, (length, number of rows) of each, in the order of the rows.
        documents_per_group: documents that were packed together; None: all of them.
        folder: folder that it was opened from.
    """

    seq_len: int
    mode: PackMode
    store_fingerprint: str
    fingerprint: str
    row_offsets: np.ndarray
    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    labels: np.ndarray
    valid: np.ndarray
    max_slices_per_row: int
    buckets: tuple[tuple[int, int], ...] | None = None
    documents_per_group: int | None = None
    folder: Path | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens the files itself: pickling a map would copy it.
        if self.folder is not None:
            return (PackIndex.load, (self.folder,))
        return (_rebuild, (dict(self.__dict__),))

    @property
    def n_rows(self) -> int:
        """Rows in the pack."""
        return self.valid.size

    @property
    def n_slices(self) -> int:
        """Slices in all rows."""
        return int(self.row_offsets[-1] - self.row_offsets[0])

    @property
    def n_positions(self) -> int:
        """Positions in all rows, padding included."""
        return sum(length * rows for length, rows in self.buckets or ((self.seq_len, self.n_rows),))

    def bucket(self, length: int) -> "PackIndex":
        """Return the rows of one length as a pack (a view).

        Raises:
            DataError: there is no such bucket.
        """
        first = 0
        for found, rows in self.buckets or ():
            if found == length:
                last = first + rows
                row_offsets, valid = self.row_offsets[first : last + 1], self.valid[first:last]
                return replace(
                    self,
                    seq_len=length,
                    row_offsets=row_offsets,
                    valid=valid,
                    # longer rows have one slice each
                    max_slices_per_row=self.max_slices_per_row if last == self.n_rows else 1,
                    buckets=((length, rows),),
                    folder=None,
                )
            first += rows
        raise DataError(f"bucket {length}: the pack has {[found for found, _ in self.buckets or ()]}")

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write the index to a new folder, atomically.

        Args:
            folder: path of the folder.
            overwrite: replace a pack at `folder`.

        Raises:
            DataError: a file system error.
        """
        with atomic_folder(Path(folder), overwrite=overwrite) as building:
            for name in ARRAYS:
                buffer = io.BytesIO()
                np.save(buffer, getattr(self, name), allow_pickle=False)
                with buffer.getbuffer() as content:
                    write_file(building / f"{name}.npy", content)
            write_file(building / PACK_FILE, (json.dumps(self._header(), indent=2) + "\n").encode())

    @classmethod
    def load(cls, folder: str | Path) -> "PackIndex":
        """Open a pack; its arrays are mapped, not read.

        Raises:
            DataError: no pack, another version, or files that do not match.
        """
        folder = Path(folder)
        header = read_header(folder / PACK_FILE)
        arrays: dict[str, Any] = {
            name: mmap_npy(folder / f"{name}.npy", array.dtype, array.shape) for name, array in header.arrays.items()
        }
        return cls(
            seq_len=header.seq_len,
            mode=header.mode,
            max_slices_per_row=header.max_slices_per_row,
            store_fingerprint=header.store_fingerprint,
            fingerprint=header.fingerprint,
            buckets=header.buckets,
            documents_per_group=header.documents_per_group,
            folder=folder,
            **arrays,
        )

    def verify(self) -> None:
        """Recompute the fingerprint from the arrays, and compare `pack.json` with them.

        Raises:
            DataError: one of them differs.
        """
        if self._compute_fingerprint() != self.fingerprint:
            raise DataError(f"pack {self.mode}-{self.seq_len}: its arrays do not match its fingerprint; make it again")
        header = replace(self, max_slices_per_row=max_slices_per_row(self.row_offsets))._header()
        source = str(self.folder and self.folder / PACK_FILE)
        if self.folder is not None and read_header(self.folder / PACK_FILE) != parse_header(header, source):
            raise DataError(f"{self.folder / PACK_FILE}: does not match the arrays beside it; make the pack again")

    def _header(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name) for name in ARRAYS}
        return make_header(
            seq_len=self.seq_len,
            mode=self.mode,
            buckets=self.buckets,
            documents_per_group=self.documents_per_group,
            max_slices_per_row=self.max_slices_per_row,
            store_fingerprint=self.store_fingerprint,
            fingerprint=self.fingerprint,
            items={name: array.size for name, array in arrays.items()},
            dtypes={name: array.dtype for name, array in arrays.items()},
        )

    def _compute_fingerprint(self) -> str:
        arrays = {name: getattr(self, name) for name in ARRAYS}
        digest = start_fingerprint(
            self.seq_len, self.mode, self.store_fingerprint, self.buckets, self.documents_per_group
        )
        return pack_fingerprint(digest, arrays)


def build_index(
    lengths: np.ndarray,
    *,
    seq_len: int,
    mode: PackMode,
    min_seq_len: int | None = None,
    store_fingerprint: str = "",
    documents_per_group: int = GROUP_DOCUMENTS,
) -> PackIndex:
    """Compute a pack in memory from the lengths of the documents (integers [n], all positive)."""
    row_lengths = check_row_lengths(seq_len, mode, min_seq_len)
    documents = document_dtype(lengths.size)
    if lengths.size <= documents_per_group:
        slices, counts = fill(lengths, mode, row_lengths)
        labels = slices.labels.astype(np.int32, copy=False)
        arrays: dict[str, Any] = {
            "row_offsets": slices.row_offsets,
            "document": slices.document.astype(documents, copy=False),
            "start": slices.start,
            "length": slices.length.astype(np.int32, copy=False),
            "labels": labels,
            "valid": labels_per_row(labels, slices.row_offsets),
        }
    else:
        groups = [fill_group(g, mode, row_lengths, documents) for g in iter_groups(lengths, documents_per_group)]
        counts = [sum(block.n_rows for block in blocks) for blocks in zip(*groups, strict=True)]
        ordered = [block for blocks in zip(*groups, strict=True) for block in blocks]
        arrays = {
            name: np.concatenate([block.arrays[name] for block in ordered]) for name in ARRAYS if name != "row_offsets"
        }
        first_slices = np.cumsum([0, *(block.n_slices for block in ordered)])
        ends = [block.arrays["row_offsets"] + first for block, first in zip(ordered, first_slices, strict=False)]
        arrays["row_offsets"] = np.concatenate([np.zeros(1, np.int64), *ends])
    buckets = tuple(zip(row_lengths, counts, strict=True)) if mode == "buckets" else None
    grouped = documents_per_group if lengths.size > documents_per_group else None
    return PackIndex(
        seq_len=seq_len,
        mode=mode,
        store_fingerprint=store_fingerprint,
        fingerprint=pack_fingerprint(start_fingerprint(seq_len, mode, store_fingerprint, buckets, grouped), arrays),
        max_slices_per_row=max_slices_per_row(arrays["row_offsets"]),
        buckets=buckets,
        documents_per_group=grouped,
        **arrays,
    )


def _rebuild(values: dict[str, Any]) -> PackIndex:  # for pickle
    return PackIndex(**values)
