"""Header of a pack (`pack.json`), and the fingerprint over header and arrays."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.packing.groups import PackMode
from lt_data.storage import read_file, translate_os_errors

FORMAT = "lt-data-pack"
VERSION = 1
PACK_FILE = "pack.json"
DEFAULT_MIN_SEQ_LEN = 256  # tokens in the shortest rows of buckets
_MAX_HEADER_BYTES = 2**20
_REMEDY = "make the pack again"
ARRAYS = ("row_offsets", "document", "start", "length", "labels", "valid")
DTYPES = ("<i8", "<u4", "<i8", "<i4", "<i4", "<i4")  # of `document`: see `document_dtype`


@dataclass(frozen=True, kw_only=True)
class _ArrayHeader:
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PackHeader:
    """Fields of `pack.json`, but for format and version."""

    seq_len: int
    mode: PackMode
    buckets: tuple[tuple[int, int], ...] | None = None
    documents_per_group: int | None = None
    rows: int
    slices: int
    max_slices_per_row: int
    store_fingerprint: str
    fingerprint: str
    arrays: Mapping[str, _ArrayHeader]

    def __post_init__(self) -> None:
        if {*self.arrays} != {*ARRAYS}:
            raise DataError(f"its arrays are {', '.join(self.arrays)}, not {', '.join(ARRAYS)}")
        if self.seq_len < 1 or self.max_slices_per_row < 0 or not (self.documents_per_group or 1) > 0:
            raise DataError(
                f"seq_len = {self.seq_len}, max_slices_per_row = {self.max_slices_per_row}, documents_per_group = "
                f"{self.documents_per_group}: not counts"
            )
        if (self.buckets is None) != (self.mode != "buckets"):
            raise DataError("buckets belong to the mode 'buckets', and to no other")
        if self.buckets is not None and (
            min(map(min, self.buckets), default=0) < 1 or sum(rows for _, rows in self.buckets) != self.rows
        ):
            raise DataError(f"its buckets do not sum to its {self.rows} rows")


def make_header(
    *,
    seq_len: int,
    mode: PackMode,
    buckets: tuple[tuple[int, int], ...] | None,
    documents_per_group: int | None,
    max_slices_per_row: int,
    store_fingerprint: str,
    fingerprint: str,
    items: Mapping[str, int],
    dtypes: Mapping[str, np.dtype[Any]],
) -> dict[str, Any]:
    """Return the content of `pack.json`; `items` and `dtypes` are those of the arrays, by name."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "seq_len": seq_len,
        "mode": mode,
        **({} if buckets is None else {"buckets": [list(bucket) for bucket in buckets]}),
        **({} if documents_per_group is None else {"documents_per_group": documents_per_group}),
        "rows": items["valid"],
        "slices": items["start"],
        "max_slices_per_row": max_slices_per_row,
        "store_fingerprint": store_fingerprint,
        "fingerprint": fingerprint,
        "arrays": {name: {"dtype": dtypes[name].str, "shape": [items[name]]} for name in ARRAYS},
    }


def read_header(path: Path) -> PackHeader:
    """Return the header in a file.

    Raises:
        DataError: a file system error, no pack, another version, or fields of other types.
    """
    with translate_os_errors("read the pack's", path):
        content = read_file(path, max_bytes=_MAX_HEADER_BYTES)
    return parse_header(strict_json.load_object(content, str(path), _REMEDY), str(path))


def parse_header(header: Mapping[str, Any], source: str) -> PackHeader:
    """Return a header from its fields; `source` is the file, for errors, which are those of `read_header`."""
    fields = dict(header)
    if fields.pop("format", None) != FORMAT:
        raise DataError(f"{source}: not a pack")
    if (version := fields.pop("version", None)) != VERSION:
        raise DataError(f"{source}: format version {version!r}; this lt-data reads version {VERSION}: update lt-data")
    return strict_json.parse(PackHeader, json.loads(json.dumps(fields)), source, _REMEDY)


def start_fingerprint(
    seq_len: int,
    mode: PackMode,
    store_fingerprint: str,
    buckets: tuple[tuple[int, int], ...] | None,
    documents_per_group: int | None,
) -> "hashlib._Hash":
    """Return a fingerprint's hash over the header, to be continued with the arrays."""
    digest = hashlib.sha256(f"{FORMAT} {VERSION} {mode} {seq_len} {store_fingerprint}\n".encode())
    for length, rows in buckets or ():
        digest.update(f"bucket {length} {rows}\n".encode())
    if documents_per_group is not None:
        digest.update(f"documents per group {documents_per_group}\n".encode())
    return digest


def pack_fingerprint(digest: "hashlib._Hash", arrays: Mapping[str, np.ndarray]) -> str:
    """Return the fingerprint: a hash of `start_fingerprint`, continued with each of the arrays."""
    for name in ARRAYS:
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.size}\n".encode())
        digest.update(array.data)
    return digest.hexdigest()


def check_row_lengths(seq_len: int, mode: str, min_seq_len: int | None) -> list[int]:
    """Return the row lengths of a pack, longest first."""
    if not 1 <= seq_len < 2**31:
        raise DataError(f"seq_len = {seq_len}: from 1 to {2**31 - 1}")
    if mode not in get_args(PackMode):
        raise DataError(f"mode = {mode!r}: one of {', '.join(get_args(PackMode))}")
    if mode != "buckets":
        if min_seq_len is not None:
            raise DataError(f"min_seq_len = {min_seq_len}: requires mode='buckets'; leave it out with mode = {mode!r}")
        return [seq_len]
    shortest = DEFAULT_MIN_SEQ_LEN if min_seq_len is None else min_seq_len
    lengths = [seq_len]
    while lengths[-1] > shortest and lengths[-1] % 2 == 0:
        lengths.append(lengths[-1] // 2)
    if lengths[-1] != shortest:
        raise DataError(
            f"min_seq_len = {shortest}: give seq_len = {seq_len} divided by a power of two: one of {lengths}"
        )
    return lengths
