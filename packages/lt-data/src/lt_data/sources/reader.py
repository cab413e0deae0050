"""Reader of the documents of sources, piece by piece, with counts and hashes.

All sources are listed and checked when the reader is created, before anything is read. Each piece is hashed while it is
read. Bad input raises an error that names file and record, or (on_bad="skip") is left out and counted by reason. Errors
of the disk or network, and files that changed since the listing, are never skipped.

A damaged file is left out whole, but a checksum stands at the end of a file, when its documents have been yielded.
`read` reads each file once and raises `FoundDamageError` where the documents so far must be discarded; the next `read`
leaves out what was damaged. An iteration over a reader (with on_bad="skip") reads compressed files and tables twice.
"""

import copy
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NoReturn

from lt_data.errors import DataError
from lt_data.file_names import COMPRESSIONS, find_compression
from lt_data.sources.document import Document
from lt_data.sources.listing import SourcePiece, list_sources
from lt_data.sources.options import SKIP_REMEDY, SUFFIXES, SourceOptions
from lt_data.sources.pieces import Digest
from lt_data.sources.record import BadRecord, DamagedFileError, SourceRecord
from lt_data.store.document_sources import encode_source_files, format_source
from lt_data.store.source_files import MAX_LISTED_SOURCES, SourceFile, SourceFiles

_MAX_NAMED = 10
DAMAGED_FILE = "damaged file"
MASKED_IDS = "ids that the attention mask hides"
"""Reason in `DocumentReader.skipped` whose number is of ids."""


