"""Everything in a store against everything that is known of it: `lt data verify`.

    manifest.json   its checksum, its numbers, and that it is written as this program writes it
    tokenizer/      each file's SHA-256, and the tokenizer that they make
    shards          SHA-256 of both files; lengths that add up and offsets that fit; ids below the vocabulary
    packs           their fingerprints and headers; every token of the store in exactly one row; labels; lengths of rows

All problems are told, not only the first, so that one pass shows what has to be copied again. A single flipped bit in
any of these files is found. Cost: one read of everything; 30 bytes for each slice of the pack at hand.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lt_data.errors import DataError
from lt_data.packing.packs import FILE_NAME as PACK
from lt_data.packing.packs import PackIndex
from lt_data.progress import Progress, silent
from lt_data.storage import os_errors
from lt_data.store.manifest import FILE_NAME as MANIFEST
from lt_data.store.manifest import PACK_FOLDER, SHARD_FOLDER, TOKENIZER_FOLDER
from lt_data.store.megatron import decode_index
from lt_data.store.token_store import TokenStore

_CHUNK = 2**22  # ids that are looked at together


def problems(store: TokenStore, progress: Progress = silent) -> Iterator[str]:
    """Check a store and its packs; yields what is wrong, each with the file it is in."""
    yield from _of_json(store.path / MANIFEST)
    yield from _of_tokenizer(store)
    done, total = 0, store.n_tokens * store.dtype.itemsize
    indexes_good = True
    for number in range(len(store.manifest.shards)):
        for problem in _of_index(store, number):
            indexes_good = False
            yield problem
        for n_bytes, problem in _of_ids(store, number):
            done += n_bytes
            if problem:
                yield problem
            progress(done, total, "bytes")
    for folder in pack_folders(store):
        yield from _of_pack(store, folder, rows=indexes_good)


def verify(store: TokenStore, progress: Progress = silent) -> list[str]:
    """Check a store and its packs: what is wrong, each with the file it is in; nothing: all is as it was written."""
    return list(problems(store, progress))


def pack_folders(store: TokenStore) -> list[Path]:
    """The folders of the packs of a store, by name."""
    store.bring(PACK_FOLDER)
    folder = store.path / PACK_FOLDER
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def _of_json(path: Path) -> Iterator[str]:
    """Whether a JSON file is written as this program writes it: the same values in other bytes are a damage too."""
    with os_errors("read", path):
        content = path.read_bytes()
    try:
        values = json.loads(content)
    except ValueError as exc:
        yield f"{path}: not JSON ({exc})"
        return
    if (json.dumps(values, indent=2) + "\n").encode() != content:
        yield f"{path}: not the bytes that were written"


def _of_tokenizer(store: TokenStore) -> Iterator[str]:
    good = True
    for name, sha256 in store.manifest.tokenizer.files.items():
        path = store.path / TOKENIZER_FOLDER / name
        try:
            with os_errors("read", path), path.open("rb") as file:
                actual = hashlib.file_digest(file, "sha256").hexdigest()
        except DataError as exc:
            good = False
            yield str(exc)
            continue
        if actual != sha256:
            good = False
            yield f"{path}: its SHA-256 is not the one in the manifest"
    if good and store.manifest.tokenizer.files:
        try:
            store.tokenizer()
        except DataError as exc:
            yield str(exc)


def _of_index(store: TokenStore, number: int) -> Iterator[str]:
    shard = store.manifest.shards[number]
    path = store.path / SHARD_FOLDER / f"{shard.name}.idx"
    try:
        store.bring(f"{SHARD_FOLDER}/{shard.name}.idx")
        with os_errors("read", path):
            content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != shard.idx_sha256:
            yield f"{path}: its SHA-256 is not the one in the manifest"
        lengths, dtype = decode_index(content, str(path))
    except DataError as exc:
        yield str(exc)
        return
    if dtype != store.manifest.dtype:
        yield f"{path}: of {dtype}, the ids are {store.manifest.dtype}"
    if lengths.size != shard.documents:
        yield f"{path}: {lengths.size} documents, the manifest says {shard.documents}"
    if int(lengths.sum(dtype=np.int64)) != shard.tokens:
        yield f"{path}: its lengths add up to {int(lengths.sum(dtype=np.int64))} ids, the manifest says {shard.tokens}"


def _of_ids(store: TokenStore, number: int) -> Iterator[tuple[int, str]]:
    """Read the ids of a shard; yields the bytes read, and what is wrong or nothing."""
    shard = store.manifest.shards[number]
    path = store.path / SHARD_FOLDER / f"{shard.name}.bin"
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
        yield 0, f"{path}: its SHA-256 is not the one in the manifest"
    if highest >= store.vocab_size:
        yield 0, f"{path}: has the id {highest}, the tokenizer's highest is {store.vocab_size - 1}"


def _of_pack(store: TokenStore, folder: Path, *, rows: bool) -> Iterator[str]:
    try:
        index = PackIndex.load(folder)
        index.verify()
    except DataError as exc:
        yield f"{folder}: {exc}"
        return
    yield from _of_json(folder / PACK)
    if index.store_fingerprint != store.manifest.fingerprint:
        yield f"{folder}: belongs to another store; make it again"
        return
    if rows:  # what the documents are is known
        yield from (f"{folder}: {problem}; make it again" for problem in _of_rows(store, index))


def _of_rows(store: TokenStore, index: PackIndex) -> Iterator[str]:
    """Whether the rows of a pack hold each token of the store once, in rows that are not too long."""
    offsets = index.row_offsets
    if offsets[0] != 0 or offsets[-1] != index.length.size or (np.diff(offsets) <= 0).any():
        yield "its rows are not made of its slices"
        return
    order = np.argsort(index.start, kind="stable")
    start, length = index.start[order], index.length[order].astype(np.int64)
    ends = start + length
    if start[0] != 0 or ends[-1] != store.n_tokens or (start[1:] != ends[:-1]).any() or (length <= 0).any():
        yield "its slices do not hold every token of the store once"
        return
    document = index.document[order].astype(np.int64)
    if (
        document.max() >= store.n_documents
        or ((start < store.offsets[document]) | (ends > store.offsets[document + 1])).any()
    ):
        yield "a slice is not in the document it names"
        return
    last = ends == (store.n_tokens if index.mode == "concat" else store.offsets[document + 1])
    if (index.labels[order] != length - last).any():
        yield "a slice has other labels than its place says"
    filled = np.add.reduceat(index.length.astype(np.int64), offsets[:-1])
    limits = np.concatenate([np.full(rows, n) for n, rows in index.buckets or ((index.seq_len, index.n_rows),)])
    if limits.size != filled.size or (filled > limits).any():
        yield "a row has more tokens than fit"
    if (np.add.reduceat(index.labels.astype(np.int64), offsets[:-1]) != index.valid).any():
        yield "a row's number of labels is not that of its slices"
