import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_data import DataError, TokenStore, pack
from lt_data.store.megatron import decode_index, encode_index
from lt_data.store.source_files import SourceFile


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 4), st.data())
def test_any_tokens_across_shards(
    counting_store: Callable[..., TokenStore], lengths: list[int], shard_documents: int, data: st.DataObject
) -> None:
    store = counting_store(lengths, shard_documents)
    assert (store.n_documents, store.n_tokens) == (len(lengths), sum(lengths))
    assert store.lengths.tolist() == lengths
    assert store.offsets.tolist() == np.cumsum([0, *lengths]).tolist()
    start = data.draw(st.integers(0, store.n_tokens))
    length = data.draw(st.integers(0, store.n_tokens - start))
    assert store.tokens(start, length).tolist() == list(range(start + 1, start + 1 + length))
    for i, n in enumerate(lengths):
        first = sum(lengths[:i]) + 1
        assert store[i].tolist() == list(range(first, first + n))


@pytest.mark.parametrize(("start", "length"), [(-1, 1), (0, 11), (11, 0), (3, -1)])
def test_tokens_outside(counting_store: Callable[..., TokenStore], start: int, length: int) -> None:
    with pytest.raises(IndexError, match="of 10"):
        counting_store([4, 6]).tokens(start, length)


@pytest.mark.parametrize("index", [-1, 2])
def test_document_outside(counting_store: Callable[..., TokenStore], index: int) -> None:
    with pytest.raises(IndexError, match=f"document {index} of 2"):
        counting_store([4, 6])[index]


def test_views_are_read_only(store: TokenStore) -> None:
    with pytest.raises(ValueError, match="read-only"):
        store[0][0] = 5


def test_verify_accepts_what_was_written(store: TokenStore) -> None:
    seen: list[tuple[int, int, str]] = []
    TokenStore(store.path).verify(progress=lambda *report: seen.append(report))
    assert seen[-1] == (2 * store.n_tokens, 2 * store.n_tokens, "bytes")


def test_verify_finds_a_flipped_bit_in_every_file(store: TokenStore) -> None:
    files = [path for folder in ("shards", "tokenizer") for path in sorted((store.path / folder).iterdir())]
    assert len(files) > 8
    for path in files:
        content = path.read_bytes()
        changed = bytearray(content)
        changed[len(changed) // 2] ^= 1
        path.write_bytes(changed)
        with pytest.raises(DataError, match=f"{path}"):
            TokenStore(store.path).verify()
        path.write_bytes(content)
    TokenStore(store.path).verify()


@pytest.mark.parametrize("name", ["00001.bin", "00001.idx"])
def test_short_or_missing_shard_is_found_when_opening(store: TokenStore, name: str) -> None:
    path = store.path / "shards" / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=rf"{path}: \d+ bytes, the manifest says \d+"):
        TokenStore(store.path)
    path.unlink()
    with pytest.raises(DataError, match=rf"cannot open the shard {path}: No such file"):
        TokenStore(store.path)


def test_an_index_of_other_boundaries_is_found(store: TokenStore) -> None:
    """A whole index of as many documents and tokens, which is not the one that was written."""
    path = store.path / "shards" / "00000.idx"
    lengths, dtype = decode_index(path.read_bytes(), str(path))
    other = lengths[::-1].astype(np.int64)
    assert (other != lengths).any()
    path.write_bytes(encode_index(other, dtype))
    with pytest.raises(DataError, match=f"{path}: SHA-256 differs from the manifest"):
        TokenStore(store.path).verify()


def test_tokenizer_that_was_exchanged(store: TokenStore) -> None:
    path = store.path / "tokenizer" / "tokenizer_config.json"
    path.write_text('{"eos_token": "<|bos|>"}', encoding="utf-8")
    with pytest.raises(DataError, match="not the tokenizer of this store"):
        store.tokenizer()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "not the manifest of a token store"),
        ({"version": 9}, "format version 9; this lt-data reads version 1: update lt-data"),
        ({"bos": False}, "fingerprint does not match"),
        ({"tokens": 5}, "tokens does not match"),
        ({"shard_tokens": 7}, "checksum does not match the fields"),
        ({"skipped": {"broken JSON line": 1}}, "checksum does not match the fields"),
        ({"surprise": 1}, "unknown field surprise; copy the store again"),
        ({"shards": 3}, "shards is an integer, not a list"),
        ({"sources": {"listed": [], "extra": 1}}, r"unknown field sources\.extra"),
    ],
)
def test_changed_manifest(store: TokenStore, change: dict[str, object], message: str) -> None:
    path = store.path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | change), encoding="utf-8")
    with pytest.raises(DataError, match=message):
        TokenStore(store.path)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"format": "lt-data-store", "version": 1}'])
def test_broken_manifest(store: TokenStore, content: bytes) -> None:
    (store.path / "manifest.json").write_bytes(content)
    with pytest.raises(DataError, match=r"manifest\.json"):
        TokenStore(store.path)


def test_no_store(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"cannot read the token store's {tmp_path}/manifest\.json"):
        TokenStore(tmp_path)


def test_opening_reads_no_index(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(store, seq_len=64)

    def refuse(*_: object) -> None:
        raise AssertionError("an index was read")

    monkeypatch.setattr("lt_data.store.document_index.decode_index", refuse)
    opened = TokenStore(store.path)
    assert opened.n_documents == store.n_documents
    assert opened.tokens(0, 1).tolist() == [0]


def test_the_place_of_a_document_is_looked_up_in_the_map(
    counting_store: Callable[..., TokenStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [3, 9, 4, 1, 1, 12, 7]
    store = counting_store(lengths, 2)
    monkeypatch.setattr("lt_data.store.document_index.decode_index", None)  # reads an index whole
    begins = np.cumsum([0, *lengths])
    for i, length in enumerate(lengths):
        assert store.document_span(i) == (begins[i], length)
        assert store[i].tolist() == list(range(begins[i] + 1, begins[i] + length + 1))
    for outside in (-1, 7):
        with pytest.raises(IndexError, match=f"document {outside} of 7"):
            store.document_span(outside)


def test_a_place_outside_its_shard_is_refused(counting_store: Callable[..., TokenStore]) -> None:
    store = counting_store([3, 9, 4], 3)
    path = store.path / "shards" / "00000.idx"
    content = bytearray(path.read_bytes())
    content[34 + 4 : 34 + 8] = (99).to_bytes(4, "little")  # the length of the second document
    path.write_bytes(content)
    assert store.document_span(0) == (0, 3)
    with pytest.raises(DataError, match=r"00000\.idx: broken index \(document 1\)"):
        store.document_span(1)


@pytest.mark.parametrize("sha256", ["", "x" * 64, "ab" * 31, "AB" * 32])
def test_a_source_file_with_a_hash_that_is_none_is_refused_by_name(sha256: str) -> None:
    assert SourceFile(path="a.txt", bytes=1, sha256="ab" * 32).sha256 == "ab" * 32
    with pytest.raises(DataError, match=r"sha256 of a\.txt = '.*' is not a SHA-256 in hexadecimal"):
        SourceFile(path="a.txt", bytes=1, sha256=sha256)