class FoundDamageError(DataError):
    """Error of `DocumentReader.read`: documents that it yielded are those of a damaged file; read again."""


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
        fingerprint: SHA-256 of the names and sizes of the pieces and of the options, but for `on_bad` and
            `max_document_bytes`; it changes when the sources change.
        total_bytes: size of all pieces when they were listed.
        finished_files: pieces read completely in this iteration, in order.
        skipped: number of skipped records in this iteration, by reason; under `MASKED_IDS` a number of ids.
        skip_examples: the first message of each reason in `skipped`.
        damage: pieces known to be those of damaged files, with the problem; they are left out.

    Raises:
        DataError: a source does not exist or cannot be read, or (on_bad="error") a file is damaged, its bytes are not
            UTF-8, a line is broken or has no such field; the message names the file (and the line).
    """

    def __init__(self, sources: Sequence[str | Path], options: SourceOptions | None = None) -> None:
        if isinstance(sources, str | Path):
            raise DataError(f"sources = {str(sources)[:80]!r}: a single path; pass a list of paths")
        self.options = options or SourceOptions()
        listing = list_sources([str(source) for source in sources], self.options)
        self._ignored = listing.ignored
        self._set_pieces(listing.pieces)

    def _set_pieces(self, pieces: list[SourcePiece]) -> None:
        self._pieces = pieces
        self.total_bytes = sum(piece.size or 0 for piece in pieces)
        content = json.dumps([[[piece.manifest_name, piece.size] for piece in pieces], self.options.to_dict()])
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()
        self.damage: dict[int, str] = {}
        self._reset_counts()

    def _reset_counts(self) -> None:
        self._open = 0  # piece that is being read
        self._digest: Digest | None = None  # of it
        self._records: Iterator[SourceRecord] = iter(())  # of it, that are left
        self.finished_files: list[SourceFile] = []
        self.skipped: Counter[str] = Counter()
        self.skip_examples: dict[str, str] = {}

    @property
    def n_files(self) -> int:
        """Number of pieces."""
        return len(self._pieces)

    @property
    def read_bytes(self) -> int:
        """Bytes read in this iteration."""
        return sum(file.bytes for file in self.finished_files) + (self._digest.bytes if self._digest else 0)

    @property
    def description(self) -> str:
        """Suffixes and number of files found, for messages."""
        others = f", {self.ignored_files} ignored" if self._ignored else ""
        suffixes = " ".join(self.options.suffixes)
        if self.options.suffixes == SUFFIXES:
            uncompressed = [suffix for suffix in SUFFIXES if not find_compression(suffix)]
            suffixes = f"{' '.join(uncompressed)}, text and JSON also for {' '.join(COMPRESSIONS)}"
        return f"{len(self._pieces)} files (folders are searched for {suffixes}){others}"

    @property
    def ignored_files(self) -> str:
        """Files of the folders that are not read, such as `3 files (.bin 2, .csv 1)`."""
        if not self._ignored:
            return ""
        ranked = sorted(self._ignored.items(), key=lambda item: (-item[1], item[0]))
        shown = ", ".join(f"{suffix} {count}" for suffix, count in ranked[:_MAX_NAMED])
        return f"{self._ignored.total()} files ({shown}{', ...' if len(ranked) > _MAX_NAMED else ''})"

    def notices(self) -> list[str]:
        """Return what was left out in this iteration: an example of each kind of bad input, and files not read."""
        examples = dict(self.skip_examples)
        if self.damage:
            examples[DAMAGED_FILE] = next(iter(self.damage.values()))
        lines = [f"skipped as {reason}: for example {text}" for reason, text in sorted(examples.items())]
        others = self.ignored_files
        return [*lines, f"not read: {others}; name their suffixes to read them (--suffix)"] if others else lines

    def source_files(self) -> SourceFiles:
        """Return the pieces read completely in this iteration, for the manifest."""
        return summarize_sources(self.finished_files)

    def divided(self, max_bytes: int) -> "DocumentReader":
        """Return a reader of the same documents, with large files in ranges of about `max_bytes`.

        Raises:
            DataError: a file cannot be read, or a package is missing.
        """
        reader = copy.copy(self)
        reader._set_pieces([part for piece in self._pieces for part in piece.divide(max_bytes)])
        return reader

    def group(self, max_bytes: int) -> list[tuple[int, int]]:
        """Return groups of consecutive pieces of about `max_bytes`: the first piece of each, and that after its last.

        They are balanced by bytes; a piece belongs to the group that its middle falls in, and none is empty.
        """
        # One of unknown size, such as a shard of a streamed dataset, is a group of its own.
        sizes = [max_bytes if piece.size is None else max(piece.size, 1) for piece in self._pieces]
        total = sum(sizes)
        n_groups = min(-(-total // max_bytes), len(sizes))
        ends = accumulate(sizes)
        group_of = [(2 * end - size) * n_groups // (2 * total) for end, size in zip(ends, sizes, strict=True)]
        firsts = [i for i, group in enumerate(group_of) if not i or group != group_of[i - 1]]
        return [*pairwise([*firsts, len(sizes)])]

    def slice(self, first: int, last: int, damage: Mapping[int, str] | None = None) -> "DocumentReader":
        """Return a reader of the pieces [first, last), which knows the damaged ones of all pieces."""
        reader = copy.copy(self)
        reader._set_pieces(self._pieces[first:last])
        known = damage or {}
        reader.damage = {index - first: known[index] for index in range(first, last) if index in known}
        return reader

    def pieces_of_file(self, index: int) -> range:
        """Return the pieces of the file that a piece is part of."""
        first = index
        last = index + 1
        while first and self._pieces[first].is_continuation:
            first -= 1
        while last < len(self._pieces) and self._pieces[last].is_continuation:
            last += 1
        return range(first, last)

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents in order; resets the counts. Files that may be damaged are read twice, see the module."""
        if self.options.on_bad == "skip":
            self._find_damage(0)
        yield from self.read()

    def read(self) -> Iterator[Document]:
        """Yield the documents of the files that are not known to be damaged, in order; resets the counts.

        Raises:
            FoundDamageError: see the module.
            DataError: see the class.
        """
        self._reset_counts()
        for index, piece in enumerate(self._pieces):
            self._open = index
            self._digest = digest = Digest()
            if index in self.damage:
                piece.hash(digest)
                if not piece.is_continuation:
                    self._count_skipped(DAMAGED_FILE, self.damage[index])
            else:
                with closing(piece.records(self.options, digest)) as records:
                    self._records = records
                    yield from self._make_documents()
            self.finished_files.append(
                SourceFile(
                    path=piece.manifest_name, bytes=digest.bytes, sha256=digest.sha256, unchecked=digest.unchecked
                )
            )
            self._digest = None
            self._records = iter(())

    def _make_documents(self) -> Iterator[Document]:
        """Yield the documents of the open piece."""
        piece = self._pieces[self._open]
        try:
            for record in self._records:
                document = self._make_document(record, piece.name, self._open)
                if document is not None:
                    yield document
        except DamagedFileError as exc:
            self._handle_damage(exc)

    def check_open_piece(self) -> None:
        """Read the piece that is being read to its end, to find whether damage is the cause of a problem in it.

        A piece whose damage shows where it is read is left as it is.

        Raises:
            DataError: the file is damaged (`FoundDamageError` if it can be left out).
        """
        if not self._pieces[self._open].is_checked_at_end:
            return
        try:
            for _ in self._records:
                pass
        except DamagedFileError as exc:
            self._handle_damage(exc)

    def _handle_damage(self, error: DamagedFileError) -> NoReturn:
        message = f"{self._pieces[self._open].name}: {error}"
        if self.options.on_bad == "error":
            raise DataError(message + SKIP_REMEDY) from error
        self._remember_damage(self._open, message)
        self._find_damage(self._open + 1)  # so that documents are discarded once
        raise FoundDamageError(message) from error

    def _find_damage(self, first: int) -> None:
        """Read the files from piece `first` on that may be damaged, and remember those that are."""
        for index, piece in enumerate(self._pieces):
            if index < first or index in self.damage or not piece.is_checked_at_end:
                continue
            try:
                for _ in piece.records(self.options, Digest()):
                    pass
            except DamagedFileError as exc:
                self._remember_damage(index, f"{piece.name}: {exc}")

    def _remember_damage(self, index: int, message: str) -> None:
        for piece in self.pieces_of_file(index):
            self.damage.setdefault(piece, message)

    def _make_document(self, record: SourceRecord, name: str, index: int) -> Document | None:
        value = record.value
        source = format_source(name, record.number)
        if isinstance(value, BadRecord):
            self._handle_bad(value.reason, f"{source}: {value.message}")
            return None
        if record.n_masked:
            self.skipped[MASKED_IDS] += record.n_masked
        is_text = isinstance(value, str)
        return Document(
            text=value if is_text else None,
            ids=None if is_text else value,
            source=source,
            file_index=index,
            record_number=record.number,
            fields=record.fields,
        )

    def _handle_bad(self, reason: str, message: str) -> None:
        if self.options.on_bad == "error":
            self.check_open_piece()
            raise DataError(message + SKIP_REMEDY)
        self._count_skipped(reason, message)

    def _count_skipped(self, reason: str, message: str) -> None:
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
        unchecked=dict(Counter(file.unchecked for file in files if file.unchecked)),
        listed=tuple(files) if is_listed else (),
        list_sha256="" if is_listed else hashlib.sha256(encode_source_files(files)).hexdigest(),
    )
