"""Merge of the parts of a job to the store that one machine would have made.

Parts are consecutive ranges of whole files, so their concatenated documents are those of the whole job. `merge` writes
them into new shards, which are therefore split at the same documents: shards, indexes, sources (the files of a part
come after those of earlier ones), columns and tokenizer are byte-identical, and so is the manifest except `merged_from`
and the checked bytes of `engine` (each part checked the faster engine on its own text). Each shard is compared with its
hash while it is read.

If duplicates are dropped, each part has dropped its own; documents that an earlier part has too are dropped here, by
the hashes in the parts, and all counts become those of the whole job. Memory: 16 to 32 bytes per distinct document as
in `prepare`, and 50 per document of one part; otherwise that of one shard's index. Cost: every byte is read, hashed,
written and hashed once.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lt_data.errors import DataError
from lt_data.preparation.build_folder import SUFFIX, ShardRecord, open_build_folder
from lt_data.preparation.counts import DocumentCounts
from lt_data.preparation.deduplication import DocumentHashSet
from lt_data.preparation.part_documents import add_manifest, check_part_files, read_entries, recount_duplicates
from lt_data.preparation.prepare_documents import check_output, part_folder, publish_store
from lt_data.preparation.store_writer import PART_FOLDER, SOURCES, read_sources, remove_unrecorded
from lt_data.progress import NoticeCallback, Progress, no_notice, no_progress
from lt_data.sources.reader import summarize_sources
from lt_data.storage import check_inside, make_folder_synced, read_file, translate_os_errors
from lt_data.store.combined_manifest import SHARED_FIELDS, merge_engines
from lt_data.store.document_columns import count_nulls, decode_columns
from lt_data.store.document_metadata import DocumentMetadata
from lt_data.store.document_sources import decode_sources, shift_files
from lt_data.store.joined import load_store
from lt_data.store.manifest import (
    MAX_TOKENIZER_BYTES,
    SHARD_FOLDER,
    TOKENIZER_FOLDER,
    ShardFile,
    StoreManifest,
    read_manifest,
)
from lt_data.store.megatron import decode_index, index_size
from lt_data.store.shards import ShardWriter

_CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class _LoadedPart:
    path: Path
    manifest: StoreManifest


def merge(
    out: str | Path,
    *,
    units: str | Path | None = None,
    overwrite: bool = False,
    no_resume: bool = False,
    progress: Progress = no_progress,
    notify: NoticeCallback = no_notice,
) -> StoreManifest:
    """Merge parts that `prepare(..., part_index=i, num_parts=n)` made beside `out`, or units, into it.

    The parts are kept. The same call resumes an interrupted merge after the last finished shard.

    Args:
        out: folder of the store; the parts are in `part_folder(out, part_index, num_parts)`.
        units: a store that was made in units (`prepare(..., unit_bytes=n)`), to merge instead.
        overwrite: replace `out` if it is a token store.
        no_resume: discard an interrupted merge.
        progress: called with the bytes read.
        notify: called with notices for the user.

    Returns:
        The manifest of the new store.

    Raises:
        DataError: a part is missing, damaged or of another job, there is no document, or `out` is in use or unwritable.
    """
    out = Path(out)
    parts = _find_parts(out) if units is None else _find_units(Path(units))
    first = parts[0].manifest
    if not any(part.manifest.documents for part in parts):
        raise DataError(f"no text in any of the {len(parts)} parts beside {out}: check the sources and the suffixes")
    if not out.with_name(out.name + SUFFIX).exists():
        check_output(out, overwrite=overwrite)
    job = {f"part {number}": part.manifest.fingerprint for number, part in enumerate(parts)}
    with open_build_folder(out, job=job, resumable=True, no_resume=no_resume) as build_folder:
        if build_folder.is_published:
            notify(f"{out} is complete already")
            return read_manifest(out)
        overwrite = check_output(out, overwrite=overwrite)
        folder = build_folder.store_path / SHARD_FOLDER
        with translate_os_errors("write", folder):
            make_folder_synced(folder)
        finished = [record.shard for record in build_folder.parse_records(ShardRecord)]
        remove_unrecorded(build_folder.store_path, [folder], finished, first.dtype)
        if finished:
            notify(f"resuming after {len(finished)} finished shards in {build_folder.path}")

        def on_shard_closed(shard: ShardFile, _: int) -> None:
            build_folder.add_record({"shard": asdict(shard)}, [folder])

        counts = DocumentCounts()
        seen = DocumentHashSet()
        skip = sum(shard.documents for shard in finished)
        total = sum(part.manifest.tokens for part in parts) * np.dtype(first.dtype).itemsize
        done = files_before = 0
        has_sources = all(shard.src_sha256 for part in parts for shard in part.manifest.shards)
        with ShardWriter(
            folder, first.shard_tokens, first.dtype, on_shard_closed=on_shard_closed, finished=finished
        ) as writer:
            for part in parts:
                is_new = _add_part_counts(part, seen, counts)
                for tokens, lengths, metadata in _read_documents(part, is_new, files_before if has_sources else None):
                    drop = min(skip, lengths.size)
                    skip -= drop
                    writer.append(tokens[int(lengths[:drop].sum()) :], lengths[drop:], metadata.slice(drop))
                    done += tokens.nbytes
                    progress(done, total, "bytes")
                files_before += part.manifest.sources.files
            shards = writer.finish()
        assert skip == 0
        listed = [file for part in parts for file in read_sources(part.path / PART_FOLDER / SOURCES)]
        manifest = StoreManifest(
            tokenizer=first.tokenizer,
            bos=first.bos,
            eos=first.eos,
            dtype=first.dtype,
            shards=shards,
            text_bytes=counts.text_bytes,
            read=counts.read,
            left_out=dict(sorted(counts.left_out.items())),
            skipped=dict(sorted(counts.skipped.items())),
            special_strings=dict(sorted(counts.special_strings.items())),
            special_tokens_as=first.special_tokens_as,
            selection=first.selection,
            columns=count_nulls(first.columns, folder, shards),
            map=first.map,
            engine=merge_engines([part.manifest for part in parts]),
            shard_tokens=first.shard_tokens,
            sources=summarize_sources(listed, skipped_links=first.sources.skipped_links),
            merged_from=len(parts),
        )
        publish_store(build_folder, _read_tokenizer_files(parts[0]), manifest, listed, overwrite=overwrite)
    return manifest


def _find_parts(out: Path) -> list[_LoadedPart]:
    """Return all parts of a job in order, checked to belong together."""
    pattern = re.compile(re.escape(out.name) + r"\.part-(\d{5})-of-(\d{5})")
    with translate_os_errors("read", out.parent):
        names = sorted(path.name for path in out.parent.iterdir() if pattern.fullmatch(path.name))
    matches = [match for name in names if (match := pattern.fullmatch(name))]
    totals = sorted({int(match[2]) for match in matches})
    if not totals:
        raise DataError(f"{out}: no parts (such as {part_folder(out, 0, 2)}); prepare them with --part")
    if len(totals) > 1:
        raise DataError(f"{out}: parts of jobs with {' and '.join(map(str, totals))} parts; move the old ones away")
    num_parts = totals[0]
    present = {int(match[1]) for match in matches}
    if missing := [index for index in range(num_parts) if index not in present]:
        unfinished = [index for index in missing if Path(f"{part_folder(out, index, num_parts)}{SUFFIX}").exists()]
        note = f" ({', '.join(map(str, unfinished))} started, not finished)" if unfinished else ""
        raise DataError(
            f"{out}: {len(missing)} of {num_parts} parts are missing: {', '.join(map(str, missing[:20]))}{note}; "
            "prepare them with --part, or copy them here"
        )
    parts = [
        _LoadedPart(path=path, manifest=read_manifest(path))
        for path in (part_folder(out, index, num_parts) for index in range(num_parts))
    ]
    for index, part in enumerate(parts):
        _check_part(part, parts[0], index, num_parts)
    return parts


def _find_units(store: Path) -> list[_LoadedPart]:
    """Return the units of a store in order, checked to belong together."""
    parts = [_LoadedPart(path=part.folder, manifest=part.manifest) for part in load_store(store).parts]
    entries = [part.manifest.part for part in parts]
    if any(entry is None for entry in entries):
        raise DataError(f"units = {store}: not a store that was made in several units; use it as it is")
    numbers = [(entry.index, entry.num_parts) for entry in entries if entry is not None]
    for part, (index, num_parts) in zip(parts, numbers, strict=True):
        _check_part(part, parts[0], index, num_parts)
    if len({num_parts for _, num_parts in numbers}) > 1 or numbers != sorted(set(numbers)):
        raise DataError(f"units = {store}: its parts are not the units of one job in order; merge those of each job")
    return parts


def _check_part(part: _LoadedPart, first: _LoadedPart, part_index: int, num_parts: int) -> None:
    entry = part.manifest.part
    if entry is None or first.manifest.part is None or (entry.index, entry.num_parts) != (part_index, num_parts):
        raise DataError(f"{part.path}: not part {part_index} of {num_parts} by its manifest; restore its name")
    pairs = [
        ("tokenizer", first.manifest.tokenizer.sha256, part.manifest.tokenizer.sha256),
        ("listing of the sources", first.manifest.part.listing_fingerprint, entry.listing_fingerprint),
        ("columns", _column_types(first), _column_types(part)),
        *((name, getattr(first.manifest, name), getattr(part.manifest, name)) for name in SHARED_FIELDS),
    ]
    if differences := [f"{name} ({a} and {b})" for name, a, b in pairs if a != b]:
        raise DataError(f"{part.path}: of another job than {first.path}: {'; '.join(differences)}; prepare it again")
    check_part_files(part.path, part.manifest)


def _column_types(part: _LoadedPart) -> list[tuple[str, str]]:
    return [(column.name, column.type) for column in part.manifest.columns]


def _add_part_counts(part: _LoadedPart, seen: DocumentHashSet, counts: DocumentCounts) -> np.ndarray | None:
    """Add the counts of a part; return a mask of its new documents (bool [documents]), None: all."""
    add_manifest(counts, part.manifest)
    if not part.manifest.selection.drop_duplicates:
        return None
    entries = read_entries(part.path)
    return recount_duplicates(counts, part.path, part.manifest, entries, seen.add(entries["hash"]))


def _read_documents(
    part: _LoadedPart, selected: np.ndarray | None, files_before: int | None
) -> Iterator[tuple[np.ndarray, np.ndarray, DocumentMetadata]]:
    """Yield selected documents of a part in chunks.

    A chunk is concatenated ids, the length of each document (int64), and their metadata. `files_before` counts the
    source files of earlier parts; with None no sources are read.
    """
    dtype = np.dtype(part.manifest.dtype).newbyteorder("<")
    before = 0
    for shard in part.manifest.shards:
        path = part.path / SHARD_FOLDER / f"{shard.name}.bin"
        with translate_os_errors("read", path):
            check_inside(path, part.path)
            index = read_file(path.with_suffix(".idx"), max_bytes=index_size(shard.documents), inside=part.path)
            ids = np.asarray(np.memmap(path, dtype, mode="r"))
        metadata = _read_metadata(part, shard, files_before)
        lengths = decode_index(index, str(path.with_suffix(".idx")))[0].astype(np.int64)
        if ids.size != shard.tokens or lengths.size != shard.documents or int(lengths.sum()) != shard.tokens:
            raise DataError(f"{path}: size differs from the manifest: copy the part again or prepare it again")
        digest = hashlib.sha256()
        ends = np.cumsum(lengths)
        first, begin = 0, 0
        while first < lengths.size:
            last = max(first + 1, int(np.searchsorted(ends, begin + _CHUNK_TOKENS, side="right")))
            end = int(ends[last - 1])
            chunk, sizes, details = ids[begin:end], lengths[first:last], metadata.slice(first, last)
            digest.update(np.ascontiguousarray(chunk).view(np.uint8).data)
            if selected is not None:
                keep = selected[before + first : before + last]
                if not keep.all():
                    chunk, sizes = chunk[np.repeat(keep, sizes)], sizes[keep]
                    details = details.select(keep)
            yield chunk, sizes, details
            first, begin = last, end
        if digest.hexdigest() != shard.sha256 or hashlib.sha256(index).hexdigest() != shard.idx_sha256:
            raise DataError(f"{path}: SHA-256 differs from the manifest: copy the part again or prepare it again")
        before += shard.documents


def _read_metadata(part: _LoadedPart, shard: ShardFile, files_before: int | None) -> DocumentMetadata:
    sources = columns = None
    if files_before is not None:
        path, content = _read_shard_file(part, shard, "src")
        n_files = part.manifest.sources.files
        found = decode_sources(content, documents=shard.documents, files=n_files, path=path)
        sources = shift_files(found, files_before)
    if part.manifest.columns:
        path, content = _read_shard_file(part, shard, "arrow")
        columns = decode_columns(content, part.manifest.columns, documents=shard.documents, path=path)
    return DocumentMetadata(sources=sources, columns=columns)


def _read_shard_file(part: _LoadedPart, shard: ShardFile, kind: str) -> tuple[str, bytes]:
    name = f"{shard.name}.{kind}"
    path = part.path / SHARD_FOLDER / name
    with translate_os_errors("read", path):
        content = read_file(path, max_bytes=shard.sizes(part.manifest.dtype)[name], inside=part.path)
    if hashlib.sha256(content).hexdigest() != shard.hashes[name]:
        raise DataError(f"{path}: SHA-256 differs from the manifest: copy the part again or prepare it again")
    return str(path), content


def _read_tokenizer_files(part: _LoadedPart) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for name, sha256 in part.manifest.tokenizer.files.items():
        path = part.path / TOKENIZER_FOLDER / name
        with translate_os_errors("read", path):
            files[name] = read_file(path, max_bytes=MAX_TOKENIZER_BYTES, inside=part.path)
        if hashlib.sha256(files[name]).hexdigest() != sha256:
            raise DataError(f"{path}: SHA-256 differs from the manifest: copy the part again")
    return files
