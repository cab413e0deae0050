"""Import of ids that another program prepared, in every format of `export`, as a token store.

Documents keep their boundaries where the format has them: a sequence of Megatron, a sample of hf and smp. Litespark
has none, so `boundaries` gives the rule. Padding that is marked (by an attention_mask or our
export manifest) or given (`pad_id`) is left out and counted. No format records its tokenizer, so it must be given, and
each id is checked against it. `prepare` writes the store, atomically.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from lt_data.errors import DataError
from lt_data.exports import hf, litespark, megatron, smp
from lt_data.exports.blocks import BoundaryKind, BoundaryRule, split_documents
from lt_data.exports.export_manifest import EXPORT_MANIFEST_FILE, ExportManifest, read_export_manifest
from lt_data.exports.input_files import check_input
from lt_data.exports.options import FORMATS, Format
from lt_data.preparation.prepare import DEFAULT_SHARD_TOKENS, prepare
from lt_data.progress import Progress, no_progress
from lt_data.sources.document import Document
from lt_data.store.manifest import StoreManifest
from lt_data.tokenizing.tokenizer import Tokenizer

_READ_SAMPLES: dict[Format, Callable[[Path, str], Iterator[tuple[np.ndarray, int, str]]]] = {
    "hf": hf.read,
    "smp": smp.read,
}


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Options of an import.

    Attributes:
        format: the format.
        boundaries: litespark: a document begins at each `bos`, after each `eos`, at each of the `rows`, or at
            each of the `files`.
        seq_len: for `rows`: their length minus one. None: from Litespark's metadata.json or our export manifest.
        field: hf, smp: column of the ids. None: `input_ids`.
        token_bytes: litespark: bytes of a token. None: from metadata.json.
        pad_id: litespark: a run of this id at the end of a file is padding. If it is the EOS id, one of the
            run is kept.
        bos: whether each document begins with the BOS id, which is added if missing. None: from our export manifest,
            else no.
        eos: likewise for EOS at the end.

    Raises:
        DataError: an unknown value or incompatible options.
    """

    format: Format
    boundaries: BoundaryKind | None = None
    seq_len: int | None = None
    field: str | None = None
    token_bytes: int | None = None
    pad_id: int | None = None
    bos: bool | None = None
    eos: bool | None = None

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise DataError(f"format = {self.format!r}: one of {', '.join(FORMATS)}")
        if self.boundaries is not None and self.boundaries not in get_args(BoundaryKind):
            raise DataError(f"boundaries = {self.boundaries!r}: one of {', '.join(get_args(BoundaryKind))}")
        blocks = self.format == "litespark"
        if blocks and self.boundaries is None:
            raise DataError(
                "format = litespark: has no document boundaries; give boundaries (--boundaries): bos, eos, rows, files"
            )
        allowed = {
            "boundaries": blocks,
            "pad_id": blocks,
            "seq_len": self.boundaries == "rows",
            "field": self.format in _READ_SAMPLES,
            "token_bytes": blocks,
        }
        for name, is_allowed in allowed.items():
            if not is_allowed and (value := getattr(self, name)) is not None:
                raise DataError(f"{name} = {value!r}: has no effect with format = {self.format}; leave it out")
        if self.seq_len is not None and self.seq_len < 1:
            raise DataError(f"seq_len = {self.seq_len}: at least 1")


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """Result of an import: the manifest of the store, and the number of padding positions left out."""

    manifest: StoreManifest
    padding: int


def import_tokens(
    path: str | Path,
    *,
    options: ImportOptions,
    tokenizer: Tokenizer | str | Path,
    out: str | Path,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    progress: Progress = no_progress,
) -> ImportReport:
    """Import ids that another program prepared into a token store.

    Args:
        path: the folder or file, see the module of each format.
        options: the format and its options.
        tokenizer: the tokenizer that made the ids, or its folder, model of the hub, or URL (`Tokenizer.load`).
        out: folder of the store, created when the import is complete.
        shard_tokens: target number of ids of a shard.
        progress: called with the tokens read.

    Returns:
        The manifest of the store, and the amount of padding.

    Raises:
        DataError: nothing of that format at `path`, a broken file, ids outside the vocabulary, another tokenizer than
            in our export manifest, `out` in use, or a file system error.
    """
    path = Path(path)
    check_input(path)
    tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)
    exported = _find_export_manifest(path)
    if exported is not None:
        _check_export_manifest(exported, path, options, tokenizer)
    documents = _ImportedDocuments(path, options, tokenizer, exported, progress)
    bos = options.bos if options.bos is not None else _flag_from_manifest(exported, options, "bos")
    eos = options.eos if options.eos is not None else _flag_from_manifest(exported, options, "eos")
    manifest = prepare(documents, tokenizer=tokenizer, out=out, bos=bos, eos=eos, shard_tokens=shard_tokens)
    return ImportReport(manifest=manifest, padding=documents.padding)


