"""Verification of all content of a store: `lt data verify`.

    tokenizer/      SHA-256 of each file, and of the tokenizer
    shards          SHA-256 of all files; sums of lengths; offsets; ids within the vocabulary; indices of source files;
                    columns; masks
    sources.jsonl   SHA-256; number of files
    packs           fingerprints and headers; every token of the store in exactly one row; labels; row lengths

All problems are reported, not only the first, so that one pass shows what to copy again. Cost: one read of everything;
30 bytes per slice of one pack.
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from lt_data.errors import DataError
from lt_data.packing.pack_index import PackIndex
from lt_data.packing.packs import list_packs
from lt_data.progress import Progress, no_progress
from lt_data.storage import open_regular, read_file, translate_os_errors
from lt_data.store.megatron import decode_index, index_size
from lt_data.store.token_store import TokenStore

_CHUNK = 2**22  # ids checked at a time


def find_problems(store: TokenStore, progress: Progress = no_progress) -> Iterator[str]:
    """Check a store and its packs; yield each problem with the name of its file."""
    damaged = False
    for name, sha256 in store.manifest.tokenizer.files.items():
        for problem in _check_hash(store.folder / store.manifest.tokenizer_folder / name, sha256):
            damaged = True
            yield problem
    for check in (lambda: store.source_files, *([] if damaged else [store.tokenizer])):  # `tokenizers` may abort on one
        yield from _problem_of(check)
    done, total = 0, sum(shard.tokens for shard in store.manifest.shards) * store.dtype.itemsize
    are_indexes_valid = True
    for number in range(len(store.manifest.shards)):
        for problem in _check_index(store, number):
            are_indexes_valid = False
            yield problem
        shard = store.manifest.shards[number]
        mask = (shard.mask.file, shard.mask.sha256) if shard.mask else ("", "")
        for name, sha256, decode in (
            (store.manifest.shard_file(number, "src"), shard.src_sha256, store.shard_sources),
            (store.manifest.shard_file(number, "arrow"), shard.arrow_sha256, store.shard_columns),
            (*mask, store.kept_documents),
        ):
            if sha256:
                store.download(name)
                yield from _check_hash(store.folder / name, sha256)
                yield from _problem_of(lambda decode=decode, number=number: decode(number))
        for n_bytes, problem in _check_ids(store, number):
            done += n_bytes
            if problem:
                yield problem
            progress(done, total, "bytes")
    for folder in list_packs(store):
        yield from (f"{folder}: {problem}; make it again" for problem in _check_pack(store, folder, are_indexes_valid))


def verify(store: TokenStore, progress: Progress = no_progress) -> list[str]:
    """Check a store and its packs; return the problems, each with the name of its file.

    >>> verify(store)
    []
    """
    return list(find_problems(store, progress))


def _problem_of(check: Callable[[], object]) -> Iterator[str]:
    try:
        check()
    except DataError as exc:
        yield str(exc)


def _check_hash(path: Path, sha256: str) -> Iterator[str]:
    try:
        with translate_os_errors("read", path), open_regular(path) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                yield f"{path}: SHA-256 differs from the manifest"
    except DataError as exc:
        yield str(exc)


def _check_index(store: TokenStore, number: int) -> Iterator[str]:
    shard, path = store.manifest.shards[number], store.shard_path(number, "idx")
    try:
        with translate_os_errors("read", path):
            content = read_file(path, max_bytes=index_size(shard.documents))
        if hashlib.sha256(content).hexdigest() != shard.idx_sha256:
            yield f"{path}: SHA-256 differs from the manifest"
        lengths, dtype = decode_index(content, str(path))
    except DataError as exc:
        yield str(exc)
        return
    found = (dtype, lengths.size, int(lengths.sum(dtype=np.int64)))
    expected = (store.manifest.dtype, shard.documents, shard.tokens)
    for name, have, want in zip(("dtype", "documents", "ids"), found, expected, strict=True):
        if have != want:
            yield f"{path}: {name} {have}, the manifest says {want}"


def _check_ids(store: TokenStore, number: int) -> Iterator[tuple[int, str]]:
    """Check the ids of a shard; yield the bytes read, and a problem or ""."""
    shard, path = store.manifest.shards[number], store.shard_path(number, "bin")
    digest = hashlib.sha256()
    highest = -1
    for begin in range(0, shard.tokens, _CHUNK):
        try:
            ids = np.ascontiguousarray(store.read(number, begin, min(begin + _CHUNK, shard.tokens)))
        except DataError as exc:
            yield 0, str(exc)
            return
        digest.update(ids.data)
        highest = max(highest, int(ids.max()))
        yield ids.nbytes, ""
    if digest.hexdigest() != shard.sha256:
        yield 0, f"{path}: SHA-256 differs from the manifest"
    if highest >= store.vocab_size:
        yield 0, f"{path}: has id {highest}, the tokenizer's highest is {store.vocab_size - 1}"


def _check_pack(store: TokenStore, folder: Path, are_indexes_valid: bool) -> Iterator[str]:
    """Check that the rows of a pack hold each token of the store once, and are not too long."""
    try:
        index = PackIndex.load(folder)
        index.verify()
    except DataError as exc:
        yield str(exc)
        return
    if index.store_fingerprint != store.manifest.fingerprint:
        yield "belongs to another store"
        return
    if not are_indexes_valid:  # document boundaries
        return
    offsets = index.row_offsets
    if offsets[0] != 0 or offsets[-1] != index.length.size or (np.diff(offsets) <= 0).any():
        yield "its rows do not match its slices"
        return
    order = np.argsort(index.start, kind="stable")
    start, ends = index.start[order], index.start[order] + index.length[order]
    if (np.append(start, store.n_tokens) != np.append(0, ends)).any() or (start >= ends).any():
        yield "its slices do not hold every token of the store exactly once"
        return
    document = index.document[order].astype(np.int64)
    if (
        document.max(initial=-1) >= store.n_documents
        or ((start < store.offsets[document]) | (ends > store.offsets[document + 1])).any()
    ):
        yield "a slice is not in its document"
        return
    is_last = ends == (store.n_tokens if index.mode == "concat" else store.offsets[document + 1])
    labels = np.empty(order.size, np.int64)
    labels[order] = index.length[order] - is_last
    rows = np.repeat(np.arange(index.n_rows), np.diff(offsets))
    if (np.add.reduceat(labels, offsets[:-1]) != index.valid).any() or (
        index.labels(np.arange(rows.size), rows) != labels
    ).any():
        yield "the labels of a row do not match its slices"
    if (np.add.reduceat(index.length, offsets[:-1], dtype=np.int64) > index.seq_len).any():
        yield "a row has too many tokens"
