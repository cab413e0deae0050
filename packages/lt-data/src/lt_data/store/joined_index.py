"""Index of a large joined store: the entries of all its shards in one file.

With it, opening parses no part's manifest.

    {"format": "lt-data-joined-index", "version": 1, "manifest": {...}, "parts": [{"shards", "sources", "columns"}]}
    columns of the shards (lt_data.store.shard_table)

One line of JSON, then binary columns. `manifest` is that of the flat store without `shards`, and of `sources` of a part
all but `listed`. The joined manifest pins the file by SHA-256. Cost: 160 bytes a shard; 10^5 shards open in 0.1 s.
"""

import bisect
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import overload

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.store.manifest import ColumnInfo, ShardFile, StoreManifest
from lt_data.store.manifest_checks import check_counts
from lt_data.store.shard_table import ShardTable
from lt_data.store.source_files import SourceFiles

FORMAT = "lt-data-joined-index"
VERSION = 1
INDEX_FILE = "joined.index"
MIN_INDEXED_SHARDS = 1024
"""Joined stores of fewer shards have no index: their manifests are read in milliseconds."""
_REMEDY = "join the stores again"


@dataclass(frozen=True, kw_only=True)
class ShardLocation:
    """Location of a shard.

    Attributes:
        folder: the flat store that it is in.
        shard: its entry in the manifest there.
        sources: the source files of that store.
        columns: its kept columns.
        first_file: source files of the parts before.
    """

    folder: Path
    shard: ShardFile
    sources: SourceFiles
    columns: tuple[ColumnInfo, ...] = ()
    first_file: int = 0


@dataclass(frozen=True, kw_only=True)
class IndexedPart:
    """Part in an index: number of shards, source files, and kept columns."""

    shards: int
    sources: SourceFiles
    columns: tuple[ColumnInfo, ...]

    def __post_init__(self) -> None:
        check_counts(shards=self.shards)


@dataclass(frozen=True, kw_only=True)
class _Header:
    format: str
    version: int
    manifest: StoreManifest
    parts: tuple[IndexedPart, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardLocations(Sequence[ShardLocation]):
    """Location of each shard of an index, made when it is asked for."""

    folders: tuple[Path, ...]
    parts: tuple[IndexedPart, ...]
    shards: ShardTable

    @cached_property
    def _begins(self) -> tuple[list[int], list[int]]:
        """First shard and first source file of each part."""
        files = [part.sources.files if part.shards else 0 for part in self.parts]
        return [0, *accumulate(part.shards for part in self.parts)], [0, *accumulate(files)]

    def __len__(self) -> int:
        return len(self.shards)

    @overload
    def __getitem__(self, number: int) -> ShardLocation: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[ShardLocation, ...]: ...
    def __getitem__(self, number: int | slice) -> ShardLocation | tuple[ShardLocation, ...]:
        if isinstance(number, slice):
            return tuple(self[i] for i in range(*number.indices(len(self))))
        number = range(len(self))[number]  # raises IndexError
        first_shards, first_files = self._begins
        i = bisect.bisect_right(first_shards, number) - 1
        part = self.parts[i]
        return ShardLocation(
            folder=self.folders[i],
            shard=self.shards[number],
            sources=part.sources,
            columns=part.columns,
            first_file=first_files[i],
        )


@dataclass(frozen=True, kw_only=True)
class JoinedIndex:
    """Content of an index: the flat manifest, and the parts with their shards as they are there."""

    manifest: StoreManifest
    parts: tuple[IndexedPart, ...]
    shards: ShardTable


def encode_joined_index(manifest: StoreManifest, parts: Sequence[StoreManifest]) -> bytes:
    """Return the bytes of the index of parts, from the flat manifest of all and the manifest of each."""
    entries = [
        IndexedPart(shards=len(part.shards), sources=replace(part.sources, listed=()), columns=part.columns)
        for part in parts
    ]
    table = ShardTable.of([shard for part in parts for shard in part.shards])
    header = {
        "format": FORMAT,
        "version": VERSION,
        "manifest": asdict(replace(manifest, shards=())),
        "parts": [asdict(entry) for entry in entries],
    }
    return json.dumps(header).encode() + b"\n" + table.encode()


def decode_joined_index(content: bytes, fingerprint: str, source: str) -> JoinedIndex:
    """Parse an index whose hash was checked.

    Args:
        content: its bytes.
        fingerprint: that of the flat manifest, as the joined manifest has it.
        source: names it in errors.

    Raises:
        DataError: not an index, or of another version.
    """
    line, _, _ = content.partition(b"\n")
    values = strict_json.load_object(line, source, _REMEDY)
    if values.get("format") != FORMAT or values.get("version") != VERSION:
        raise DataError(f"{source}: not an index of format {FORMAT!r}, version {VERSION}; update lt-data, or {_REMEDY}")
    header = strict_json.parse(_Header, values, source, _REMEDY)
    try:
        table = ShardTable.decode(memoryview(content)[len(line) + 1 :], sum(part.shards for part in header.parts))
    except DataError as exc:
        raise DataError(f"{source}: {exc}; {_REMEDY}") from exc
    flat = replace(table, numbered=True, has_columns=bool(header.manifest.columns))
    manifest = replace(header.manifest, shards=flat)
    # taken, not computed: the fingerprint alone would take a second; `verify` computes it
    vars(manifest).update(
        fingerprint=fingerprint, shard_tokens_each=table.tokens.tolist(), shard_documents=table.documents.tolist()
    )
    return JoinedIndex(manifest=manifest, parts=header.parts, shards=table)
