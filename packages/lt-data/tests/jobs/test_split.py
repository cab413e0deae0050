"""`lt data split`: documents on one side by their own hash, in two ordinary stores."""

import hashlib
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lt_data import DataError, Document, Tokenizer, TokenStore, prepare, split
from lt_data.__main__ import main
from lt_data.preparation.split import parse_holdout

Contents = Callable[[Path], dict[str, bytes]]


@pytest.fixture
def base(fast_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> TokenStore:
    monkeypatch.chdir(fast_path)
    return make(tokenizer, range(300))


def make(tokenizer: Tokenizer, numbers: Any, out: str = "base", **options: Any) -> TokenStore:
    documents = [Document(text=f"text {i} ü" + " more" * (i % 9), source=str(i)) for i in numbers]
    prepare(documents, tokenizer=tokenizer, out=out, **{"shard_tokens": 1000, **options})
    return TokenStore(out)


def texts_of(store: TokenStore) -> list[str]:
    tokenizer = store.tokenizer()
    return [tokenizer.decode(store[i], skip_special_tokens=True) for i in range(store.n_documents)]


def expected_side(ids: list[int], share: Fraction) -> bool:
    """The definition of data-formats.md, written on its own."""
    content = b"lt-data split 1\0" + b"".join(id_.to_bytes(4, "little") for id_ in ids)
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") < share * 2**64


def test_two_stores_that_are_the_whole(base: TokenStore) -> None:
    train, validation = split(base, holdout="20%", train="train", validation="validation")
    stores = {name: TokenStore(name) for name in ("train", "validation")}
    for store in stores.values():
        store.verify()
        assert store.tokenizer().sha256 == base.tokenizer().sha256
    held = [expected_side(base[i][1:-1].tolist(), Fraction(1, 5)) for i in range(300)]
    assert 30 < sum(held) < 90
    texts = texts_of(base)
    assert texts_of(stores["validation"]) == [text for text, out in zip(texts, held, strict=True) if out]
    assert texts_of(stores["train"]) == [text for text, out in zip(texts, held, strict=True) if not out]
    for manifest in (train, validation):
        assert manifest.split is not None
        assert (manifest.split.fingerprint, manifest.split.holdout) == (base.manifest.fingerprint, "1/5")
        assert manifest.read == base.manifest.kept
        assert manifest.shard_tokens == 1000
    assert validation.text_bytes == sum(len(text.encode()) for text in texts_of(stores["validation"]))
    assert train.text_bytes + validation.text_bytes == base.manifest.text_bytes
    assert list(train.left_out) == ["held out"]
    assert list(validation.left_out) == ["not held out"]


@pytest.mark.parametrize("options", [{}, {"bos": False, "eos": False}, {"shard_tokens": 50}])
def test_stable_when_documents_are_added(base: TokenStore, tokenizer: Tokenizer, options: dict[str, Any]) -> None:
    split(base, holdout=0.1, train="train", validation="validation")
    more = make(tokenizer, [*range(500, 600), *reversed(range(300)), 7, 7], "more", **options)
    split(more, holdout=0.1, train="train2", validation="validation2")
    one, two = ({side: set(texts_of(TokenStore(side + n))) for side in ("train", "validation")} for n in ("", "2"))
    assert one["train"] < two["train"]
    assert one["validation"] < two["validation"]
    assert not two["train"] & two["validation"]


def test_text_bytes_that_the_ids_do_not_tell(base: TokenStore, tokenizer: Tokenizer) -> None:
    documents = [
        Document(text="some text", source="a"),
        *(Document(ids=np.arange(9) + i, source="b") for i in range(30)),
    ]
    prepare(documents, tokenizer=tokenizer, out="mixed")
    notices: list[str] = []
    train, validation = split(TokenStore("mixed"), holdout="50%", train="t", validation="v", notify=notices.append)
    assert (train.text_bytes, validation.text_bytes) == (0, 0)
    assert notices == ["text bytes of the two stores are unknown: those of the ids do not sum to those of the store"]
    assert base.manifest.split is None


@pytest.mark.parametrize("value", ["0", "0%", "100%", "1", "-1%", "a", "1/0", "nan", "inf"])
def test_shares_that_are_none(value: str) -> None:
    with pytest.raises(DataError, match="holdout = "):
        parse_holdout(value)


def test_shares() -> None:
    assert parse_holdout("0.1%") == parse_holdout(0.001) == parse_holdout("1/1000") == Fraction(1, 1000)


def test_errors(base: TokenStore, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"none is for validation; give a larger share"):
        split(base, holdout="0.00001%", train="t", validation="v")
    with pytest.raises(DataError, match=r"none is for train; give another share"):
        split(base, holdout="99.9999%", train="t", validation="v")
    with pytest.raises(DataError, match="give three folders"):
        split(base, holdout="1%", train="t", validation="./t")
    make(tokenizer, range(3), "v")
    with pytest.raises(DataError, match="out = v: holds a token store already"):
        split(base, holdout="1%", train="t", validation="v")
    path = base.path / "shards/00000.bin"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    with pytest.raises(DataError, match="SHA-256 differs"):
        split(base, holdout="10%", train="t", validation="v2")
    assert not Path("t").exists()


def test_on_the_command_line(
    base: TokenStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["lt-data", "split", str(base.path), "--holdout", "10%", "--train", "t", "--validation", "v"]
    monkeypatch.setattr(sys, "argv", command)
    assert main() in (0, None)
    sizes = [TokenStore(name) for name in ("t", "v")]
    lines = [f"{store.n_documents} documents, {store.n_tokens} tokens in {store.path}" for store in sizes]
    assert capsys.readouterr().out.splitlines() == lines
