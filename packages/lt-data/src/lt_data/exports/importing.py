"""Ids that another program prepared, as a token store: the way back from every format of `export`.

Documents keep their borders where the format has them: a sequence of Megatron, a sample of hf, smp and mds. Litespark
and LITPKDS have none, so `borders` says where documents begin. Padding that the format marks (an attention_mask, our
own note) or that is named (`pad_id`) is left out and counted. Each id is checked against the tokenizer named, which is
the one thing no format tells of itself. The store is written by `prepare_documents`: complete or not at all.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np

from lt_data.errors import DataError
from lt_data.exports import hf, litespark, litpkds, mds, megatron, smp
from lt_data.exports.blocks import Borders, Chunk, Cut, documents
from lt_data.exports.note import FILE_NAME, Note, read_note
from lt_data.exports.options import FORMATS, Format
from lt_data.preparing.preparation import SHARD_TOKENS, prepare_documents
from lt_data.progress import Progress, silent
from lt_data.sources.document import Document
from lt_data.store.manifest import Manifest
from lt_data.tokenizing.tokenizer import Tokenizer

_FIELDS: dict[Format, str] = {"hf": "input_ids", "smp": "input_ids", "mds": "tokens"}
_READ_SAMPLES: dict[Format, Callable[[Path, str], Iterator[tuple[np.ndarray, int, str]]]] = {
    "hf": hf.read,
    "smp": smp.read,
    "mds": mds.read,
}
_BLOCKS = ("litespark", "litpkds")


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """What is read, and how.

    Attributes:
        format: the format.
        borders: litespark, litpkds: a document begins at each `bos`, after each `eos`, at each of the `rows`, or at
            each of the `files`.
        seq_len: for `rows`: their length less one. None: as Litespark's metadata.json or our own note says.
        field: hf, smp, mds: the column of the ids. None: `input_ids`, of mds `tokens`.
        token_bytes: litespark: bytes of a token. None: as metadata.json says.
        pad_id: litespark, litpkds: a run of this id at the end of a file is padding. Where it is the EOS, one of the
            run is kept.
        bos: whether each document shall begin with the BOS id; it is added where it is not there. None: as our own note
            says, else no.
        eos: likewise for the end and EOS.

    Raises:
        DataError: unknown value, or options that do not go together.
    """

    format: Format
    borders: Borders | None = None
    seq_len: int | None = None
    field: str | None = None
    token_bytes: int | None = None
    pad_id: int | None = None
    bos: bool | None = None
    eos: bool | None = None

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise DataError(f"format={self.format!r}: one of {', '.join(FORMATS)}")
        if self.borders is not None and self.borders not in get_args(Borders):
            raise DataError(f"borders={self.borders!r}: one of {', '.join(get_args(Borders))}")
        blocks = self.format in _BLOCKS
        if blocks and self.borders is None:
            raise DataError(
                f"format={self.format} joined its documents: say with borders (--borders) where one begins: bos, eos, "
                "rows or files"
            )
        allowed = {
            "borders": blocks,
            "pad_id": blocks,
            "seq_len": self.borders == "rows",
            "field": self.format in _FIELDS,
            "token_bytes": self.format == "litespark",
        }
        for name, fits in allowed.items():
            if not fits and (value := getattr(self, name)) is not None:
                raise DataError(f"{name}={value!r}: says nothing about format={self.format} read so; leave it out")
        if self.seq_len is not None and self.seq_len < 1:
            raise DataError(f"seq_len={self.seq_len}: at least 1")


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """What an import made: the manifest of the store, and the positions that were padding and are not in it."""

    manifest: Manifest
    padding: int


def import_tokens(
    path: str | Path,
    *,
    options: ImportOptions,
    tokenizer: Tokenizer | str | Path,
    out: str | Path,
    shard_tokens: int = SHARD_TOKENS,
    overwrite: bool = False,
    progress: Progress = silent,
) -> ImportReport:
    """Make a token store of ids that another program prepared.

    Args:
        path: the folder or file, see the module of each format.
        options: the format, and how it is read.
        tokenizer: the one that made the ids, or where it is: a folder, a model of the hub, a URL (`Tokenizer.load`).
        out: folder of the store. It appears when all is done.
        shard_tokens: about how many ids go into one shard.
        overwrite: replace `out` if it is a token store.
        progress: told of the tokens read.

    Returns:
        The manifest of the store, and how much was padding.

    Raises:
        DataError: nothing of that format at `path`, a broken file, ids that are none of the tokenizer's, another
            tokenizer than our own note names, `out` in use, or the file system refuses.
    """
    path = Path(path)
    tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)
    note = _note_of(path)
    if note is not None:
        _check_note(note, path, options, tokenizer)
    reading = _Reading(path, options, tokenizer, note, progress)
    bos = options.bos if options.bos is not None else _as_noted(note, options, "bos")
    eos = options.eos if options.eos is not None else _as_noted(note, options, "eos")
    manifest = prepare_documents(
        reading, tokenizer=tokenizer, out=out, bos=bos, eos=eos, shard_tokens=shard_tokens, overwrite=overwrite
    )
    return ImportReport(manifest=manifest, padding=reading.padding)


class _Reading:
    """The documents at a path, counted. Its padding is complete when they have been walked."""

    def __init__(
        self, path: Path, options: ImportOptions, tokenizer: Tokenizer, note: Note | None, progress: Progress
    ) -> None:
        self._path = path
        self._options = options
        self._note = note
        self._progress = progress
        self._eos_id = tokenizer.eos_id
        self._cut = _cut_of(path, options, tokenizer, note) if options.borders is not None else None
        self.padding = 0

    def __iter__(self) -> Iterator[Document]:
        self.padding = tokens = 0
        for ids, masked, where in self._read():
            self.padding += masked
            tokens += ids.size
            yield Document(ids=ids, source=where)
            self._progress(tokens, self._note.tokens if self._note else 0, "tokens")
        note = self._note
        if note is not None and (tokens, self.padding) != (note.tokens, note.padding):
            raise DataError(
                f"{self._path}: {tokens} tokens and {self.padding} of padding, {FILE_NAME} says {note.tokens} and "
                f"{note.padding}: export again"
            )

    def _read(self) -> Iterator[tuple[np.ndarray, int, str]]:
        options = self._options
        if options.format == "megatron":
            yield from megatron.read(self._path)
        elif options.format in _READ_SAMPLES:
            yield from _READ_SAMPLES[options.format](self._path, options.field or _FIELDS[options.format])
        else:
            assert self._cut is not None
            for ids, where in documents(self._chunks(), self._cut):
                yield ids, 0, where

    def _chunks(self) -> Iterator[Chunk]:
        chunks = (
            litespark.read(self._path, self._options.token_bytes)
            if self._options.format == "litespark"
            else litpkds.read(self._path)
        )
        if self._cut is not None and self._cut.borders == "rows":
            chunks = _whole_rows(chunks, self._cut.row)
        if self._note is not None:
            left = self._note.tokens
            for chunk in chunks:
                taken = chunk.ids[:left]
                self.padding += chunk.ids.size - taken.size
                left -= taken.size
                yield replace(chunk, ids=taken, series="")  # the documents go on from file to file
            return
        for chunk in chunks:
            end = self._end(chunk.ids)
            self.padding += chunk.ids.size - end
            yield replace(chunk, ids=chunk.ids[:end])

    def _end(self, ids: np.ndarray) -> int:
        """Where the padding at the end of a file begins."""
        if self._options.pad_id is None:
            return ids.size
        end = ids.size
        while end:  # in parts, as the ids are mapped
            begin = max(0, end - (1 << 20))
            others = np.flatnonzero(ids[begin:end] != self._options.pad_id)
            if others.size:
                end = begin + int(others[-1]) + 1
                break
            end = begin
        kept = self._options.pad_id == self._eos_id and 0 < end < ids.size
        return end + kept


def _cut_of(path: Path, options: ImportOptions, tokenizer: Tokenizer, note: Note | None) -> Cut:
    assert options.borders is not None
    if options.borders in ("bos", "eos"):
        marker = tokenizer.bos_id if options.borders == "bos" else tokenizer.eos_id
        if marker is None:
            raise DataError(f"borders={options.borders}: tokenizer {tokenizer.name} names no such token")
        return Cut(borders=options.borders, marker=marker)
    if options.borders == "files":
        return Cut(borders="files")
    row = options.seq_len + 1 if options.seq_len is not None else None
    if row is None and note is not None and note.seq_len is not None:
        row = note.seq_len + 1
    if row is None and options.format == "litespark":
        row = litespark.row_tokens(path)
    if row is None:
        raise DataError("borders=rows: nothing here says how long a row is; give seq_len (--seq-len)")
    return Cut(borders="rows", row=row)


def _whole_rows(chunks: Iterable[Chunk], row: int) -> Iterator[Chunk]:
    for chunk in chunks:
        if chunk.ids.size % row:
            raise DataError(f"{chunk.source}: {chunk.ids.size} ids are no whole number of rows of {row}; check seq_len")
        yield chunk


def _note_of(path: Path) -> Note | None:
    """The note in the folder, or above where the folder is that of a split."""
    if not path.is_dir():
        return None
    found = read_note(path)
    return read_note(path.parent) if found is None and path.name in litespark.SPLITS else found


def _check_note(note: Note, path: Path, options: ImportOptions, tokenizer: Tokenizer) -> None:
    if note.to != options.format:
        raise DataError(f"{path}: {FILE_NAME} says that this is {note.to}, not {options.format}")
    if note.tokenizer != tokenizer.sha256:
        raise DataError(
            f"{path}: made with another tokenizer than {tokenizer.name} (SHA-256 {note.tokenizer[:16]}, not "
            f"{tokenizer.sha256[:16]}): name the one that made it (or move {FILE_NAME} away to take the ids as they "
            "are)"
        )


def _as_noted(note: Note | None, options: ImportOptions, name: str) -> bool:
    """BOS or EOS as the note says, where the documents are those of the store that was exported."""
    whole = note is not None and (note.seq_len is None or options.borders in ("bos", "eos"))
    return whole and bool(getattr(note, name))
