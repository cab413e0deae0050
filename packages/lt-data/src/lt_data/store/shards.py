"""Shard writer: ids, document lengths and metadata to files `.bin`, `.idx`, `.src` and `.arrow`.

Documents are appended whole and in order; a shard is closed before the document that would exceed its size. Bytes are
hashed as they are written, and each file is synced when it is closed. Memory: 16 bytes per document of the open shard,
and its columns.
"""

import hashlib
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal

import numpy as np

from lt_data.errors import DataError
from lt_data.storage import create_file, fsync, translate_os_errors, write, write_file
from lt_data.store.document_columns import encode_columns
from lt_data.store.document_metadata import DocumentMetadata
from lt_data.store.document_sources import SOURCE_DTYPE
from lt_data.store.manifest import ShardFile
from lt_data.store.megatron import encode_index


class ShardWriter:
    """Writer of shards in a folder; as a context manager it closes the open file."""

    def __init__(
        self,
        folder: Path,
        shard_tokens: int,
        dtype: Literal["uint16", "uint32"],
    ) -> None:
        """Start without a shard.

        Args:
            folder: folder of the files.
            shard_tokens: target number of ids of a shard; a longer document has its own shard.
            dtype: dtype of the ids.
        """
        self._folder = folder
        self._shard_tokens = shard_tokens
        self._dtype: Literal["uint16", "uint32"] = dtype
        self._shards: list[ShardFile] = []
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._lengths: list[np.ndarray] = []
        self._metadata: list[DocumentMetadata] = []
        self._tokens = 0

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:  # after an error: closing may fail too, the first error counts
            with suppress(OSError):
                self._file.close()

    def append(self, tokens: np.ndarray, lengths: np.ndarray, metadata: DocumentMetadata | None = None) -> None:
        """Append documents.

        Args:
            tokens: their concatenated ids, in the dtype of the store.
            lengths: ids of each (int64), all positive.
            metadata: their sources and columns, in all calls the same ones; None for neither.

        Raises:
            DataError: a file system error, or a document has 2^31 tokens or more.
        """
        if lengths.size and int(lengths.max()) >= 2**31:
            raise DataError(f"a document of {int(lengths.max())} tokens: an index holds at most 2147483647; split it")
        ends = np.cumsum(lengths)
        assert tokens.size == (int(ends[-1]) if ends.size else 0)
        first = 0  # document
        begin = 0  # token
        while first < lengths.size:
            last = int(np.searchsorted(ends, begin + self._shard_tokens - self._tokens, side="right"))
            if last <= first and self._tokens:
                self._close()
                continue
            last = max(last, first + 1)  # a document longer than a shard has its own
            end = int(ends[last - 1])
            self._write(tokens[begin:end], lengths[first:last])
            if metadata is not None:
                self._metadata.append(metadata.slice(first, last))
            first, begin = last, end

    def finish(self) -> tuple[ShardFile, ...]:
        """Close the last shard and return all shards."""
        self._close()
        return tuple(self._shards)

    @property
    def _path(self) -> Path:
        return self._folder / f"{len(self._shards):05d}.bin"

    def _write(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        with translate_os_errors("write", self._path):
            if self._file is None:
                self._file = create_file(self._path)
            content = np.ascontiguousarray(tokens).view(np.uint8).data
            write(self._file, content)
        self._digest.update(content)
        self._lengths.append(lengths)
        self._tokens += tokens.size

    def _close(self) -> None:
        if self._file is None:
            return
        with translate_os_errors("write", self._path):
            self._file.flush()
            fsync(self._file.fileno())
            self._file.close()
        lengths = np.concatenate(self._lengths)
        index = encode_index(lengths, self._dtype)
        write_file(self._path.with_suffix(".idx"), index)
        src_sha256 = arrow_sha256 = ""
        arrow_bytes = 0
        if parts := [each.sources for each in self._metadata if each.sources is not None]:
            sources = np.concatenate(parts)
            assert (sources.dtype, sources.size) == (SOURCE_DTYPE, lengths.size)
            write_file(self._path.with_suffix(".src"), sources.tobytes())
            src_sha256 = hashlib.sha256(sources.tobytes()).hexdigest()
        if batches := [each.columns for each in self._metadata if each.columns is not None]:
            content = encode_columns(batches)
            assert sum(batch.num_rows for batch in batches) == lengths.size
            write_file(self._path.with_suffix(".arrow"), content)
            arrow_sha256, arrow_bytes = hashlib.sha256(content).hexdigest(), content.nbytes
        shard = ShardFile(
            name=self._path.stem,
            tokens=self._tokens,
            documents=lengths.size,
            sha256=self._digest.hexdigest(),
            idx_sha256=hashlib.sha256(index).hexdigest(),
            src_sha256=src_sha256,
            arrow_sha256=arrow_sha256,
            arrow_bytes=arrow_bytes,
        )
        self._shards.append(shard)
        self._file = None
        self._digest = hashlib.sha256()
        self._lengths, self._metadata = [], []
        self._tokens = 0
