"""Preparation of a token store from documents, with the same bytes for any number of workers.

Documents are read, filtered (lt_data.preparation.document_filter), encoded in batches of about one megabyte
(lt_data.tokenizing.encode) and appended to shards in order (lt_data.preparation.store_writer). Inputs are checked
before the first byte is written; the store is built beside its target and renamed into place
(lt_data.preparation.build_folder). The same command resumes an interrupted job after its last finished shard, with a
byte-identical result. Cost: the tokenizer's time plus a few percent; memory does not grow with the corpus, unless
duplicates are dropped (16 to 32 bytes per distinct document).
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lt_data.errors import DataError
from lt_data.preparation.build_folder import START_OVER, SUFFIX, BuildFolder, open_build_folder
from lt_data.preparation.document_filter import DocumentFilter
from lt_data.preparation.record_map import RecordMap, load_record_map
from lt_data.preparation.store_writer import PART_FOLDER, StoreWriter
from lt_data.progress import NoticeCallback, Progress, no_notice, no_progress
from lt_data.sources.document import Document
from lt_data.sources.reader import DocumentReader, summarize_sources
from lt_data.storage import make_folder_synced, translate_os_errors, write_file
from lt_data.store.document_columns import count_nulls, make_batch, parse_columns
from lt_data.store.document_metadata import DocumentMetadata
from lt_data.store.document_sources import MAX_SOURCE_FILES, SOURCES_FILE, encode_source_files
from lt_data.store.joined import load_store
from lt_data.store.manifest import (
    MANIFEST_FILE,
    PACK_FOLDER,
    SHARD_FOLDER,
    TOKENIZER_FOLDER,
    ColumnInfo,
    Selection,
    ShardFile,
    StoreManifest,
    StorePart,
    TokenizerInfo,
    encode_manifest,
    read_manifest,
)
from lt_data.store.source_files import SourceFile, SourceFiles
from lt_data.tokenizing.encode import encode_documents
from lt_data.tokenizing.encoder import Encoder
from lt_data.tokenizing.engine_selection import EngineRequest
from lt_data.tokenizing.tokenizer import SpecialTokensAs, Tokenizer

DEFAULT_SHARD_TOKENS = 2**27


def prepare_documents(
    documents: Iterable[Document | str],
    *,
    tokenizer: Tokenizer | str | Path,
    out: str | Path,
    bos: bool = True,
    eos: bool = True,
    engine: EngineRequest = "auto",
    special_tokens_as: SpecialTokensAs = "text",
    workers: int = 1,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    selection: Selection | None = None,
    record_map: str | None = None,
    map_args: Mapping[str, Any] | None = None,
    keep: Sequence[str] = (),
    part_index: int = 0,
    num_parts: int = 1,
    overwrite: bool = False,
    no_resume: bool = False,
    extra_files: Callable[[StoreManifest], Mapping[str, bytes]] | None = None,
    lock: bool = True,
    progress: Progress = no_progress,
    notify: NoticeCallback = no_notice,
) -> StoreManifest:
    """Encode the caller's documents, or texts, and write a token store; arguments and errors as for `prepare`.

        prepare_documents(["A text.", "Another one."], tokenizer=tokenizer, out="store")

    Only a job over a `DocumentReader` can be resumed and have parts: other documents may differ between runs.
    `extra_files` makes files (by name) that are published with the store, of its manifest. `lock=False` is for a path
    that no other process knows, on a file system that may have no `flock`.
    """
    tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)
    selection = selection or Selection()
    encoder = Encoder(tokenizer, bos=bos, eos=eos, engine=engine, special_tokens_as=special_tokens_as)
    reader = documents if isinstance(documents, DocumentReader) else None
    _check_sizes(workers, shard_tokens, reader)
    loaded_map = load_record_map(record_map, map_args, reader)
    columns = parse_kept_columns(keep, reader)
    out = Path(out)
    part: StorePart | None = None
    if num_parts != 1 or part_index:
        if reader is None:
            raise DataError(
                f"part_index = {part_index}, num_parts = {num_parts}: only a DocumentReader (or prepare) has parts"
            )
        part = StorePart(index=part_index, num_parts=num_parts, listing_fingerprint=reader.fingerprint)
        reader = reader.part(part_index, num_parts)
        out = part_folder(out, part_index, num_parts)
    origin = reader.description if reader else "the documents given"
    if reader is not None and not reader.n_files and not part:
        raise DataError(f"no text in {origin}: check the sources and the suffixes")
    if not out.with_name(out.name + SUFFIX).exists():
        check_output(out, overwrite=overwrite)  # before anything is written

    job = describe_job(encoder, selection, loaded_map, columns, shard_tokens, reader, part)
    with open_build_folder(out, job=job, resumable=reader is not None, no_resume=no_resume, lock=lock) as build_folder:
        if build_folder.is_published:
            notify(f"{out} is complete already")
            return read_manifest(out)
        overwrite = check_output(out, overwrite=overwrite)
        with StoreWriter(
            build_folder,
            shard_tokens=shard_tokens,
            dtype=encoder.dtype,
            selection=selection,
            special_strings=tokenizer.special_strings,
            keep_side_files=part is not None,
        ) as writer:
            if build_folder.records:
                notify(f"resuming after {len(build_folder.records)} finished shards in {build_folder.path}")
                encoder.engine_choice = writer.engine
            shards = _encode_documents(
                documents, reader, encoder, writer, selection, loaded_map, columns, workers, progress
            )
            listed = writer.read_listed_sources()
            part = replace(part, files=writer.side_file_hashes()) if part else None
        counts = writer.counts
        if not shards and not part:
            amounts = {reason: amount.documents for reason, amount in counts.left_out.items()} | counts.skipped
            reasons = ", ".join(f"{amount} {reason}" for reason, amount in sorted(amounts.items()))
            examples = "; ".join(example for _, example in sorted(reader.skip_examples.items())) if reader else ""
            raise DataError(
                f"no text in {origin}{f' ({reasons})' if reasons else ''}: "
                f"{f'{examples}; ' if examples else ''}check the sources and the suffixes"
            )
        manifest = StoreManifest(
            tokenizer=tokenizer_info(tokenizer),
            bos=bos,
            eos=eos,
            dtype=encoder.dtype,
            shards=shards,
            text_bytes=counts.text_bytes,
            read=counts.read,
            left_out=dict(sorted(counts.left_out.items())),
            skipped=dict(sorted(counts.skipped.items())),
            special_strings=dict(sorted(counts.special_strings.items())),
            special_tokens_as=special_tokens_as,
            selection=selection,
            columns=count_nulls(columns, build_folder.store_path / SHARD_FOLDER, shards),
            map=loaded_map.info if loaded_map else None,
            engine=encoder.engine_choice.to_dict() if encoder.engine_choice else {},
            shard_tokens=shard_tokens,
            sources=summarize_sources(listed, skipped_links=reader.source_files().skipped_links)
            if reader
            else SourceFiles(),
            part=part,
        )
        extra = extra_files(manifest) if extra_files else {}
        publish_store(build_folder, tokenizer.files, manifest, listed, overwrite=overwrite, extra_files=extra)
    for column in manifest.columns:
        if manifest.documents and column.nulls == manifest.documents:
            notify(f"keep: no document has a field {column.name!r}; check the name")
    for notice in reader.notices() if reader else ():
        notify(notice)
    return manifest


def parse_kept_columns(keep: Sequence[str], reader: DocumentReader | None) -> tuple[ColumnInfo, ...]:
    """Return the columns to keep; raise if the reader does not keep their fields."""
    columns = parse_columns(keep)
    kept = True if reader is None else reader.options.keep_fields
    if missing := [column.name for column in columns if kept is not True and column.name not in (kept or ())]:
        raise DataError(f"keep = {missing[0]!r}: the DocumentReader does not keep it; create it with keep_fields")
    return columns


def _check_sizes(workers: int, shard_tokens: int, reader: DocumentReader | None) -> None:
    for name, value in (("workers", workers), ("shard_tokens", shard_tokens)):
        if value < 1:
            raise DataError(f"{name} = {value}: at least 1")
    if reader is not None and reader.n_files > MAX_SOURCE_FILES:
        raise DataError(
            f"sources: {reader.n_files} files; a store has at most {MAX_SOURCE_FILES}: join small files into JSON lines"
        )


def _make_documents(documents: Iterable[Document | str]) -> Iterator[Document]:
    if isinstance(documents, str):
        raise DataError("documents: a single text; pass a list of texts")
    for number, document in enumerate(documents, start=1):
        if not isinstance(document, Document | str):
            raise DataError(f"document {number}: a {type(document).__name__}; give a text or a lt_data.Document")
        yield Document(text=document, source=f"document {number}") if isinstance(document, str) else document


def _encode_documents(
    documents: Iterable[Document | str],
    reader: DocumentReader | None,
    encoder: Encoder,
    writer: StoreWriter,
    selection: Selection,
    record_map: RecordMap | None,
    columns: Sequence[ColumnInfo],
    workers: int,
    progress: Progress,
) -> tuple[ShardFile, ...]:
    """Encode and write everything from the writer's source position on; return all shards."""
    if reader is not None and writer.source_position[0] > reader.n_files:
        raise DataError(f"{writer.journal}: names file {writer.source_position[0]} of {reader.n_files}; {START_OVER}")
    before = writer.counts.read.documents
    start = (
        _make_documents(documents)
        if reader is None
        else reader.documents_from(*writer.source_position, writer.read_prefixes)
    )
    document_filter = DocumentFilter(
        start, selection, reader=reader, seen_hashes=writer.read_seen_hashes(), record_map=record_map
    )
    with closing(encode_documents(document_filter, encoder, workers, reader=reader, columns=columns)) as batches:
        for batch, encoded in batches:
            writer.engine = encoder.select_engine([])
            writer.write(
                encoded.tokens,
                encoded.lengths,
                texts=batch.texts,
                text_sizes=batch.text_sizes,
                special_strings=encoded.special_strings,
                source_position=(batch.file_index, batch.next_record),
                read_prefix=batch.read_prefix,
                document_filter=document_filter,
                sources=reader.finished_files if reader else (),
                metadata=DocumentMetadata(
                    sources=batch.sources, columns=make_batch(columns, batch.rows) if columns else None
                ),
            )
            if reader:
                progress(batch.read_bytes, reader.total_bytes, "bytes")
            else:
                progress(writer.counts.text_bytes, 0, "bytes")
    shards = writer.finish(document_filter, reader.finished_files if reader else ())
    assert before + document_filter.n_read == writer.counts.read.documents
    return shards


