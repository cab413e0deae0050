"""Stores: places of tokens and documents, with and without masks, and damage to their files."""

import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_data import DataError, TokenStore, pack, verify
from lt_data.preparation.masking import mask_documents
from lt_data.store import token_store
from lt_data.store.manifest import checksum_of, encode_manifest, write_manifest
from lt_data.store.megatron import decode_index, encode_index
from lt_data.streaming.runs import copy_runs, tokens_at

SEQ_LEN = 8
DOCUMENTS = st.lists(st.tuples(st.sampled_from([1, 2, 3, 7, 60]), st.booleans()), min_size=1, max_size=30)


def keep_documents(store: TokenStore, keep: np.ndarray) -> TokenStore:
    """Return a store, in the same folder, with only some of its documents."""
    masked = replace(store.manifest, parts=mask_documents(store, keep, store.folder))
    write_manifest(replace(masked, read=masked.kept, left_out={}), store.folder / "manifest.json")
    return TokenStore(store.folder)


@given(DOCUMENTS, st.integers(1, 6), st.data())
def test_places_are_those_of_the_kept_documents(counting_store, documents, shard_documents, data):
    """Tokens, documents, lengths and runs, against a list of the ids; masks of masks too."""
    lengths, keep = np.array([length for length, _ in documents]), np.array([kept for _, kept in documents])
    keep[data.draw(st.integers(0, keep.size - 1))] = True
    ids = np.split(np.arange(1, lengths.sum() + 1), np.cumsum(lengths)[:-1])
    store = counting_store(lengths.tolist(), shard_documents)
    if data.draw(st.booleans()):
        wider = keep | np.array(data.draw(st.lists(st.booleans(), min_size=keep.size, max_size=keep.size)))
        store = keep_documents(keep_documents(store, wider), keep[wider])
    elif not keep.all():
        store = keep_documents(store, keep)
    wanted = [ids[i].tolist() for i in np.flatnonzero(keep)]
    flat = np.concatenate([ids[i] for i in np.flatnonzero(keep)])
    assert (len(store), store.n_tokens, store.lengths.tolist()) == (len(wanted), flat.size, [*map(len, wanted)])
    assert [document.tolist() for document in store] == wanted
    offsets = np.cumsum([0, *map(len, wanted)])
    assert store.offsets.tolist() == offsets.tolist()
    assert [store.document_span(i) for i in range(len(store))] == [(a, b - a) for a, b in pairwise(offsets)]
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(store))] * 2)))
    assert store.read_lengths(first, last).tolist() == [*map(len, wanted[first:last])]
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, flat.size)] * 2)))
    assert store.tokens(begin, end - begin).tolist() == flat[begin:end].tolist()
    start = np.array(data.draw(st.lists(st.integers(0, max(flat.size - SEQ_LEN, 0)), min_size=1, max_size=9)))
    size = np.minimum(data.draw(st.integers(1, SEQ_LEN)), flat.size - start)
    rows = [[*flat[a : a + n].tolist(), *[0] * (SEQ_LEN - n)] for a, n in zip(start, size, strict=True)]
    assert copy_runs(store, np.arange(start.size), start, size, n=start.size, seq_len=SEQ_LEN).tolist() == rows
    assert tokens_at(store, start).tolist() == flat[start].tolist()


def test_masks_after_a_shard_is_gone_leave_the_other_masks_alone(counting_store):
    """Shards move up, so a number is that of another shard's mask; both have one document, in different places."""
    store = counting_store([1, 1, 1, 4, 5, 6, 7, 8, 9], 3)
    once = keep_documents(store, np.array([0, 0, 0, 0, 1, 0, 1, 1, 0], bool))
    before = {path: path.read_bytes() for path in (store.folder / "keep").iterdir()}
    twice = keep_documents(once, np.array([1, 1, 0], bool))
    assert twice.lengths.tolist() == [5, 7]
    assert {path: path.read_bytes() for path in before} == before


