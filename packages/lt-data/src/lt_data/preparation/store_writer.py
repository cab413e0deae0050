"""Writer of encoded batches to shards, with a journal record after each shard to resume from.

A record holds the source position of the first batch that is not completely in finished shards (`source_position`), the
number of documents after that position that are in them already (`skip`), the counts up to that position, and the hash
of what was read of the files from that position on (`read_prefixes`). Resuming reads from that position, where other
content is an error, counts everything again from there, and writes all documents but the first `skip`. So batch sizes
may differ between the runs.

Side files: `sources`, one line per file that was read completely; if duplicates are dropped, `documents`, one record
per encoded document, and `special`, the special strings of each document that has any. A part of a job keeps them for
`merge`; a complete store does not.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from lt_data.errors import DataError
from lt_data.preparation.build_folder import START_OVER, BuildFolder, ShardRecord
from lt_data.preparation.counts import DocumentCounts, SavedCounts
from lt_data.preparation.deduplication import HASH_DTYPE
from lt_data.preparation.document_filter import DocumentFilter
from lt_data.sources.hashing_reader import HashedPrefix
from lt_data.storage import make_folder_synced, read_regular, remove_tree, translate_os_errors, write
from lt_data.store.document_metadata import DocumentMetadata
from lt_data.store.document_sources import decode_source_files, encode_source_files
from lt_data.store.manifest import EMPTY, SHARD_FOLDER, DocumentTotals, Selection, ShardFile
from lt_data.store.manifest_checks import check_counts
from lt_data.store.shards import ShardWriter
from lt_data.store.source_files import SourceFile
from lt_data.tokenizing.engine_selection import EngineChoice

_PART_REMEDY = "prepare this part again"
PART_FOLDER = "part"  # files that merge needs, in the store of a part
TOO_FEW_TOKENS = "too few tokens"
TOO_MANY_TOKENS = "too many tokens"
SOURCES, DOCUMENTS, SPECIAL_STRINGS = "sources", "documents", "special"
ENTRY_DTYPE = np.dtype([("hash", HASH_DTYPE), ("text_bytes", "<u8"), ("tokens", "<u4")])
"""Record of a document in `documents`: hash, UTF-8 bytes, and ids with BOS and EOS (0: empty)."""


def filter_by_tokens(tokens: np.ndarray, selection: Selection) -> list[tuple[str, np.ndarray]]:
    """Return disjoint masks of the documents left out by number of ids: (reason, bool [n]) from ids [n]."""
    empty = tokens == 0
    few = ~empty & (tokens < (selection.min_tokens or 0))
    many = tokens > selection.max_tokens if selection.max_tokens is not None else np.zeros(tokens.size, bool)
    return [(EMPTY, empty), (TOO_FEW_TOKENS, few), (TOO_MANY_TOKENS, many)]


def read_sources(path: Path) -> list[SourceFile]:
    """Read the files listed in a `sources` file."""
    with translate_os_errors("read", path):
        content = read_regular(path)
    return list(decode_source_files(content, str(path), _PART_REMEDY))


def remove_unrecorded(content: Path, folders: Sequence[Path], finished: Sequence[ShardFile], dtype: str) -> None:
    """Remove unrecorded files, and check that all recorded shards are there.

    Args:
        content: the folder that becomes the store.
        folders: folders in it to keep, that of the shards first.
        finished: the recorded shards.
        dtype: dtype of the ids.
    """
    known = {name for shard in finished for name in shard.hashes}
    with translate_os_errors("clear", content):
        for path in content.iterdir():
            if path not in folders:
                remove_tree(path) if path.is_dir() else path.unlink()
        for path in folders[0].iterdir():
            if path.name not in known:
                path.unlink()
    for shard in finished:
        for name, size in shard.sizes(dtype).items():
            path = folders[0] / name
            with translate_os_errors("resume after the shard", path):
                actual = path.stat().st_size
            if actual != size:
                raise DataError(f"{path}: size differs from the journal; {START_OVER}")


@dataclass(frozen=True, kw_only=True)
class _BatchRecord(ShardRecord):
    """Record of a finished shard; see the top of this file."""

    source_position: tuple[int, int]
    skip: int
    counts: SavedCounts
    engine: EngineChoice
    read_prefixes: tuple[tuple[int, int, str], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(skip=self.skip, file=self.source_position[0], record=self.source_position[1])


class StoreWriter:
    """Writer of the shards of a store in a build folder, with running totals.

    Attributes:
        counts: totals up to the end of the last written batch.
        source_position: position in the sources (file, record) after that batch.
        engine: tokenizer engine of the shards.
        read_prefixes: what the finished shards come from, by index of the file, in the files that are read again.
    """

    def __init__(
        self,
        build_folder: BuildFolder,
        *,
        shard_tokens: int,
        dtype: Literal["uint16", "uint32"],
        selection: Selection,
        special_strings: Sequence[str],
        keep_side_files: bool,
    ) -> None:
        """Start after the last record of the job.

        Args:
            build_folder: the build folder.
            shard_tokens: target number of ids of a shard.
            dtype: dtype of the ids.
            selection: document filter.
            special_strings: strings to count in the texts.
            keep_side_files: whether the side files belong to the result.
        """
        self._build_folder = build_folder
        self._selection = selection
        self._special_strings = special_strings
        records = build_folder.parse_records(_BatchRecord)
        finished = [record.shard for record in records]
        self.counts = DocumentCounts()
        self.source_position = (0, 0)
        self.read_prefixes: dict[int, HashedPrefix] = {}
        self.engine: EngineChoice | None = None
        self._skip = 0
        if records:
            last = records[-1]
            self.counts = DocumentCounts.restore(last.counts)
            self.source_position = last.source_position
            self.read_prefixes = {file: HashedPrefix(size, sha256) for file, size, sha256 in last.read_prefixes}
            self.engine = last.engine
            self._skip = last.skip
        self._skipped_here = 0
        self._shard_folder = build_folder.store_path / SHARD_FOLDER
        side_folder = build_folder.store_path / PART_FOLDER if keep_side_files else None
        self._folders = [self._shard_folder, *([side_folder] if side_folder else [])]
        with translate_os_errors("write", build_folder.store_path):
            for folder in self._folders:
                make_folder_synced(folder)
        remove_unrecorded(build_folder.store_path, self._folders, finished, dtype)
        self._sources_file = build_folder.open_side_file(SOURCES, side_folder)
        self._first_file = self._n_listed = self.source_position[0]
        self._documents_file: BinaryIO | None = None
        self._special_strings_file: BinaryIO | None = None
        if selection.drop_duplicates:
            self._documents_file = build_folder.open_side_file(DOCUMENTS, side_folder)
            if keep_side_files:
                self._special_strings_file = build_folder.open_side_file(SPECIAL_STRINGS, side_folder)
        self._writer = ShardWriter(
            self._shard_folder, shard_tokens, dtype, on_shard_closed=self._on_shard_closed, finished=finished
        )

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *error: Any) -> None:
        self._writer.__exit__(*error)

    @property
    def journal(self) -> Path:
        """Folder of the journal, for messages."""
        return self._build_folder.path

    def read_seen_hashes(self) -> np.ndarray:
        """Read the hashes of the documents up to the source position (S16)."""
        if self._documents_file is None:
            return np.zeros(0, HASH_DTYPE)
        with translate_os_errors("read", self._documents_file.name):
            return np.fromfile(self._documents_file.name, ENTRY_DTYPE)["hash"]

    def write(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        *,
        texts: Sequence[str],
        text_sizes: Sequence[int],
        special_strings: Mapping[str, int],
        source_position: tuple[int, int],
        read_prefix: HashedPrefix | None,
        document_filter: DocumentFilter,
        sources: Sequence[SourceFile],
        metadata: DocumentMetadata,
    ) -> None:
        """Write a batch.

        Args:
            tokens: concatenated ids of its documents.
            lengths: ids of each (int64).
            texts: the documents; empty if they were given as ids.
            text_sizes: UTF-8 bytes of each text.
            special_strings: counts of special strings in the texts.
            source_position: position in the sources after the batch.
            read_prefix: what was read of the file at that position.
            document_filter: filter that the documents passed.
            sources: files read completely since the job started or resumed, in order.
            metadata: sources and columns of the documents.
        """
        dropped = np.zeros(lengths.size, bool)
        left_out: list[tuple[str, np.ndarray]] = []
        for reason, mask in filter_by_tokens(lengths, self._selection):
            if mask.any():
                left_out.append((reason, np.flatnonzero(mask)))
                dropped |= mask
        if dropped.any():
            n_tokens = tokens.size
            tokens = tokens[np.repeat(~dropped, lengths)]
            assert tokens.size + int(lengths[dropped].sum()) == n_tokens
        first, last = self.source_position[0], source_position[0]
        files = sources[first - self._first_file : last - self._first_file]
        self.read_prefixes = {first + i: HashedPrefix(file.bytes, file.sha256) for i, file in enumerate(files)}
        if read_prefix is not None:
            self.read_prefixes[last] = read_prefix
        self._append(tokens, lengths[~dropped], metadata.select(~dropped) if dropped.any() else metadata)
        # Only now the counts include the batch: a shard that was closed above has recorded those before it.
        self._count_batch(lengths, texts, text_sizes, special_strings, left_out, dropped, document_filter)
        self._write_sources(sources, below=source_position[0])
        self.source_position = source_position

    def read_listed_sources(self) -> list[SourceFile]:
        """Read the list of source files that were read completely."""
        with translate_os_errors("write", self._sources_file.name):
            self._sources_file.flush()
        return read_sources(Path(self._sources_file.name))

    def side_file_hashes(self) -> dict[str, str]:
        """Return the SHA-256 (hex) of the side files, by name."""
        hashes: dict[str, str] = {}
        for side in (self._sources_file, self._documents_file, self._special_strings_file):
            if side is not None:
                with translate_os_errors("read", side.name):
                    side.flush()
                    with open(side.name, "rb") as file:
                        hashes[Path(side.name).name] = hashlib.file_digest(file, "sha256").hexdigest()
        return hashes

    def finish(self, document_filter: DocumentFilter, sources: Sequence[SourceFile]) -> tuple[ShardFile, ...]:
        """Close the last shard, count the exclusions after the last batch, and return all shards."""
        shards = self._writer.finish()
        document_filter.count_remaining(self.counts)
        self._write_sources(sources, below=None)
        kept = DocumentTotals(
            documents=sum(shard.documents for shard in shards),
            text_bytes=self.counts.text_bytes,
            tokens=sum(shard.tokens for shard in shards),
        )
        if self._skip or self.counts.read != sum(self.counts.left_out.values(), kept):
            assert self._build_folder.was_resumed, "documents or tokens were lost"
            raise DataError(f"{self._build_folder.path}: the journal does not match what was read; {START_OVER}")
        return shards

    def _append(self, tokens: np.ndarray, lengths: np.ndarray, metadata: DocumentMetadata) -> None:
        drop = min(self._skip, lengths.size)
        self._skipped_here = drop
        self._writer.append(tokens[int(lengths[:drop].sum()) :], lengths[drop:], metadata.slice(drop))
        self._skip -= drop
        self._skipped_here = 0

    def _on_shard_closed(self, shard: ShardFile, appended: int) -> None:
        record = {
            "shard": asdict(shard),
            "source_position": self.source_position,
            "skip": self._skipped_here + appended,
            "counts": self.counts.to_dict(),
            "engine": self.engine.to_dict() if self.engine else {},
            "read_prefixes": [(file, *prefix) for file, prefix in sorted(self.read_prefixes.items())],
        }
        self._build_folder.add_record(record, self._folders)

    def _count_batch(
        self,
        lengths: np.ndarray,
        texts: Sequence[str],
        text_sizes: Sequence[int],
        special_strings: Mapping[str, int],
        left_out: list[tuple[str, np.ndarray]],
        dropped: np.ndarray,
        document_filter: DocumentFilter,
    ) -> None:
        counts, text_bytes = self.counts, sum(text_sizes)
        hashes = document_filter.count_batch(lengths.size, counts)
        counts.read += DocumentTotals(documents=lengths.size, text_bytes=text_bytes, tokens=int(lengths.sum()))
        counts.text_bytes += text_bytes
        for reason, indices in left_out:
            n_bytes = sum(text_sizes[int(i)] for i in indices) if texts else 0
            counts.text_bytes -= n_bytes
            counts.add_left_out(reason, documents=indices.size, text_bytes=n_bytes, tokens=int(lengths[indices].sum()))
        if special_strings and (dropped.any() or self._special_strings_file is not None):
            self._count_special_strings_by_document(texts, dropped)
        else:
            counts.special_strings.update(special_strings)
        if self._documents_file is not None:
            entries = np.zeros(lengths.size, ENTRY_DTYPE)
            entries["hash"] = hashes
            entries["text_bytes"] = text_sizes if texts else 0
            entries["tokens"] = lengths
            self._write(self._documents_file, entries.tobytes())

    def _count_special_strings_by_document(self, texts: Sequence[str], dropped: np.ndarray) -> None:
        first = self._documents_file.tell() // ENTRY_DTYPE.itemsize if self._documents_file is not None else 0
        for i, text in enumerate(texts):
            found = {string: n for string in self._special_strings if (n := text.count(string))}
            if found and not dropped[i]:
                self.counts.special_strings.update(found)
                if self._special_strings_file is not None:
                    line = json.dumps({"document": first + i, "special": found})
                    self._write(self._special_strings_file, f"{line}\n".encode())

    def _write_sources(self, files: Sequence[SourceFile], below: int | None) -> None:
        """List the files that were read completely, up to that of the next document."""
        end = len(files) if below is None else min(len(files), below - self._first_file)
        for file in files[self._n_listed - self._first_file : end]:
            self._write(self._sources_file, encode_source_files([file]))
            self._n_listed += 1

    def _write(self, side: BinaryIO, content: bytes) -> None:
        with translate_os_errors("write", side.name):
            write(side, content)