def tokenizer_info(tokenizer: Tokenizer) -> TokenizerInfo:
    """Return the manifest's entry of a tokenizer."""
    return TokenizerInfo(
        sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        files={name: hashlib.sha256(content).hexdigest() for name, content in tokenizer.files.items()},
        name=tokenizer.name,
    )


def publish_store(
    build_folder: BuildFolder,
    tokenizer_files: Mapping[str, bytes],
    manifest: StoreManifest,
    source_files: Sequence[SourceFile],
    *,
    overwrite: bool,
    extra_files: Mapping[str, bytes] | None = None,
) -> None:
    """Add tokenizer, list of sources, extra files and manifest to the finished shards, and move the store."""
    assert manifest.is_consistent, "documents or tokens were lost"
    with translate_os_errors("write", build_folder.store_path):
        make_folder_synced(build_folder.store_path / TOKENIZER_FOLDER)
    for name, content in tokenizer_files.items():
        write_file(build_folder.store_path / TOKENIZER_FOLDER / name, content)
    if manifest.sources.list_sha256:
        write_file(build_folder.store_path / SOURCES_FILE, encode_source_files(source_files))
    for name, content in (extra_files or {}).items():
        write_file(build_folder.store_path / name, content)
    write_file(build_folder.store_path / MANIFEST_FILE, encode_manifest(manifest))
    build_folder.publish(manifest.fingerprint, overwrite=overwrite)


