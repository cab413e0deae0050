"""Verification of all content of a store: `lt data verify`.

    manifest.json   its checksum, its totals, and its exact formatting
    kept.extents    SHA-256
    tokenizer/      SHA-256 of each file, and of the tokenizer
    shards          SHA-256 of all files; sums of lengths; offsets; ids within the vocabulary; indices of source files;
                    columns
    sources.jsonl   SHA-256; number of files
    packs           fingerprints and headers; every token of the store in exactly one row; labels; row lengths

All problems are reported, not only the first, so that one pass shows what to copy again. A single flipped bit in any of
these files is found. Cost: one read of everything; 30 bytes per slice of one pack.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.packing.pack_header import PACK_FILE as PACK
from lt_data.packing.pack_index import PackIndex
from lt_data.packing.packs import list_pack_folders
from lt_data.progress import Progress, no_progress
from lt_data.storage import open_regular, read_file, translate_os_errors
from lt_data.store.manifest import MAX_MANIFEST_BYTES, TOKENIZER_FOLDER
from lt_data.store.megatron import decode_index, index_size
from lt_data.store.token_store import TokenStore

_CHUNK = 2**22  # ids checked at a time


def find_problems(store: TokenStore, progress: Progress = no_progress) -> Iterator[str]:
    """Check a store and its packs; yield each problem with the name of its file."""
    for path in store.manifest_files:
        yield from _check_json(path)
    yield from _check_index_of_parts(store)
    yield from _check_tokenizer(store)
    yield from _check_source_files(store)
    done, total = 0, sum(store.manifest.shard_tokens_each) * store.dtype.itemsize
    indexes_valid = True
    for number in range(len(store.manifest.shards)):
        for problem in _check_index(store, number):
            indexes_valid = False
            yield problem
        yield from _check_metadata(store, number)
        for n_bytes, problem in _check_ids(store, number):
            done += n_bytes
            if problem:
                yield problem
            progress(done, total, "bytes")
    for folder in list_pack_folders(store):
        yield from _check_pack(store, folder, check_rows=indexes_valid)


def verify(store: TokenStore, progress: Progress = no_progress) -> list[str]:
    """Check a store and its packs; return the problems, each with the name of its file."""
    return list(find_problems(store, progress))


def _check_json(path: Path) -> Iterator[str]:
    """Check a JSON file and its formatting: the same values in other bytes are damage too."""
    try:
        with translate_os_errors("read", path):
            content = read_file(path, max_bytes=MAX_MANIFEST_BYTES)
        values = strict_json.loads(content, str(path), "copy it again")
    except DataError as exc:
        yield str(exc)
        return
    if (json.dumps(values, indent=2) + "\n").encode() != content:
        yield f"{path}: formatting differs from the written file"


def _check_index_of_parts(store: TokenStore) -> Iterator[str]:
    for check in (store.check_index, store.check_extents):
        try:
            check()
        except DataError as exc:
            yield str(exc)


def _check_tokenizer(store: TokenStore) -> Iterator[str]:
    valid = True
    names = store.manifest.tokenizer.files.items()
    files = [(part, part / TOKENIZER_FOLDER / name, sha256) for part in store.part_folders for name, sha256 in names]
    for part, path, sha256 in files:
        try:
            with translate_os_errors("read", path), open_regular(path, inside=part) as file:
                actual = hashlib.file_digest(file, "sha256").hexdigest()
        except DataError as exc:
            valid = False
            yield str(exc)
            continue
        if actual != sha256:
            valid = False
            yield f"{path}: SHA-256 differs from the manifest"
    if valid and store.manifest.tokenizer.files:
        try:
            store.tokenizer()
        except DataError as exc:
            yield str(exc)


def _check_index(store: TokenStore, number: int) -> Iterator[str]:
    shard = store.manifest.shards[number]
    path = store.shard_path(number, "idx")
    try:
        with translate_os_errors("read", path):
            content = read_file(path, max_bytes=index_size(shard.documents), inside=store.shard_location(number).folder)
        if hashlib.sha256(content).hexdigest() != shard.idx_sha256:
            yield f"{path}: SHA-256 differs from the manifest"
        lengths, dtype = decode_index(content, str(path))
    except DataError as exc:
        yield str(exc)
        return
    if dtype != store.manifest.dtype:
        yield f"{path}: dtype {dtype}, the manifest says {store.manifest.dtype}"
    if lengths.size != shard.documents:
        yield f"{path}: {lengths.size} documents, the manifest says {shard.documents}"
    if int(lengths.sum(dtype=np.int64)) != shard.tokens:
        yield f"{path}: its lengths sum to {int(lengths.sum(dtype=np.int64))} ids, the manifest says {shard.tokens}"


def _check_source_files(store: TokenStore) -> Iterator[str]:
    try:
        _ = store.source_files
    except DataError as exc:
        yield str(exc)


def _check_metadata(store: TokenStore, number: int) -> Iterator[str]:
    """Check the sources and the columns of the documents of a shard."""
    location = store.shard_location(number)
    shard = location.shard
    for kind, expected, decode in (
        ("src", shard.src_sha256, store.shard_sources),
        ("arrow", shard.arrow_sha256, store.shard_columns),
    ):
        if not expected:
            continue
        try:
            path = store.shard_path(number, kind)
            with translate_os_errors("read", path), open_regular(path, inside=location.folder) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                    yield f"{path}: SHA-256 differs from the manifest"
            decode(number)
        except DataError as exc:
            yield str(exc)


def _check_ids(store: TokenStore, number: int) -> Iterator[tuple[int, str]]:
    """Check the ids of a shard; yield the bytes read, and a problem or ""."""
    shard = store.manifest.shards[number]
    path = store.shard_path(number, "bin")
    digest = hashlib.sha256()
    highest = -1
    for begin in range(0, shard.tokens, _CHUNK):
        try:
            ids = np.ascontiguousarray(store.read(number, begin, min(begin + _CHUNK, shard.tokens)))
        except DataError as exc:
            yield 0, str(exc)
            return
        digest.update(ids.view(np.uint8).data)
        highest = max(highest, int(ids.max()))
        yield ids.nbytes, ""
    if digest.hexdigest() != shard.sha256:
        yield 0, f"{path}: SHA-256 differs from the manifest"
    if highest >= store.vocab_size:
        yield 0, f"{path}: has id {highest}, the tokenizer's highest is {store.vocab_size - 1}"


def _check_pack(store: TokenStore, folder: Path, *, check_rows: bool) -> Iterator[str]:
    try:
        index = PackIndex.load(folder)
        index.verify()
    except DataError as exc:
        yield f"{folder}: {exc}"
        return
    yield from _check_json(folder / PACK)
    if index.store_fingerprint != store.manifest.fingerprint:
        yield f"{folder}: belongs to another store; make it again"
        return
    if check_rows:  # requires valid document boundaries
        yield from (f"{folder}: {problem}; make it again" for problem in _check_rows(store, index))


def _check_rows(store: TokenStore, index: PackIndex) -> Iterator[str]:
    """Check that the rows of a pack hold each token of the store once, and are not too long."""
    offsets = index.row_offsets
    if offsets[0] != 0 or offsets[-1] != index.length.size or (np.diff(offsets) <= 0).any():
        yield "its rows do not match its slices"
        return
    order = np.argsort(index.start, kind="stable")
    start, length = index.start[order], index.length[order].astype(np.int64)
    ends = start + length
    if start[0] != 0 or ends[-1] != store.n_tokens or (start[1:] != ends[:-1]).any() or (length <= 0).any():
        yield "its slices do not hold every token of the store exactly once"
        return
    document = index.document[order].astype(np.int64)
    if (
        document.max() >= store.n_documents
        or ((start < store.offsets[document]) | (ends > store.offsets[document + 1])).any()
    ):
        yield "a slice is not in its document"
        return
    last = ends == (store.n_tokens if index.mode == "concat" else store.offsets[document + 1])
    if (index.labels[order] != length - last).any():
        yield "the labels of a slice do not match its position"
    filled = np.add.reduceat(index.length.astype(np.int64), offsets[:-1])
    limits = np.concatenate([np.full(rows, n) for n, rows in index.buckets or ((index.seq_len, index.n_rows),)])
    if limits.size != filled.size or (filled > limits).any():
        yield "a row has too many tokens"
    if (np.add.reduceat(index.labels.astype(np.int64), offsets[:-1]) != index.valid).any():
        yield "the labels of a row do not match its slices"
