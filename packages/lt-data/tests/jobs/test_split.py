"""`lt data split`: documents on one side by their own hash, in two stores that name the shards of the first."""

import hashlib
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from lt_data import DataError, Tokenizer, TokenStore, prepare, split, verify


@pytest.fixture
def base(fast_path, tokenizer, monkeypatch) -> TokenStore:
    monkeypatch.chdir(fast_path)
    return make(tokenizer, range(300))


def make(tokenizer: Tokenizer, numbers: Any, out: str = "base", **options: Any) -> TokenStore:
    lines = [json.dumps({"text": f"text {i} ü" + " more" * (i % 9)}) + "\n" for i in numbers]
    Path(f"{out}.jsonl").write_text("".join(lines), encoding="utf-8")
    prepare([f"{out}.jsonl"], tokenizer=tokenizer, out=out, engine="hf", **{"shard_tokens": 1000, **options})
    return TokenStore(out)


def texts_of(store: TokenStore) -> list[str]:
    tokenizer = store.tokenizer()
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in store]


def expected_side(ids: list[int], share: Fraction) -> bool:
    """The definition of data-formats.md, written on its own."""
    content = b"lt-data split 1\0" + b"".join(id_.to_bytes(4, "little") for id_ in ids)
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") < share * 2**64


def test_two_stores_that_are_the_whole(base):
    train, validation = split(base, holdout="20%", train="train", validation="validation")
    stores = {name: TokenStore(name) for name in ("train", "validation")}
    held = [expected_side(ids[1:-1].tolist(), Fraction(1, 5)) for ids in base]
    assert 30 < sum(held) < 90
    for (name, store), is_held in zip(stores.items(), (False, True), strict=True):
        mine = [i for i, out in enumerate(held) if out == is_held]
        assert [ids.tolist() for ids in store] == [base[i].tolist() for i in mine]
        assert [store.document_source(n) for n in range(len(store))] == [base.document_source(i) for i in mine]
        assert verify(store) == []
        assert not list(Path(name).rglob("*.bin")), "nothing is copied"
        assert store.tokenizer().sha256 == base.tokenizer().sha256
    for manifest in (train, validation):
        assert manifest.split is not None
        assert (manifest.split.fingerprint, manifest.split.holdout) == (base.manifest.fingerprint, "1/5")
        assert manifest.read == base.manifest.kept
    assert validation.text_bytes == sum(len(text.encode()) for text in texts_of(stores["validation"]))
    assert train.text_bytes + validation.text_bytes == base.manifest.text_bytes
    assert (list(train.left_out), list(validation.left_out)) == (["held out"], ["not held out"])
    notices: list[str] = []
    again = split(base, holdout=0.2, train="train", validation="validation", notify=notices.append)
    assert (again, len(notices)) == ((train, validation), 2)
    Path("folder").mkdir()
    for name in ("base", "train", "validation"):
        Path(name).rename(f"folder/{name}")
    assert verify(TokenStore("folder/train")) == [], "links are relative"


def test_a_side_is_split_again(base):
    split(base, holdout="30%", train="train", validation="validation")
    split(TokenStore("train"), holdout="50%", train="inner", validation="outer")
    sides = [texts_of(TokenStore(name)) for name in ("inner", "outer", "validation")]
    assert sorted(text for side in sides for text in side) == sorted(texts_of(base))
    assert all(expected_side(ids[1:-1].tolist(), Fraction(1, 2)) for ids in TokenStore("outer"))


def test_errors(base, tokenizer):
    make(tokenizer, range(3), "other")
    for holdout, validation, message in (
        ("0.00001%", "v", r"none is for validation; give a larger share"),
        ("99.9999%", "v", r"none is for train; give another share"),
        ("1%", "./t", "give three folders"),
        ("1%", "other", "out = other: holds a token store already"),
        ("1%", ".", "out = .: exists and is not a token store"),
    ):
        with pytest.raises(DataError, match=message):
            split(base, holdout=holdout, train="t", validation=validation)
    path = base.shard_path(0, "bin")
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    with pytest.raises(DataError, match="SHA-256 differs"):
        split(base, holdout="10%", train="t", validation="v2")
    assert not Path("t").exists()