def part_folder(out: str | Path, part_index: int, num_parts: int) -> Path:
    """Return the folder of a part, beside the store that the parts are merged into."""
    out = Path(out)
    return out.with_name(f"{out.name}.part-{part_index:05d}-of-{num_parts:05d}")


def check_output(out: Path, *, overwrite: bool) -> bool:
    """Return True if `out` is a store to overwrite; raise DataError if anything else is there."""
    with translate_os_errors("read", out):
        if not os.path.lexists(out) or (out.is_dir() and not out.is_symlink() and not any(out.iterdir())):
            return False
        if not (out / MANIFEST_FILE).is_file():
            raise DataError(f"out = {out}: exists and is not a token store; choose another folder")
    load_store(out)
    if not overwrite:
        raise DataError(
            f"out = {out}: holds a token store already; choose another folder, or overwrite it (--overwrite)"
        )
    known = {MANIFEST_FILE, SOURCES_FILE, SHARD_FOLDER, TOKENIZER_FOLDER, PACK_FOLDER, PART_FOLDER}
    with translate_os_errors("read", out):
        foreign = sorted(entry.name for entry in out.iterdir() if entry.name not in known)
    if foreign:
        raise DataError(f"out = {out}: holds {', '.join(foreign)} beside the store; move them away before overwriting")
    return True


def describe_job(
    encoder: Encoder,
    selection: Selection,
    record_map: RecordMap | None,
    columns: Sequence[ColumnInfo],
    shard_tokens: int,
    reader: DocumentReader | None,
    part: StorePart | None,
) -> dict[str, Any]:
    """Return the settings that must not change when a job is resumed."""
    return {
        "sources": reader.description if reader else "made by the caller",
        "bytes of the sources": reader.total_bytes if reader else 0,
        "listing of the sources": reader.fingerprint if reader else "",
        "on_bad": reader.options.on_bad if reader else "error",
        "max_document_bytes": reader.options.max_document_bytes if reader else 0,
        "tokenizer": encoder.tokenizer.sha256,
        "bos": encoder.bos,
        "eos": encoder.eos,
        "engine": encoder.requested_engine,
        "special_tokens_as": encoder.special_tokens_as,
        "shard_tokens": shard_tokens,
        "part": f"{part.index} of {part.num_parts}" if part else "all",
        **asdict(selection),
        **({"keep": [f"{column.name}:{column.type}" for column in columns]} if columns else {}),
        **({f"map ({name})": value for name, value in asdict(record_map.info).items()} if record_map else {}),
        **{f"{package} (version)": _package_version(package) for package in ("tokenizers", "gigatoken")},
    }


def _package_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
