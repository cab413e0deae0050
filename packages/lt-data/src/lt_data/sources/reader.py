"""Reader of the documents of sources, file by file, with counts, hashes and positions to resume from.

All sources are listed and checked when the reader is created, before anything is read. Each file is hashed while it is
read. Bad input raises an error that names file and record, or (on_bad="skip") is left out and counted by reason; then
no document is yielded before the checksum of its member, frame or page has confirmed it. Errors of the disk or network,
and files that changed since the listing or an earlier iteration, are never skipped.
"""

import copy
import hashlib
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lt_data.errors import DataError
from lt_data.sources.document import Document
from lt_data.sources.file_ranges import divide
from lt_data.sources.hashing_reader import HashedPrefix, HashingCounter
from lt_data.sources.listing import SourceListing
from lt_data.sources.options import SKIP_REMEDY, SourceOptions
from lt_data.sources.record import BadRecord, ChangedFileError, DamagedFileError, SourceRecord
from lt_data.sources.source_unit import SourceUnit
from lt_data.store.document_sources import encode_source_files, format_source
from lt_data.store.source_files import MAX_LISTED_SOURCES, SourceFile, SourceFiles

_MAX_NAMED = 10
UNCONFIRMED = "unconfirmed before damage"
"""Reason of records that are left out because the checksum that would confirm them comes after the damage."""


def read_documents(sources: Sequence[str | Path], options: SourceOptions | None = None) -> Iterator[Document]:
    """Yield the documents of sources in order, including empty ones.

    Args:
        sources: files, folders, fsspec URLs and datasets, read in the given order.
        options: read options.

    Returns:
        An iterator; the sources have been listed and checked when this function returns.

    Raises:
        DataError: see `DocumentReader`.
    """
    return iter(DocumentReader(sources, options))


