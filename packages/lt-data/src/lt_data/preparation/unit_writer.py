"""One unit of a job: its documents are read, selected, encoded and written as a flat token store.

Documents are read and filtered (lt_data.preparation.document_filter), encoded in batches of about one megabyte
(lt_data.tokenizing.encode) and appended to shards in order (lt_data.store.shards). Everything is synced; the folder
gets its name when it is complete (lt_data.preparation.tasks). A unit in which a damaged file is found is written again
without the file (lt_data.sources.reader). Cost: the tokenizer's time plus a few percent; memory does not grow with the
unit, but for 16 bytes per document of the open shard, and what dropping duplicates takes.
"""

import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from lt_data.errors import DataError
from lt_data.preparation.deduplication import hash_ids, hash_text
from lt_data.preparation.document_filter import DocumentCounts, select_documents
from lt_data.preparation.record_map import load_record_map
from lt_data.sources.document import Document
from lt_data.sources.options import SourceOptions
from lt_data.sources.reader import DocumentReader, FoundDamageError
from lt_data.storage import translate_os_errors, write_file
from lt_data.store.document_columns import count_nulls, make_batch
from lt_data.store.document_metadata import DocumentMetadata
from lt_data.store.document_sources import SOURCES_FILE, encode_source_files
from lt_data.store.manifest import (
    EMPTY,
    MANIFEST_FILE,
    SHARD_FOLDER,
    TOKENIZER_FOLDER,
    ColumnInfo,
    DocumentTotals,
    Selection,
    StoreManifest,
    StorePart,
    TokenizerInfo,
    encode_manifest,
)
from lt_data.store.shards import ShardWriter
from lt_data.store.source_files import SourceFile, SourceFiles
from lt_data.tokenizing.encode import EncoderBatch, encode_documents
from lt_data.tokenizing.encoder import EncodedBatch, Encoder
from lt_data.tokenizing.tokenizer import SpecialTokensAs, Tokenizer

TOO_FEW_TOKENS = "too few tokens"
TOO_MANY_TOKENS = "too many tokens"
DOCUMENTS_FILE = "documents"
"""Of a unit in which duplicates of other units are to be found: one `ENTRY_DTYPE` per document."""
ENTRY_DTYPE = np.dtype([("hash", "S16"), ("text_bytes", "<u8"), ("tokens", "<u4")])


@dataclass(frozen=True, kw_only=True)
class UnitOptions:
    """What is made of documents; see `prepare`. All units of a job have the same."""

    tokenizer: Tokenizer
    bos: bool
    eos: bool
    engine: str
    special_tokens_as: SpecialTokensAs
    shard_tokens: int
    selection: Selection
    columns: tuple[ColumnInfo, ...]
    record_map: str | None
    map_args: Mapping[str, Any] | None
    source_options: SourceOptions

    def make_encoder(self) -> Encoder:
        """Return the encoder; raises DataError for options that the tokenizer does not allow."""
        return Encoder(
            self.tokenizer,
            bos=self.bos,
            eos=self.eos,
            engine=self.engine,
            special_tokens_as=self.special_tokens_as,
        )

    def describe(self) -> dict[str, Any]:
        """Return what must not change in a job, as JSON values."""
        record_map = load_record_map(self.record_map, self.map_args, self.source_options)
        return {
            "tokenizer": self.tokenizer.sha256,
            **{name: getattr(self, name) for name in ("bos", "eos", "engine", "special_tokens_as", "shard_tokens")},
            **asdict(self.selection),
            **({"keep": [f"{column.name}:{column.type}" for column in self.columns]} if self.columns else {}),
            **({f"map ({name})": value for name, value in asdict(record_map.info).items()} if record_map else {}),
            **{f"{package} (version)": _package_version(package) for package in ("tokenizers", "gigatoken")},
        }


def _package_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write_unit(
    options: UnitOptions,
    documents: Iterable[Document],
    folder: Path,
    *,
    on_batch: Callable[[int], None],
    skipped: Mapping[str, int] | None = None,
    list_documents: bool = False,
) -> StoreManifest:
    """Write documents as a token store.

    Args:
        options: the options of the job.
        documents: the documents; those of a `DocumentReader` have sources.
        folder: folder of the store.
        on_batch: called after each batch with the bytes read.
        skipped: records in memory without a document, by reason, complete when the documents are.
        list_documents: write the hashes of the documents too.

    Raises:
        DataError: bad input, or a file system error.
    """
    while True:
        try:
            return _write_once(options, documents, folder, on_batch, skipped, list_documents)
        except FoundDamageError:  # which the reader leaves out the next time
            with translate_os_errors("clean", folder):
                shutil.rmtree(folder)