class _ImportedDocuments:
    """Iterable of the documents at a path; `padding` is complete after the iteration."""

    def __init__(
        self,
        path: Path,
        options: ImportOptions,
        tokenizer: Tokenizer,
        exported: ExportManifest | None,
        progress: Progress,
    ) -> None:
        self._path = path
        self._options = options
        self._exported = exported
        self._progress = progress
        self._eos_id = tokenizer.eos_id
        self._rule = _boundary_rule(path, options, tokenizer, exported) if options.boundaries is not None else None
        self.padding = 0

    def __iter__(self) -> Iterator[Document]:
        self.padding = tokens = 0
        exported = self._exported
        for ids, masked, location in self._read():
            self.padding += masked
            tokens += ids.size
            yield Document(ids=ids, source=location)
            self._progress(tokens, exported.tokens if exported else 0, "tokens")
        if exported is not None and (tokens, self.padding) != (exported.tokens, exported.padding):
            raise DataError(
                f"{self._path}: {tokens} tokens and {self.padding} of padding, {EXPORT_MANIFEST_FILE} says "
                f"{exported.tokens} and {exported.padding}; export again"
            )

    def _read(self) -> Iterator[tuple[np.ndarray, int, str]]:
        options = self._options
        if options.format == "megatron":
            yield from megatron.read(self._path)
        elif options.format in _READ_SAMPLES:
            yield from _READ_SAMPLES[options.format](self._path, options.field or "input_ids")
        else:
            assert self._rule is not None
            for ids, location in split_documents(self._blocks(), self._rule, continued=self._exported is not None):
                yield ids, 0, location

    def _blocks(self) -> Iterator[tuple[np.ndarray, str]]:
        blocks = litespark.read(self._path, self._options.token_bytes)
        if self._rule is not None and self._rule.kind == "rows":
            blocks = _check_whole_rows(blocks, self._rule.row_tokens)
        if self._exported is not None:
            left = self._exported.tokens
            for ids, source in blocks:
                kept = ids[:left]
                self.padding += ids.size - kept.size
                left -= kept.size
                yield kept, source
            return
        for ids, source in blocks:
            end = self._padding_begin(ids)
            self.padding += ids.size - end
            yield ids[:end], source

    def _padding_begin(self, ids: np.ndarray) -> int:
        """Return the begin of the padding at the end of a file."""
        if self._options.pad_id is None:
            return ids.size
        end = ids.size
        while end:  # in chunks, as the ids are memory-mapped
            begin = max(0, end - (1 << 20))
            others = np.flatnonzero(ids[begin:end] != self._options.pad_id)
            if others.size:
                end = begin + int(others[-1]) + 1
                break
            end = begin
        keep_eos = self._options.pad_id == self._eos_id and 0 < end < ids.size
        return end + keep_eos


def _boundary_rule(
    path: Path, options: ImportOptions, tokenizer: Tokenizer, exported: ExportManifest | None
) -> BoundaryRule:
    assert options.boundaries is not None
    if options.boundaries in ("bos", "eos"):
        marker = tokenizer.bos_id if options.boundaries == "bos" else tokenizer.eos_id
        if marker is None:
            raise DataError(f"boundaries = {options.boundaries!r}: tokenizer {tokenizer.name} has no such token")
        return BoundaryRule(kind=options.boundaries, marker_id=marker)
    if options.boundaries == "files":
        return BoundaryRule(kind="files")
    row_tokens = options.seq_len + 1 if options.seq_len is not None else None
    if row_tokens is None and exported is not None and exported.seq_len is not None:
        row_tokens = exported.seq_len + 1
    if row_tokens is None:
        row_tokens = litespark.read_row_tokens(path)
    if row_tokens is None:
        raise DataError("boundaries = 'rows': unknown row length; give seq_len (--seq-len)")
    return BoundaryRule(kind="rows", row_tokens=row_tokens)


def _check_whole_rows(blocks: Iterable[tuple[np.ndarray, str]], row_tokens: int) -> Iterator[tuple[np.ndarray, str]]:
    for ids, source in blocks:
        if ids.size % row_tokens:
            raise DataError(f"{source}: {ids.size} ids, not a multiple of the row length {row_tokens}; check seq_len")
        yield ids, source


def _find_export_manifest(path: Path) -> ExportManifest | None:
    """Return the export manifest of a folder, or of its parent if it is the folder of a split."""
    if not path.is_dir():
        return None
    exported = read_export_manifest(path)
    return read_export_manifest(path.parent) if exported is None and path.name in litespark.SPLITS else exported


def _check_export_manifest(exported: ExportManifest, path: Path, options: ImportOptions, tokenizer: Tokenizer) -> None:
    if exported.to != options.format:
        raise DataError(f"{path}: {EXPORT_MANIFEST_FILE} says that this is {exported.to}, not {options.format}")
    if exported.tokenizer != tokenizer.sha256:
        raise DataError(
            f"{path}: made with another tokenizer than {tokenizer.name} (SHA-256 {exported.tokenizer[:16]}, not "
            f"{tokenizer.sha256[:16]}); give the one that made it (or move {EXPORT_MANIFEST_FILE} away to import the "
            "ids as they are)"
        )


def _flag_from_manifest(exported: ExportManifest | None, options: ImportOptions, name: str) -> bool:
    """Return `bos` or `eos` of the export manifest if the documents are those of the exported store."""
    if exported is None or (exported.seq_len is not None and options.boundaries not in ("bos", "eos")):
        return False
    return bool(getattr(exported, name))
