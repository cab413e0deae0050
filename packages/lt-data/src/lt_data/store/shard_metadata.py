"""Sources and kept columns of the documents of a store, read a shard at a time.

Cost: one read of a shard's `.src` or `.arrow` file; the last few stay in memory.
"""

import hashlib
from collections.abc import Callable
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from lt_data.errors import DataError
from lt_data.storage import read_file, translate_os_errors
from lt_data.store.document_columns import decode_columns
from lt_data.store.document_sources import (
    SOURCES_FILE,
    DocumentSource,
    decode_source,
    decode_source_files,
    decode_sources,
)
from lt_data.store.manifest import MAX_MANIFEST_BYTES, StoreManifest, StorePart
from lt_data.store.source_files import SourceFile

_HELD_SOURCES = 16  # shards whose document sources stay in memory
_HELD_COLUMNS = 2  # likewise kept columns
_REMEDY = "copy it again or prepare it again"


class ShardMetadata:
    """Reader of sources and kept columns.

    Args:
        manifest: manifest of the store.
        path_of: local path of a file of the store by its name.
    """

    def __init__(self, manifest: StoreManifest, path_of: Callable[[str], Path]) -> None:
        self._manifest = manifest
        self._path_of = path_of
        self._first_files = [0, *accumulate(part.sources.files for part in manifest.parts)]
        self.sources = lru_cache(maxsize=_HELD_SOURCES)(self._read_sources)
        self.columns = lru_cache(maxsize=_HELD_COLUMNS)(self._read_columns)

    @cached_property
    def files(self) -> tuple[SourceFile, ...]:
        """Source files of all parts, in the order of their index; empty if one does not list them.

        Raises:
            DataError: their list is missing or broken.
        """
        lists = [self._read_files(part) for part in self._manifest.parts]
        files = tuple(file for files in lists for file in files)
        return files if len(files) == self._first_files[-1] else ()

    def first_file(self, number: int) -> int:
        """Return the index of the first source file of the part of a shard."""
        return self._first_files[self._manifest.part_of_shard[number]]

    def source(self, number: int, document: int) -> DocumentSource | None:
        """Return the source of one document in the files of a shard, if known.

        Raises:
            DataError: they cannot be read.
        """
        sources = self.sources(number)
        if sources is None or not self.files:
            return None
        file, record = decode_source(int(sources[document]))
        return DocumentSource(path=self.files[self.first_file(number) + file].path, record=record)

    def _read_files(self, part: StorePart) -> tuple[SourceFile, ...]:
        """Return the list of source files of a part."""
        if not part.sources.list_sha256:
            return part.sources.listed
        path = self._path_of(part.file(SOURCES_FILE))
        with translate_os_errors("read", path):
            content = read_file(path, max_bytes=MAX_MANIFEST_BYTES)
        if hashlib.sha256(content).hexdigest() != part.sources.list_sha256:
            raise DataError(f"{path}: SHA-256 differs from the manifest; {_REMEDY}")
        return decode_source_files(content, str(path), _REMEDY)

    def _read_sources(self, number: int) -> np.ndarray | None:
        """Return the source of each document in the files of a shard (u64), by the index of the file in its part."""
        shard = self._manifest.shards[number]
        if not shard.src_sha256:
            return None
        path = self._path_of(self._manifest.shard_file(number, "src"))
        with translate_os_errors("read", path):
            content = read_file(path, max_bytes=8 * shard.documents)
        part = self._manifest.parts[self._manifest.part_of_shard[number]]
        return decode_sources(content, documents=shard.documents, files=part.sources.files, path=str(path))

    def _read_columns(self, number: int) -> Any:
        """Return the kept columns of the documents in the files of a shard (pyarrow.RecordBatch); None for none."""
        shard = self._manifest.shards[number]
        if not shard.arrow_sha256:
            return None
        path = self._path_of(self._manifest.shard_file(number, "arrow"))
        with translate_os_errors("read", path):
            content = read_file(path, max_bytes=shard.arrow_bytes)
        return decode_columns(content, self._manifest.columns, documents=shard.documents, path=str(path))