class DocumentReader:
    """Iterable of the documents of sources that counts what it reads.

    Attributes:
        options: read options.
        fingerprint: SHA-256 of the names and sizes of the files and of the options, but for `on_bad` and
            `max_document_bytes`; it changes when the sources change.
        total_bytes: size of all files when they were listed.
        read_bytes: bytes read in this iteration, including the files before its start.
        finished_files: files read completely in this iteration, in order.
        skipped: number of skipped records in this iteration, by reason.
        skip_examples: the first message of each reason in `skipped`.

    Raises:
        DataError: a source does not exist or cannot be read, or (on_bad="error") a file is damaged, its bytes are not
            UTF-8, a line is broken or has no such field; the message names the file (and the line).
    """

    def __init__(self, sources: Sequence[str | Path], options: SourceOptions | None = None) -> None:
        if isinstance(sources, str | Path):
            raise DataError(f"sources = {str(sources)[:80]!r}: a single path; pass a list of paths")
        self.options = options or SourceOptions()
        self._listing = SourceListing()
        for source in sources:
            self._listing.add(str(source), self.options)
        self._listing.check_distinct()
        self._set_files(self._listing.units, part=None)

    def _set_files(self, files: list[SourceUnit], part: tuple[int, int] | None) -> None:
        self._files = files
        self.total_bytes = sum(file.size or 0 for file in files)
        listed = [[file.manifest_name, file.size] for file in files]
        content = json.dumps([listed, self.options.to_dict(), part])
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()
        self._reset_counts(0)

    def _reset_counts(self, file: int) -> None:
        self._bytes_before = sum(listed.size or 0 for listed in self._files[:file])
        self._first_file = file
        self._counter = HashingCounter()
        self.finished_files: list[SourceFile] = []
        self.skipped: Counter[str] = Counter()
        self.skip_examples: dict[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs to read the same documents from the beginning."""
        return {name: value for name, value in vars(self).items() if name != "_counter"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset_counts(0)

    @property
    def n_files(self) -> int:
        """Number of listed files."""
        return len(self._files)

    @property
    def read_bytes(self) -> int:
        """Bytes read in this iteration, including the files before its start."""
        return self._bytes_before + self._counter.bytes

    @property
    def description(self) -> str:
        """Suffixes and number of files found, for messages."""
        listing = self._listing
        links = f", {listing.skipped_links} symbolic links not followed" if listing.skipped_links else ""
        others = f", {self.ignored_files} ignored" if listing.ignored_files else ""
        return f"{len(self._files)} files (folders are searched for {' '.join(self.options.suffixes)}){links}{others}"

    @property
    def ignored_files(self) -> str:
        """Files of the folders with other suffixes, such as `3 files (.bin 2, .json 1)`."""
        others = self._listing.ignored_files
        if not others:
            return ""
        ranked = sorted(others.items(), key=lambda item: (-item[1], item[0]))
        shown = ", ".join(f"{suffix} {count}" for suffix, count in ranked[:_MAX_NAMED])
        return f"{others.total()} files ({shown}{', ...' if len(ranked) > _MAX_NAMED else ''})"

    def notices(self) -> list[str]:
        """Return what was left out in this iteration: an example of each kind of bad input, and files not read."""
        lines = [
            f"skipped as {reason}: for example {example}" for reason, example in sorted(self.skip_examples.items())
        ]
        lines += [f"skipped {message}" for message in self._listing.unreadable_files[:_MAX_NAMED]]
        others = self.ignored_files
        return [*lines, f"not read: {others}; name their suffixes to read them (--suffix)"] if others else lines

    def source_files(self) -> SourceFiles:
        """Return the files read completely in this iteration, for the manifest."""
        return summarize_sources(self.finished_files, skipped_links=self._listing.skipped_links)

    def divided(self, max_bytes: int) -> "DocumentReader":
        """Return a reader of the same documents, with large files in ranges (lt_data.sources.file_ranges).

        Args:
            max_bytes: bytes of a range, about.

        Raises:
            DataError: a file cannot be read, or a package is missing.
        """
        reader = copy.copy(self)
        reader._set_files([unit for file in self._files for unit in divide(file, max_bytes)], part=None)
        return reader

    def part(self, part_index: int, num_parts: int) -> "DocumentReader":
        """Return a reader of one of `num_parts` parts: consecutive whole files, balanced by bytes.

        The concatenated parts are the whole, in order. With fewer files than parts, some parts are empty.

        Raises:
            DataError: `part_index` is not one of 0 to `num_parts` - 1.
        """
        if num_parts < 1 or not 0 <= part_index < num_parts:
            raise DataError(
                f"part_index = {part_index}, num_parts = {num_parts}: give a part_index from 0 to num_parts - 1"
            )
        reader = copy.copy(self)
        first, last = _part_boundaries(self._files, part_index, num_parts)
        reader._set_files(self._files[first:last], part=(part_index, num_parts))
        return reader

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents in order; resets the counts."""
        return self.documents_from(0, 0)

    def hashed_prefix(self, file: int) -> HashedPrefix:
        """Return what was read of a file so far in this iteration: all documents of it that were yielded."""
        finished = file - self._first_file
        if finished < len(self.finished_files):
            return HashedPrefix(self.finished_files[finished].bytes, self.finished_files[finished].sha256)
        assert finished == len(self.finished_files)
        return self._counter.prefix

    def documents_from(
        self, file: int, record: int, expected: Mapping[int, HashedPrefix] | None = None
    ) -> Iterator[Document]:
        """Yield the documents from a position on, such as `file_index` and `next_record` of a document.

        The first file is read from its beginning, so that its hash is that of the whole file, but records before the
        position are neither parsed nor yielded. `finished_files`, `skipped` and `read_bytes` are of this iteration.

        Args:
            file: index of the file.
            record: index of the record.
            expected: what an earlier iteration read, by file; other content raises an error.

        Raises:
            DataError: there is no such file.
        """
        if not 0 <= file <= len(self._files) or record < 0:
            raise DataError(f"file = {file}, record = {record}: the sources have {len(self._files)} files")
        self._reset_counts(file)
        for index in range(file, len(self._files)):
            yield from self._read_file(index, record if index == file else 0, (expected or {}).get(index))

    def _read_file(self, index: int, start: int, expected: HashedPrefix | None) -> Iterator[Document]:
        listed = self._files[index]
        self._counter = counter = HashingCounter(expected)
        with self._handle_damage(listed.name):
            for record in listed.records(self.options, start, counter):
                document = self._make_document(record, listed.name, index)
                if document is not None:
                    yield document
        with self._handle_damage(listed.name):
            counter.finish()
        self.finished_files.append(
            SourceFile(
                path=listed.manifest_name, bytes=counter.bytes, sha256=counter.sha256, unchecked=counter.unchecked
            )
        )
        self._bytes_before += counter.bytes
        self._counter = HashingCounter()

    def _make_document(self, record: SourceRecord, name: str, index: int) -> Document | None:
        value = record.value
        source = format_source(name, record.number)
        if isinstance(value, BadRecord):
            self._handle_bad(value.reason, f"{source}: {value.message}")
            return None
        if record.n_masked:
            self.skipped["ids that the attention mask hides"] += record.n_masked
        is_text = isinstance(value, str)
        return Document(
            text=value if is_text else None,
            ids=None if is_text else value,
            source=source,
            file_index=index,
            record_number=record.number,
            next_record=record.next_index,
            fields=record.fields,
        )

    @contextmanager
    def _handle_damage(self, name: str) -> Iterator[None]:
        try:
            yield
        except ChangedFileError as exc:
            raise DataError(f"{name}: {exc}") from exc
        except DamagedFileError as exc:
            self._handle_bad("damaged file", f"{name}: {exc}")
            if exc.lost_records:
                self.skipped[UNCONFIRMED] += exc.lost_records
                self.skip_examples.setdefault(
                    UNCONFIRMED, f"{name}: {exc.lost_records} records, whose checksum comes after the damage"
                )

    def _handle_bad(self, reason: str, message: str) -> None:
        if self.options.on_bad == "error":
            raise DataError(message + SKIP_REMEDY)
        self.skipped[reason] += 1
        self.skip_examples.setdefault(reason, message)


def summarize_sources(files: Sequence[SourceFile], *, skipped_links: int = 0) -> SourceFiles:
    """Return the manifest's entry of files that were read, in order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.sha256} {file.bytes} {file.path}\n".encode("utf-8", "surrogateescape"))
    is_listed = len(files) <= MAX_LISTED_SOURCES
    return SourceFiles(
        files=len(files),
        bytes=sum(file.bytes for file in files),
        sha256=digest.hexdigest(),
        skipped_links=skipped_links,
        listed=tuple(files) if is_listed else (),
        list_sha256="" if is_listed else hashlib.sha256(encode_source_files(files)).hexdigest(),
        unchecked=dict(sorted(Counter(file.unchecked for file in files if file.unchecked).items())),
    )


def _part_boundaries(files: Sequence[SourceUnit], part_index: int, num_parts: int) -> tuple[int, int]:
    """Return the first file of a part and of the next; a file belongs to the part of its middle byte."""
    total = sum(file.size or 0 for file in files)
    parts: list[int] = []
    before = 0
    for index, file in enumerate(files):
        size = file.size or 0
        middle, end = (2 * before + size, 2 * total) if total else (index, len(files))
        parts.append(min(num_parts - 1, middle * num_parts // end))
        before += size
    return bisect_left(parts, part_index), bisect_left(parts, part_index + 1)
