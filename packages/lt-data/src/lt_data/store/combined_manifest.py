"""Manifest of several stores together: that of a flat store with the shards of all.

Cost: one pass over the shard entries.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from lt_data.errors import DataError
from lt_data.store.document_sources import MAX_SOURCE_FILES
from lt_data.store.manifest import ColumnInfo, DocumentTotals, ShardFile, StoreManifest
from lt_data.store.source_files import MAX_LISTED_SOURCES, SourceFiles

SHARED_FIELDS = ("bos", "eos", "dtype", "special_tokens_as", "selection", "map", "shard_tokens")
"""Manifest fields that parts share, besides the tokenizer."""
_CHECKED_BYTES = "checked_bytes"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class LoadedPart:
    """Part that was read: its folder, manifest, SHA-256 of the manifest's file, and recorded path."""

    folder: Path
    manifest: StoreManifest
    sha256: str
    path: str = "."


def combine_manifests(parts: Sequence[LoadedPart]) -> StoreManifest:
    """Return the manifest of a flat store with the shards of the parts.

    Raises:
        DataError: parts have another tokenizer or other options than the first; the message names them.
    """
    first = parts[0].manifest
    for part in parts:
        pairs = [
            ("tokenizer", first.tokenizer.sha256, part.manifest.tokenizer.sha256),
            *((name, getattr(first, name), getattr(part.manifest, name)) for name in SHARED_FIELDS),
        ]
        if different := [f"{name} ({a} and {b})" for name, a, b in pairs if a != b]:
            raise DataError(
                f"{part.folder} cannot be joined to {parts[0].folder}: {'; '.join(different)}; prepare both alike, or "
                "use them as a mixture"
            )
    manifests = [part.manifest for part in parts]
    shards = [shard for manifest in manifests for shard in manifest.shards]
    if (files := sum(manifest.sources.files for manifest in manifests)) > MAX_SOURCE_FILES:
        raise DataError(f"{files} source files: a joined store has at most {MAX_SOURCE_FILES}; use them as a mixture")
    columns = _combine_columns([manifest.columns for manifest in manifests])
    has_text = all(manifest.text_bytes or not manifest.documents for manifest in manifests)

    def total(amounts: Iterable[DocumentTotals]) -> DocumentTotals:
        amount = sum(amounts, DocumentTotals())
        return amount if has_text else replace(amount, text_bytes=0)

    left_out = [manifest.left_out for manifest in manifests]
    return replace(
        first,
        shards=tuple(_renumbered(shard, number, bool(columns)) for number, shard in enumerate(shards)),
        text_bytes=sum(manifest.text_bytes for manifest in manifests) if has_text else 0,
        read=total(manifest.read for manifest in manifests),
        left_out=_by_key(left_out, total),
        skipped=_by_key([manifest.skipped for manifest in manifests], sum),
        special_strings=_by_key([manifest.special_strings for manifest in manifests], sum),
        # equal documents in different parts were not compared
        selection=first.selection if len(parts) == 1 else replace(first.selection, drop_duplicates=False),
        engine=merge_engines(manifests),
        columns=columns,
        sources=_combine_sources([manifest.sources for manifest in manifests]),
        merged_from=first.merged_from if len(parts) == 1 else 1,
        split=first.split if len(parts) == 1 else None,
        part=None,
    )


def merge_engines(manifests: Sequence[StoreManifest]) -> dict[str, Any]:
    """Return the engine entry: that of all parts with summed checked bytes, or a list if they differ."""
    if not (engines := [dict(manifest.engine) for manifest in manifests if manifest.engine]):
        return {}
    checked = sum(engine.get(_CHECKED_BYTES, 0) for engine in engines)
    distinct: list[dict[str, Any]] = []
    for engine in engines:
        if all(engine | {_CHECKED_BYTES: 0} != other | {_CHECKED_BYTES: 0} for other in distinct):
            distinct.append(engine)
    return distinct[0] | {_CHECKED_BYTES: checked} if len(distinct) == 1 else {"parts": distinct}


def _renumbered(shard: ShardFile, number: int, has_columns: bool) -> ShardFile:
    # a flat store would have other source files: `src_sha256` of the part is in its location
    shard = replace(shard, name=f"{number:05d}", src_sha256="")
    return shard if has_columns else replace(shard, arrow_sha256="", arrow_bytes=0)


def _combine_columns(columns: Sequence[tuple[ColumnInfo, ...]]) -> tuple[ColumnInfo, ...]:
    """Return the columns of all parts together; none if parts have others than the first."""
    if len({tuple((column.name, column.type) for column in each) for each in columns}) > 1:
        return ()
    return tuple(replace(same[0], nulls=sum(column.nulls for column in same)) for same in zip(*columns, strict=True))


def _by_key(mappings: Sequence[Mapping[str, T]], total: Callable[[Iterable[T]], T]) -> dict[str, T]:
    keys = sorted({key for mapping in mappings for key in mapping})
    return {key: total(mapping[key] for mapping in mappings if key in mapping) for key in keys}


def _combine_sources(sources: Sequence[SourceFiles]) -> SourceFiles:
    if len(sources) == 1:
        return replace(sources[0], list_sha256="")
    listed = [file for entry in sources for file in entry.listed]
    files = sum(entry.files for entry in sources)
    return SourceFiles(
        files=files,
        bytes=sum(entry.bytes for entry in sources),
        sha256=hashlib.sha256("".join(f"{entry.sha256}\n" for entry in sources).encode()).hexdigest(),
        skipped_links=sum(entry.skipped_links for entry in sources),
        listed=tuple(listed) if len(listed) == files <= MAX_LISTED_SOURCES else (),
        unchecked=_by_key([entry.unchecked for entry in sources], sum),
    )