def _write_once(
    options: UnitOptions,
    documents: Iterable[Document],
    folder: Path,
    on_batch: Callable[[int], None],
    skipped: Mapping[str, int] | None,
    list_documents: bool,
) -> StoreManifest:
    reader = documents if isinstance(documents, DocumentReader) else None
    source = reader.read() if reader else documents  # held here: a generator that is let go reads no further
    record_map = load_record_map(options.record_map, options.map_args, options.source_options)
    encoder, selection, columns = options.make_encoder(), options.selection, options.columns
    with translate_os_errors("write", folder):
        for path in (folder, folder / SHARD_FOLDER, folder / TOKENIZER_FOLDER):
            path.mkdir(exist_ok=True)
    counts, totals, special_strings = DocumentCounts(), DocumentTotals(), Counter[str]()
    entries: list[np.ndarray] = []
    selected = select_documents(source, selection, counts, record_map)
    batches = _check_failures(encode_documents(selected, encoder, reader=reader, columns=columns), reader)
    with ShardWriter(folder / SHARD_FOLDER, options.shard_tokens, encoder.dtype) as writer, closing(batches):
        for batch, encoded in batches:
            kept = _select_by_tokens(batch, encoded, selection, counts)
            sizes = np.array(batch.text_sizes, np.int64) if batch.texts else np.zeros(kept.size, np.int64)
            tokens, lengths = encoded.tokens, encoded.lengths
            metadata = DocumentMetadata(
                sources=batch.sources, columns=make_batch(columns, batch.rows) if columns else None
            )
            found = encoded.special_strings
            if not kept.all():
                found = _count_strings(batch.texts, kept, options.tokenizer.special_strings) if found else {}
                tokens, lengths, sizes = tokens[np.repeat(kept, lengths)], lengths[kept], sizes[kept]
                metadata = metadata.select(kept)
            writer.append(tokens, lengths, metadata)
            special_strings.update(found)
            totals += DocumentTotals(documents=lengths.size, text_bytes=int(sizes.sum()), tokens=tokens.size)
            if list_documents:
                entries.append(_make_entries(batch.texts or batch.ids, kept, sizes, lengths))
            on_batch(batch.read_bytes if reader else totals.text_bytes)
        shards = writer.finish()
    read = sum(counts.left_out.values(), totals)
    assert read.documents == counts.read, "documents were lost"
    manifest = StoreManifest(
        tokenizer=describe_tokenizer(options.tokenizer),
        bos=options.bos,
        eos=options.eos,
        dtype=encoder.dtype,
        parts=(StorePart(shards=shards, sources=reader.source_files() if reader else SourceFiles()),),
        text_bytes=totals.text_bytes,
        read=read,
        left_out=dict(sorted(counts.left_out.items())),
        skipped=dict(sorted((reader.skipped if reader else skipped or {}).items())),
        special_strings=dict(sorted(special_strings.items())),
        special_tokens_as=options.special_tokens_as,
        selection=selection,
        columns=count_nulls(columns, folder / SHARD_FOLDER, shards),
        map=record_map.info if record_map else None,
        engine=encoder.engine,
        shard_tokens=options.shard_tokens,
    )
    assert manifest.kept == totals, "documents or tokens were lost"
    if list_documents:
        write_file(folder / DOCUMENTS_FILE, b"".join(part.tobytes() for part in entries))
    write_store_files(folder, manifest, options.tokenizer.files, reader.finished_files if reader else ())
    return manifest


def _check_failures(
    batches: Iterable[tuple[EncoderBatch, EncodedBatch]], reader: DocumentReader | None
) -> Generator[tuple[EncoderBatch, EncodedBatch]]:
    """Yield the batches; if a document cannot be encoded and its file is damaged, that is the error."""
    try:
        yield from batches
    except DataError:
        if reader is not None:
            reader.check_open_piece()
        raise


def write_store_files(
    folder: Path, manifest: StoreManifest, tokenizer_files: Mapping[str, bytes], sources: Sequence[SourceFile]
) -> None:
    """Write the tokenizer, the list of many source files, and last the manifest beside the shards of a flat store."""
    for name, content in tokenizer_files.items():
        write_file(folder / TOKENIZER_FOLDER / name, content)
    if manifest.sources.list_sha256:
        write_file(folder / SOURCES_FILE, encode_source_files(sources))
    write_file(folder / MANIFEST_FILE, encode_manifest(manifest))


def describe_tokenizer(tokenizer: Tokenizer) -> TokenizerInfo:
    """Return the manifest's entry of a tokenizer."""
    return TokenizerInfo(
        sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        files={name: hashlib.sha256(content).hexdigest() for name, content in tokenizer.files.items()},
        name=tokenizer.name,
    )


def _select_by_tokens(
    batch: EncoderBatch, encoded: EncodedBatch, selection: Selection, counts: DocumentCounts
) -> np.ndarray:
    """Return a mask of the documents whose number of ids passes (bool [documents]); the others are counted."""
    tokens = encoded.lengths
    few = (tokens > 0) & (tokens < (selection.min_tokens or 0))
    many = tokens > (selection.max_tokens or np.inf)
    for reason, mask in ((EMPTY, tokens == 0), (TOO_FEW_TOKENS, few), (TOO_MANY_TOKENS, many)):
        if left := np.flatnonzero(mask).tolist():
            size = sum(batch.text_sizes[i] for i in left) if batch.texts else 0
            counts.left_out[reason] += DocumentTotals(
                documents=len(left), text_bytes=size, tokens=int(tokens[left].sum())
            )
    return (tokens > 0) & ~few & ~many


def _count_strings(texts: Sequence[str], kept: np.ndarray, strings: Sequence[str]) -> dict[str, int]:
    chosen = [text for text, is_kept in zip(texts, kept, strict=False) if is_kept]  # without texts: ids
    return {string: n for string in strings if (n := sum(text.count(string) for text in chosen))}


def _make_entries(
    documents: Sequence[str] | Sequence[np.ndarray], kept: np.ndarray, sizes: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    entries = np.zeros(lengths.size, ENTRY_DTYPE)
    entries["hash"] = [
        hash_text(document.encode()) if isinstance(document, str) else hash_ids(document)
        for document, is_kept in zip(documents, kept, strict=True)
        if is_kept
    ]
    entries["text_bytes"], entries["tokens"] = sizes, lengths
    return entries
