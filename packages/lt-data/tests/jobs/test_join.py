"""Joined stores: one manifest over stores that stay where they are."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import lt_data
from lt_data import DataError, Document, Tokenizer, TokenStore

NAMES = ("a", "b/c", "d")


def make(texts: list[str], tokenizer: Tokenizer, out: Path, **options: object) -> TokenStore:
    documents = [Document(text=text, source="text") for text in texts]
    lt_data.prepare(documents, tokenizer=tokenizer, out=out, **{"shard_tokens": 2000, **options})  # type: ignore[arg-type]
    return TokenStore(out)


@pytest.fixture
def stores(tmp_path, texts, tokenizer) -> Path:
    """A folder with the texts in the stores a, b/c and d."""
    for name, part in zip(NAMES, (texts[:20], texts[20:40], texts[40:]), strict=True):
        make(part, tokenizer, tmp_path / "stores" / name)
    return tmp_path / "stores"


def test_a_joined_store_is_that_of_all_documents(stores, tmp_path, texts, tokenizer):
    parts = [TokenStore(stores / name) for name in NAMES]
    inside = lt_data.join(stores, [stores / name for name in NAMES])
    outside = lt_data.join(tmp_path / "outside", [stores / name for name in NAMES])
    assert [part.path for part in inside.parts] == [*NAMES]
    assert [part.path for part in outside.parts] == [f"parts/0000{number}" for number in range(3)]
    assert outside.fingerprint == inside.fingerprint
    wanted = [ids.tolist() for part in parts for ids in part]
    for folder in (stores, tmp_path / "outside"):
        joined = TokenStore(folder)
        assert [ids.tolist() for ids in joined] == wanted
        assert joined.manifest.text_bytes == sum(len(text.encode()) for text in texts)
        assert lt_data.verify(joined) == []
    flat, joined = make(texts, tokenizer, tmp_path / "flat"), TokenStore(stores)
    readers = [lt_data.RowReader(store, lt_data.pack(store, seq_len=64)) for store in (joined, flat)]
    rows = np.arange(readers[0].n_rows)
    assert np.array_equal(*(reader.read_tokens(rows) for reader in readers))


def test_the_fingerprint_is_a_function_of_the_shards_alone(stores, tmp_path):
    a, b, d = (stores / name for name in NAMES)
    whole = lt_data.join(tmp_path / "whole", [a, b, d])
    lt_data.join(tmp_path / "two", [a, b])
    nested = lt_data.join(tmp_path / "nested", [tmp_path / "two", d])
    assert nested.fingerprint == whole.fingerprint
    assert lt_data.verify(TokenStore(tmp_path / "nested")) == []
    assert lt_data.join(tmp_path / "one", [d]).fingerprint == TokenStore(d).manifest.fingerprint
    assert lt_data.join(tmp_path / "other", [d, a, b]).fingerprint != whole.fingerprint
    shutil.copytree(tmp_path / "nested", tmp_path / "copy")  # with what the links name
    for folder in ("stores", "two", "nested"):
        shutil.rmtree(tmp_path / folder)
    assert lt_data.verify(TokenStore(tmp_path / "copy")) == []
    with pytest.raises(DataError, match=r"cannot open the shard .*whole/parts/00000/shards/00000\.bin: No such file"):
        TokenStore(tmp_path / "whole")


def test_stores_that_do_not_fit_are_refused(stores, texts, tokenizer):
    make(texts[:9], tokenizer, stores / "no-eos", eos=False)
    make(texts[:9], lt_data.Tokenizer.train(texts, vocab_size=290), stores / "other")
    out = stores / "out"
    for parts, message in (
        (["a", "no-eos"], r"no-eos cannot be joined to .*a: eos \(True and False\)"),
        (["a", "other"], r"other cannot be joined to .*: tokenizer \("),
        (["a", "missing"], r"cannot read the token store's .*missing/manifest\.json"),
        ([], "give a list of stores"),
    ):
        with pytest.raises(DataError, match=message):
            lt_data.join(out, [stores / name for name in parts])
        assert not os.path.lexists(out)
    with pytest.raises(DataError, match="download it first"):
        lt_data.join(out, ["s3://bucket/store"])
    with pytest.raises(DataError, match="holds a store already"):
        lt_data.join(stores / "a", [stores / "d"])
