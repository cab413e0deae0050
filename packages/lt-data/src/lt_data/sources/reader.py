"""The documents of some sources, one file after the other, with counts, hashes and a point to go on from.

All sources are listed and checked when the reader is made, before anything is read. Each file is read once and hashed
on the way. What cannot be used is an error that names file and record, or (on_bad="skip") is left out and counted by
its reason. An error of the disk or of the network is never skipped, nor a file whose size changed since it was listed.
"""

import copy
import hashlib
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lt_data.errors import DataError
from lt_data.sources.bytes_in import Tally
from lt_data.sources.document import Document
from lt_data.sources.listing import Listing
from lt_data.sources.options import OnBad, ReadOptions
from lt_data.sources.record import Bad, Damaged, Record
from lt_data.sources.unit import Unit
from lt_data.store.manifest import LISTED_SOURCES, SourceFile, Sources


def read_documents(
    sources: Sequence[str | Path],
    *,
    suffixes: Sequence[str] | None = None,
    text_field: str = "text",
    tokens_field: str | None = None,
    on_bad: OnBad = "error",
    config: str | None = None,
    split: str | None = None,
    revision: str | None = None,
    streaming: bool = False,
) -> Iterator[Document]:
    """Yield the documents of some sources in order, empty ones too.

    Args:
        sources: files, folders, fsspec URLs and datasets, read in the order given.
        suffixes: which files of a folder are taken; a file that is named itself is always taken.
        text_field: the field or column that holds the text.
        tokens_field: the field or column that holds ready-made ids; given, `text_field` is not looked at.
        on_bad: "error" stops at what cannot be used, "skip" leaves it out; to learn how much, use a `DocumentReader`.
        config: configuration of a dataset of the hub.
        split: split of a dataset, such as `train[:10%]`.
        revision: commit, branch or tag of a dataset of the hub.
        streaming: read a dataset of the hub as it comes, without keeping it on the disk.

    Returns:
        An iterator; the sources have been listed and checked when this function returns.

    Raises:
        DataError: see `DocumentReader`.
    """
    reader = DocumentReader(
        sources,
        suffixes=suffixes,
        text_field=text_field,
        tokens_field=tokens_field,
        on_bad=on_bad,
        config=config,
        split=split,
        revision=revision,
        streaming=streaming,
    )
    return iter(reader)


