"""Sources and kept columns of the documents of a store, read a shard at a time.

Cost: one read of a shard's `.src` or `.arrow` file; the last few stay in memory.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lt_data.errors import DataError
from lt_data.store.document_columns import decode_columns
from lt_data.store.document_sources import (
    SOURCES_FILE,
    DocumentSource,
    decode_source,
    decode_source_files,
    decode_sources,
    shift_files,
)
from lt_data.store.joined_index import ShardLocation
from lt_data.store.manifest import MAX_MANIFEST_BYTES, read_manifest
from lt_data.store.shard_files import read_checked
from lt_data.store.source_files import SourceFile, SourceFiles

_HELD_SOURCES = 16  # shards whose document sources stay in memory
_HELD_COLUMNS = 2  # likewise kept columns


class ShardMetadata:
    """Reader of sources and kept columns.

    Args:
        locations: where each shard is.
        path_of: path of a file of a shard by its number and suffix.
        download: makes a file of the store local, by its name.
    """

    def __init__(
        self,
        locations: Sequence[ShardLocation],
        path_of: Callable[[int, str], Path],
        download: Callable[[str], None],
    ) -> None:
        self._locations = locations
        self._path_of = path_of
        self._download = download
        self._read_sources = lru_cache(maxsize=_HELD_SOURCES)(self._load_sources)
        self.columns = lru_cache(maxsize=_HELD_COLUMNS)(self._load_columns)

    @cached_property
    def files(self) -> tuple[SourceFile, ...]:
        """Source files, in the order of their index; empty if the store does not list them.

        Raises:
            DataError: their list is missing or broken.
        """
        by_part = {location.folder: location.sources for location in self._locations}
        lists = [self._load_files(folder, sources) for folder, sources in by_part.items()]
        if [len(files) for files in lists] != [sources.files for sources in by_part.values()]:
            return ()
        return tuple(file for files in lists for file in files)

    def sources(self, number: int) -> np.ndarray | None:
        """Return the source of each document of a shard (u64), if known.

        Raises:
            DataError: they cannot be read.
        """
        sources = self._read_sources(number)
        return None if sources is None else shift_files(sources, self._locations[number].first_file)

    def source(self, number: int, document: int) -> DocumentSource | None:
        """Return the source of one document of a shard, if known.

        Raises:
            DataError: they cannot be read.
        """
        sources = self._read_sources(number)
        if sources is None or not self.files:
            return None
        file, record = decode_source(int(sources[document]))
        return DocumentSource(path=self.files[self._locations[number].first_file + file].path, record=record)

    def _load_files(self, folder: Path, sources: SourceFiles) -> tuple[SourceFile, ...]:
        """Return the list of source files of a part."""
        if not sources.list_sha256:
            # an index of a joined store leaves the lists of its parts where they are
            return sources.listed if sources.listed or not sources.files else read_manifest(folder).sources.listed
        self._download(SOURCES_FILE)
        path = folder / SOURCES_FILE
        content = read_checked(path, MAX_MANIFEST_BYTES, folder)
        if hashlib.sha256(content).hexdigest() != sources.list_sha256:
            raise DataError(f"{path}: SHA-256 differs from the manifest: copy it again or prepare it again")
        files = decode_source_files(content, str(path), "copy it again or prepare it again")
        if len(files) != sources.files:
            raise DataError(f"{path}: {len(files)} files, the manifest says {sources.files}: prepare it again")
        return files

    def _load_sources(self, number: int) -> np.ndarray | None:
        location = self._locations[number]
        if not location.shard.src_sha256:
            return None
        path, documents = self._path_of(number, "src"), location.shard.documents
        content = read_checked(path, 8 * documents, location.folder)
        return decode_sources(content, documents=documents, files=location.sources.files, path=str(path))

    def _load_columns(self, number: int) -> Any:
        """Return the kept columns of the documents of a shard (pyarrow.RecordBatch); None if it has none."""
        location = self._locations[number]
        shard = location.shard
        if not shard.arrow_sha256:
            return None
        path = self._path_of(number, "arrow")
        content = read_checked(path, shard.arrow_bytes, location.folder)
        return decode_columns(content, location.columns, documents=shard.documents, path=str(path))