def test_places_in_a_shard_of_several_blocks_of_documents(counting_store):
    """Blocks of 512 documents, of which one keeps none."""
    rng = np.random.default_rng(0)
    lengths, keep = rng.integers(1, 9, 3000), rng.random(3000) < 0.4
    keep[1024:1536] = False
    keep[0] = keep[-1] = True
    whole = counting_store(lengths.tolist(), 3000)
    flat = np.arange(1, lengths.sum() + 1)[np.repeat(keep, lengths)]
    store = keep_documents(whole, keep)
    assert np.array_equal(np.concatenate([*store]), flat)
    for begin, end in rng.integers(0, flat.size, (200, 2)).tolist():
        assert np.array_equal(store.tokens(min(begin, end), abs(end - begin)), flat[min(begin, end) : max(begin, end)])


@pytest.mark.parametrize(("start", "length"), [(-1, 1), (0, 11), (11, 0), (3, -1)])
def test_tokens_outside(counting_store, start, length):
    store = counting_store([4, 6])
    with pytest.raises(IndexError, match="of 10"):
        store.tokens(start, length)
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"document {index} of 2"):
            store[index]
    with pytest.raises(ValueError, match="read-only"):
        store[0][0] = 5


def test_verify_finds_a_flipped_bit_in_every_file(store):
    seen: list[tuple[int, int, str]] = []
    masked = keep_documents(store, np.arange(len(store)) % 3 > 0)
    masked.verify(progress=lambda *report: seen.append(report))
    assert seen[-1][0] == seen[-1][1]
    assert verify(masked) == []
    names = masked.manifest.file_hashes()
    assert {name.split("/")[0] for name in names} == {"tokenizer", "shards", "keep"}
    for path in (store.folder / name for name in names):
        content = path.read_bytes()
        changed = bytearray(content)
        changed[-1] ^= 1
        path.write_bytes(changed)
        with pytest.raises(DataError, match=f"{path.name}"):
            TokenStore(store.folder).verify()
        assert any(path.name in problem for problem in verify(TokenStore(store.folder)))
        path.write_bytes(content)


@pytest.mark.parametrize("name", ["00001.bin", "00001.idx"])
def test_short_or_missing_shard_is_found_when_opening_and_when_first_read(store, name):
    path = store.folder / "shards" / name
    path.write_bytes(path.read_bytes()[:-1])
    for read in (lambda: TokenStore(store.folder), lambda: (store.read_shard(1), store.shard_lengths(1))):
        with pytest.raises(DataError, match=rf"{path}: \d+ bytes, the manifest says \d+"):
            read()
    path.unlink()
    with pytest.raises(DataError, match=rf"cannot open the shard {path}: No such file"):
        TokenStore(store.folder)


def test_an_index_of_other_boundaries(store, counting_store):
    """A whole index of as many documents and tokens, which is not the one that was written; and one that is broken."""
    path = store.folder / "shards" / "00000.idx"
    lengths, dtype = decode_index(path.read_bytes(), str(path))
    path.write_bytes(encode_index(lengths[::-1].astype(np.int64), dtype))
    with pytest.raises(DataError, match=f"{path}: SHA-256 differs from the manifest"):
        TokenStore(store.folder).verify()
    broken = counting_store([3, 9, 4], 3)
    path = broken.folder / "shards" / "00000.idx"
    content = bytearray(path.read_bytes())
    content[34 + 4 : 34 + 8] = (99).to_bytes(4, "little")  # the length of the second document
    path.write_bytes(content)
    assert broken.document_span(0) == (0, 3)
    with pytest.raises(DataError, match=r"00000\.idx: broken index \(document 1\)"):
        broken.document_span(1)
    with pytest.raises(DataError, match=r"00000\.idx: not the lengths of its shard"):
        _ = broken.lengths


def test_tokenizer_that_was_exchanged(store):
    (store.folder / "tokenizer" / "tokenizer_config.json").write_text('{"eos_token": "<|bos|>"}', encoding="utf-8")
    with pytest.raises(DataError, match="not the tokenizer of this store"):
        store.tokenizer()