class DocumentReader:
    """The documents of some sources as an iterable that keeps count of what it read.

    Attributes:
        options: how the sources are read.
        fingerprint: SHA-256 of the names and sizes of the files and of the options: another one means that the sources
            are not the same any more.
        total_bytes: size of all files when they were listed.
        read_bytes: bytes read so far in this walk, with those of the files before its start.
        finished: the files read to their end in this walk, in order.
        skipped: what was left out in this walk by policy, by reason.
        examples: the first message of each reason in `skipped`.

    Raises:
        DataError: a source does not exist or cannot be read, or (on_bad="error") a file is damaged, its bytes are not
            UTF-8, a line is broken or has no such field; the file (and the line) is named.
    """

    def __init__(
        self,
        sources: Sequence[str | Path],
        *,
        suffixes: Sequence[str] | None = None,
        text_field: str = "text",
        tokens_field: str | None = None,
        on_bad: OnBad = "error",
        config: str | None = None,
        split: str | None = None,
        revision: str | None = None,
        streaming: bool = False,
    ) -> None:
        if isinstance(sources, str | Path):
            raise DataError(f"sources={str(sources)!r} is one path: pass a list of paths")
        chosen = {} if suffixes is None else {"suffixes": suffixes}
        self.options = ReadOptions(
            text_field=text_field,
            tokens_field=tokens_field,
            on_bad=on_bad,
            config=config,
            split=split,
            revision=revision,
            streaming=streaming,
            **chosen,
        )
        self._listing = Listing()
        for source in sources:
            self._listing.add(str(source), self.options)
        self._take(self._listing.units, part=None)

    def _take(self, files: list[Unit], part: tuple[int, int] | None) -> None:
        self._files = files
        self.total_bytes = sum(file.size or 0 for file in files)
        listed = [[file.recorded, file.size] for file in files]
        content = json.dumps([listed, self.options.to_json(), part])
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()
        self._begin(0)

    def _begin(self, file: int) -> None:
        self._before = sum(listed.size or 0 for listed in self._files[:file])
        self._tally = Tally()
        self.finished: list[SourceFile] = []
        self.skipped: Counter[str] = Counter()
        self.examples: dict[str, str] = {}

    @property
    def n_files(self) -> int:
        """Files that were listed."""
        return len(self._files)

    @property
    def read_bytes(self) -> int:
        """Bytes read so far in this walk, with those of the files before its start."""
        return self._before + self._tally.bytes

    @property
    def description(self) -> str:
        """What was looked for and found, for the message about an empty corpus."""
        listing = self._listing
        links = f", {listing.skipped_links} symbolic links not followed" if listing.skipped_links else ""
        others = f", {self.other_files} not asked for" if listing.other_files else ""
        return f"{len(self._files)} files (folders are searched for {' '.join(self.options.suffixes)}){links}{others}"

    @property
    def other_files(self) -> str:
        """Files of the folders that were not taken because of their ending, such as `3 files (.bin 2, .json 1)`."""
        others = self._listing.other_files
        if not others:
            return ""
        ranked = sorted(others.items(), key=lambda item: (-item[1], item[0]))
        most = ", ".join(f"{suffix} {count}" for suffix, count in ranked[:5])
        return f"{others.total()} files ({most}{', ...' if len(ranked) > 5 else ''})"

    def sources(self) -> Sources:
        """What has been read to its end in this walk, for the manifest."""
        return sources_of(self.finished, skipped_links=self._listing.skipped_links)

    def part(self, rank: int, world: int) -> "DocumentReader":
        """The reader of one of `world` parts: a run of whole files, balanced by their bytes.

        The parts in the order of their ranks are the whole in its order. With fewer files than parts, some are empty.

        Raises:
            DataError: `rank` is not one of 0 to `world` - 1.
        """
        if world < 1 or not 0 <= rank < world:
            raise DataError(f"rank={rank}, world={world}: the rank is one of 0 to world - 1")
        found = copy.copy(self)
        found._take(self._files[slice(*_borders(self._files, rank, world))], part=(rank, world))
        return found

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents in order; the counts begin again with each walk."""
        return self.documents_from(0, 0)

    def documents_from(self, file: int, record: int) -> Iterator[Document]:
        """Yield the documents from a point on, such as the `file` and `record` of the last one that was used.

        The started file is read from its beginning, so that its hash is that of the whole file; what stands before the
        point is neither parsed nor yielded. `finished`, `skipped` and `read_bytes` are those of this walk.

        Raises:
            DataError: there is no such file.
        """
        if not 0 <= file <= len(self._files) or record < 0:
            raise DataError(f"file={file}, record={record}: the sources hold {len(self._files)} files")
        self._begin(file)
        for index in range(file, len(self._files)):
            yield from self._documents(index, record if index == file else 0)

    def _documents(self, index: int, start: int) -> Iterator[Document]:
        listed = self._files[index]
        self._tally = tally = Tally()
        with self._damages(listed.name):
            for record in listed.records(self.options, start, tally):
                document = self._document(record, listed.name, index)
                if document is not None:
                    yield document
        self.finished.append(SourceFile(path=listed.recorded, bytes=tally.bytes, sha256=tally.sha256))
        self._before += tally.bytes
        self._tally = Tally()

    def _document(self, record: Record, name: str, index: int) -> Document | None:
        value = record.value
        source = f"{name}{record.place}"
        if isinstance(value, Bad):
            self._refuse(value.reason, f"{source}: {value.message}")
            return None
        if record.masked:
            self.skipped["ids that the attention mask hides"] += record.masked
        if isinstance(value, str):
            return Document(text=value, source=source, file=index, record=record.following)
        return Document(ids=value, source=source, file=index, record=record.following)

    @contextmanager
    def _damages(self, name: str) -> Iterator[None]:
        try:
            yield
        except Damaged as exc:
            self._refuse("damaged file", f"{name}: {exc}")

    def _refuse(self, reason: str, message: str) -> None:
        if self.options.on_bad == "error":
            raise DataError(message)
        self.skipped[reason] += 1
        self.examples.setdefault(reason, message)


def sources_of(files: Sequence[SourceFile], *, skipped_links: int = 0) -> Sources:
    """What a manifest says of files that were read, in their order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.sha256} {file.bytes} {file.path}\n".encode("utf-8", "surrogateescape"))
    return Sources(
        files=len(files),
        bytes=sum(file.bytes for file in files),
        sha256=digest.hexdigest(),
        skipped_links=skipped_links,
        listed=tuple(files) if len(files) <= LISTED_SOURCES else (),
    )


def _borders(files: Sequence[Unit], rank: int, world: int) -> tuple[int, int]:
    """First file of the rank and of the next one: a file belongs to the part in which its middle byte lies."""
    total = sum(file.size or 0 for file in files)
    ranks: list[int] = []
    before = 0
    for index, file in enumerate(files):
        size = file.size or 0
        middle, whole = (2 * before + size, 2 * total) if total else (index, len(files))
        ranks.append(min(world - 1, middle * world // whole))
        before += size
    return bisect_left(ranks, rank), bisect_left(ranks, rank + 1)