def set_in(*keys: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that sets a value in a manifest: the keys on the way, and the value."""
    *way, last, value = keys

    def change(values: Any) -> None:
        for key in way:
            values = values[key]
        values[last] = value

    return change


SHARD = ("parts", 0, "shards", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_in("format", "other"), "not the manifest of a token store"),
        (set_in("version", 9), "format version 9; this lt-data reads version 1: update lt-data"),
        (set_in("bos", False), "fingerprint does not match"),
        (set_in("tokens", 5), "tokens does not match"),
        (set_in("surprise", 1), "unknown field surprise; copy the store again"),
        (set_in("parts", 3), "parts is an integer, not a list"),
        (set_in("parts", []), "parts: none"),
        (set_in("parts", 0, "sources", "extra", 1), r"unknown field parts\[0\]\.sources\.extra"),
        (set_in(*SHARD, "sha256", "../../x"), "is not a SHA-256 in hexadecimal"),
        (set_in(*SHARD, "documents", -1), "documents = -1: not a count"),
        (set_in("read", "tokens", True), r"read\.tokens is true or false, not an integer"),
        (set_in("dtype", "float16"), "dtype is a string, not one of 'uint16', 'uint32'"),
        *((set_in(*SHARD, "name", name), "shard: file name") for name in ("../../victim", "/etc/passwd", "..")),
        *((set_in("parts", 0, "path", name), "part: file name") for name in ("..", "/etc", "a/../../b", "")),
        (set_in("tokenizer", "files", {"../../evil": "0" * 64}), "tokenizer.files: file name"),
        (
            set_in(*SHARD, "mask", {"file": "../keep/0", "sha256": "0" * 64, "documents": 1, "tokens": 1}),
            "mask: file name",
        ),
    ],
)
def test_a_changed_manifest_is_refused(store, change, message):
    path = store.folder / "manifest.json"
    values = json.loads(path.read_bytes())
    change(values)
    values["checksum"] = checksum_of({name: values[name] for name in values if name != "checksum"})
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(DataError, match=rf"manifest\.json: .*{message}"):
        TokenStore(store.folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((content, "manifest.json: ") for content in (b"", b"[]", b"\xff", b'{"format": "lt-data-store"}')),
        (None, "is not a token store .*no manifest.json.*lt data prepare"),
    ],
)
def test_a_manifest_that_is_none(store, content, message):
    path = store.folder / "manifest.json"
    values = path.read_bytes()
    path.write_bytes(values.replace(b'"shard_tokens": 2000', b'"shard_tokens": 2001'))
    with pytest.raises(DataError, match="checksum does not match the fields"):
        TokenStore(store.folder)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        TokenStore(store.folder)


def test_a_file_of_text_is_not_a_store(tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=r"corpus\.jsonl is not a token store .*: lt data prepare .*corpus\.jsonl"):
        TokenStore(tmp_path / "corpus.jsonl")


def test_opening_reads_no_index(store, monkeypatch):
    pack(store, seq_len=64)
    monkeypatch.setattr(token_store, "map_file", None)
    assert len(TokenStore(store.folder)) == len(store)


def test_threads_read_while_maps_are_released(counting_store, monkeypatch):
    monkeypatch.setattr(token_store, "_MAX_MAPS", 40)
    store = counting_store([21] * 100, 1)
    wrong: list[object] = []

    def read(seed: int) -> None:
        for start in np.random.default_rng(seed).integers(0, 2000, 900).tolist():
            if store.tokens(start, 64).tolist() != [*range(start + 1, start + 65)]:
                wrong.append(start)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_many_shards_are_read_under_few_descriptors(counting_store):
    store = counting_store([8] * 600, 1)
    again = pickle.loads(pickle.dumps(store))
    assert again.tokens(0, 4800).tolist() == [*range(1, 4801)]
    assert len(pickle.dumps(again)) < len(encode_manifest(store.manifest))
    script = f"""
import resource, os
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from lt_data import TokenStore
store = TokenStore({str(store.folder)!r})
assert store.tokens(0, 4800).tolist() == [*range(1, 4801)]
assert [store.document_span(i) for i in range(600)] == [(8 * i, 8) for i in range(600)]
assert len(os.listdir("/proc/self/fd")) < 20
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
